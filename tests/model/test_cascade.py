from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl.model import cascade
from qerl.model.attention import ForestAttend, PaddedForest
from qerl.model.cascade import Part, cascade_attention, parts_of
from qerl.model.linear import LoRAConfig
from qerl.model.load import load_policy
from qerl.model.source import Toy
from qerl.quant.nvfp4 import NVFP4
from qerl.types import Segment

TREES: dict[str, list[tuple[int | None, int, bool]]] = {
    "one sequence": [(None, 9, False)],
    "two prompts": [(None, 9, False), (None, 4, False), (0, 1, True), (1, 30, True), (0, 6, True)],
    "shared system part": [
        (None, 6, False),
        (0, 4, False),
        (1, 5, True),
        (1, 8, True),
        (0, 3, False),
        (4, 7, True),
        (None, 5, False),
    ],
}


def groups(part: Part) -> list[tuple[slice, slice]]:
    """Queries and keys of each group within the rows of the part."""
    q, k = part.query_ends.tolist(), part.key_ends.tolist()
    return [(slice(q[i], q[i + 1]), slice(k[i], k[i + 1])) for i in range(len(part.query_ends) - 1)]


def scores(q: Tensor, k: Tensor, part: Part) -> Tensor:
    """Scaled products [H, nq, nk] of one group, -inf where hidden."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    if part.causal:
        s = s.masked_fill(~torch.ones(s.shape[1:], dtype=torch.bool).tril(), -torch.inf)
    return s


def slow_forward(q: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """What the flash kernel computes, by the definition."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for Q, K in groups(part):
        s = scores(q[Q], k[K], part)
        values = v[K].repeat_interleave(q.shape[1] // k.shape[1], 1)
        out[Q] = torch.einsum("hqk,khd->qhd", s.softmax(-1), values)
        lse[:, Q] = s.logsumexp(-1)
    return out, lse


def slow_backward(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, part: Part
) -> tuple[Tensor, Tensor, Tensor]:
    """The flash backward as its paper states it (arXiv:2307.08691, Algorithm 2)."""
    q, k, v = inputs
    dq, dk, dv = (torch.zeros_like(x) for x in inputs)
    group = q.shape[1] // k.shape[1]
    for Q, K in groups(part):
        p = (scores(q[Q], k[K], part) - lse[:, Q, None]).exp()  # [H, nq, nk]
        keys, values = (x[K].repeat_interleave(group, 1) for x in (k, v))
        dp = torch.einsum("qhd,khd->hqk", grad[Q], values)
        delta = (grad[Q] * out[Q]).sum(-1).T[..., None]  # [H, nq, 1]
        ds = p * (dp - delta) * q.shape[2] ** -0.5
        dq[Q] = torch.einsum("hqk,khd->qhd", ds, keys)
        dk[K] = torch.einsum("hqk,qhd->khd", ds, q[Q]).unflatten(1, (-1, group)).sum(2)
        dv[K] = torch.einsum("hqk,qhd->khd", p, grad[Q]).unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


@pytest.mark.parametrize("name", TREES)
def test_parts_add_up_to_the_whole_with_its_gradients(
    name: str, forest: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade, "flash_forward", slow_forward)
    monkeypatch.setattr(cascade, "flash_backward", slow_backward)
    segments = _segments(TREES[name])
    S = sum(s.length for s in segments)
    inputs = [torch.randn(S, h, 8, requires_grad=True) for h in (4, 2, 2)]
    grad = torch.randn(S, 4, 8)
    got = cascade_attention(*inputs, parts_of(segments, "cpu"))
    wanted = PaddedForest(segments, "cpu")(*inputs)
    assert (got - wanted).abs().max() < 1e-5
    got_grads = torch.autograd.grad(got, inputs, grad)
    wanted_grads = torch.autograd.grad(wanted, inputs, grad)
    for a, b in zip(got_grads, wanted_grads, strict=True):
        assert (a - b).abs().max() < 1e-5


def _segments(tree: list[tuple[int | None, int, bool]]) -> list[Segment]:
    segments, start = [], 0
    for parent, length, _ in tree:
        segments.append(Segment(start=start, length=length, parent=parent))
        start += length
    return segments


def test_a_shared_prompt_is_read_once_for_all_its_completions() -> None:
    tree: list[tuple[int | None, int, bool]] = [(None, 100, False), *[(0, 10, True)] * 8]
    own, shared = parts_of(_segments(tree), "cpu")
    assert (own.query_rows, own.key_rows, own.causal) == (None, None, True)
    assert own.query_ends.tolist() == [0, *range(100, 181, 10)]
    assert shared.key_rows is not None
    assert shared.query_rows is not None
    assert shared.key_rows.tolist() == list(range(100))
    assert shared.query_rows.tolist() == list(range(100, 180))
    assert (shared.query_ends.tolist(), shared.key_ends.tolist()) == ([0, 80], [0, 100])
    assert not shared.causal


@pytest.mark.gpu
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
def test_on_cuda_bf16_is_as_near_to_fp64_as_rounding_allows(
    name: str, heads: tuple[int, int]
) -> None:
    segments = _segments([(p, 37 * n, s) for p, n, s in TREES[name]])
    S = sum(s.length for s in segments)
    narrow = [
        torch.randn(S, h, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for h in (heads[0], heads[1], heads[1])
    ]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    grad = torch.randn(S, heads[0], 64, device="cuda", dtype=torch.bfloat16)
    got = ForestAttend(segments, "cuda")(0, *narrow)
    wanted = PaddedForest(segments, "cuda")(*wide)
    got_grads = torch.autograd.grad(got, narrow, grad)
    wanted_grads = torch.autograd.grad(wanted, wide, grad.double())
    for a, b in zip((got, *got_grads), (wanted, *wanted_grads), strict=True):
        assert ((a - b).norm() / b.norm()).item() < 8e-3  # two to three bf16 roundings (2^-9 each)


@pytest.mark.gpu
def test_a_policy_on_cuda_scores_as_on_the_cpu(forest: Callable[..., Any]) -> None:
    packed, _ = forest([(None, 40, False), (0, 20, False), (1, 30, True), (1, 50, True)])
    lora = LoRAConfig(rank=8, alpha=16)
    cpu = load_policy(Toy(layers=4), NVFP4(), lora)
    gpu = load_policy(Toy(layers=4), NVFP4(), lora, dtype=torch.bfloat16).to("cuda")
    for policy in (cpu, gpu):
        torch.manual_seed(1)
        for adapter in policy.adapters().values():
            adapter.lora_b.data.copy_(torch.randn(adapter.lora_b.shape) * 0.05)
    grads = []
    results = []
    for policy, device in ((cpu, "cpu"), (gpu, "cuda")):
        logprobs, entropy = policy.score(packed.to(device), 0.8)
        logprobs.mean().backward()
        results.append((logprobs.detach().cpu(), entropy.cpu()))
        parameters = [p for p in policy.parameters() if p.requires_grad]
        grads.append(torch.cat([p.grad.flatten().cpu() for p in parameters if p.grad is not None]))
    assert (results[0][0] - results[1][0]).abs().max() < 0.1
    assert (results[0][1] - results[1][1]).abs().max() < 0.1
    assert ((grads[0] - grads[1]).norm() / grads[0].norm()).item() < 0.05
