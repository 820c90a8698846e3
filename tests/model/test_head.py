import pytest
import torch
from torch import Tensor

from qerl.model import head as head_file
from qerl.model.head import chosen_logprobs


def by_hand(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Row by row in fp64."""
    logprobs, entropy = [], []
    for h, target in zip(hidden.double(), targets, strict=True):
        p = ((head.double() @ h) / temperature).softmax(0)
        logprobs.append(p[target].log())
        entropy.append(-(p * p.log()).sum())
    return torch.stack(logprobs), torch.stack(entropy)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize("chunk", [1, 7, 33, 1000, None])
def test_any_chunk_gives_the_logprobs_entropy_and_gradient_of_a_loop(
    temperature: float, chunk: int | None
) -> None:
    hidden, head = torch.randn(33, 16, requires_grad=True), torch.randn(50, 16)
    targets, weights = torch.randint(0, 50, (33,)), torch.randn(33)
    logprobs, entropy = chosen_logprobs(hidden, head, targets, temperature, chunk)
    wanted, spread = by_hand(hidden, head, targets, temperature)
    assert (logprobs - wanted).abs().max() < 1e-5
    assert (entropy - spread).abs().max() < 1e-5
    (slope,) = torch.autograd.grad((logprobs * weights).sum(), hidden)
    (wanted_slope,) = torch.autograd.grad((wanted * weights).sum(), hidden)
    assert (slope - wanted_slope).abs().max() < 1e-5
    assert not entropy.requires_grad


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.full((2, 4), 1000.0, requires_grad=True)
    head = torch.tensor([[1.0] * 4, [-1.0] * 4, [0.0] * 4])
    logprobs, entropy = chosen_logprobs(hidden, head, torch.tensor([0, 1]))
    assert logprobs.tolist() == [0.0, -8000.0]
    assert entropy.tolist() == [0.0, 0.0]


def test_autograd_keeps_no_row_of_the_vocabulary() -> None:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    hidden, head = torch.randn(40, 8, requires_grad=True), torch.randn(5000, 8)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chosen_logprobs(hidden, head, torch.zeros(40, dtype=torch.long))
    assert sum(t.numel() for t in saved) == hidden.numel()


def test_logits_are_computed_once_for_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    plain = head_file.project

    def counted(hidden: Tensor, head: Tensor) -> Tensor:
        rows.append(len(hidden))
        return plain(hidden, head)

    monkeypatch.setattr(head_file, "project", counted)
    monkeypatch.setattr(head_file, "CHUNK_CELLS", 1000)
    hidden, head = torch.randn(45, 8, requires_grad=True), torch.randn(100, 8)
    logprobs, _ = chosen_logprobs(hidden, head, torch.zeros(45, dtype=torch.long))
    logprobs.sum().backward()
    assert rows == [10, 10, 10, 10, 5]


def test_without_gradient_nothing_is_stored() -> None:
    hidden, head = torch.randn(3, 8), torch.randn(20, 8)
    logprobs, _ = chosen_logprobs(hidden, head, torch.zeros(3, dtype=torch.long))
    assert not logprobs.requires_grad


def test_bf16_rows_give_fp32_logprobs_near_the_loop() -> None:
    hidden = torch.randn(33, 64).bfloat16().requires_grad_()
    head, targets = (torch.randn(200, 64) * 0.1).bfloat16(), torch.randint(0, 200, (33,))
    logprobs, _ = chosen_logprobs(hidden, head, targets)
    wanted, _ = by_hand(hidden, head, targets, 1.0)
    assert logprobs.dtype == torch.float32
    assert (logprobs - wanted).abs().max() < 2e-2
    (slope,) = torch.autograd.grad(logprobs.sum(), hidden)
    (wanted_slope,) = torch.autograd.grad(wanted.sum(), hidden)
    assert slope.dtype == torch.bfloat16
    assert ((slope - wanted_slope).norm() / wanted_slope.norm()) < 1e-2


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_gives_no_distribution_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        chosen_logprobs(
            torch.randn(1, 4), torch.randn(5, 4), torch.zeros(1, dtype=torch.long), temperature
        )
