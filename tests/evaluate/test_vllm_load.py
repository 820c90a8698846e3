"""The comparison with vLLM, with our own policy in vLLM's place."""

from pathlib import Path
from typing import Any

import pytest
import torch

from qerl.evaluate import vllm_load
from qerl.evaluate.vllm_load import PaddedSource, VllmLoadBench, generate
from qerl.model.attention import ForestAttend
from qerl.model.load import load_policy
from qerl.model.policy import Policy
from qerl.model.source import Folder, Toy
from qerl.quant.bf16 import BF16
from qerl.quant.nvfp4 import NVFP4
from qerl.rollout.parity import completion_logprobs
from qerl.types import Segment


def logits(policy: Policy, tokens: list[int]) -> torch.Tensor:
    attend = ForestAttend([Segment(start=0, length=len(tokens), parent=None)])
    with torch.no_grad():
        hidden = policy.decoder(torch.tensor(tokens), torch.arange(len(tokens)), attend)
        return policy.decoder.logits(hidden)


def greedily(
    folder: Path, prompts: Any, new_tokens: int, memory_share: float, shift: float = 0.0
) -> list[tuple[list[int], list[float]]]:
    """What vLLM would answer, by forwards over growing sequences."""
    policy = load_policy(Folder(folder), NVFP4(), None)
    answers = []
    for prompt in prompts:
        tokens, chosen = list(prompt), []
        for _ in range(new_tokens):
            distribution = logits(policy, tokens)[-1].log_softmax(-1)
            tokens.append(int(distribution.argmax()))
            chosen.append(float(distribution.max()) + shift)
        answers.append((tokens[len(prompt) :], chosen))
    return answers


class Asked:
    """A finished call in place of one in another process."""

    def __init__(self, call: Any) -> None:
        self._error: BaseException | None = None
        try:
            self._result = call()
        except ValueError as error:
            self._error = error

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        return self._result


class Here:
    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, function: Any, *arguments: Any) -> Asked:
        return Asked(lambda: function(*arguments))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VllmLoadBench:
    monkeypatch.setattr(vllm_load, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(vllm_load, "SmolLM2Gguf", Toy)
    monkeypatch.setattr(vllm_load, "_QUESTIONS", ("What is 1 + 1?", "Name a colour."))
    return VllmLoadBench(
        models=("smollm2-135m",), new_tokens=3, folder=str(tmp_path / "vllm"), device="cpu"
    )


def test_equal_kernels_agree_to_rounding(
    bench: VllmLoadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_load, "generate", greedily)
    rows: list[dict[str, Any]] = []
    bench.run(rows)
    assert rows[0]["loads"]
    assert rows[0]["agrees"]
    assert rows[0]["tokens"] == 6
    assert rows[0]["max_abs_nats"] < 1e-4
    assert rows[0]["mean_logprob_nats"] < -0.1


def test_a_difference_beyond_the_bound_is_seen(
    bench: VllmLoadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_load, "generate", lambda *a: greedily(*a, shift=0.1))
    rows: list[dict[str, Any]] = []
    bench.run(rows)
    assert not rows[0]["agrees"]
    assert rows[0]["mean_abs_nats"] == pytest.approx(0.1, abs=1e-4)
    assert rows[0]["mean_signed_nats"] == pytest.approx(-0.1, abs=1e-4)


def test_a_model_that_vllm_refuses_says_why(
    bench: VllmLoadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise ValueError("Invalid thread config:\nN = 960")

    monkeypatch.setattr(vllm_load, "generate", refused)
    rows: list[dict[str, Any]] = []
    bench.run(rows)
    assert rows[0]["loads"] is False
    assert rows[0]["error"] == "Invalid thread config: N = 960"


def test_without_vllm_the_extra_is_named(tmp_path: Path) -> None:
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match=r"pip install qerl\[vllm\]"):
            generate(tmp_path, [[1]], 1, 0.1)


def test_scores_are_those_of_the_whole_sequence() -> None:
    policy = load_policy(Toy(), NVFP4(), None)
    prompt, completion = [5, 6, 7, 8], [9, 10, 11]
    wanted = logits(policy, prompt + completion).log_softmax(-1)[3:6]
    wanted = wanted.gather(1, torch.tensor(completion)[:, None])[:, 0]
    found = completion_logprobs(policy, prompt, completion)
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_padded_width_computes_the_same(family: Any) -> None:
    toy = Toy(family=family, hidden_size=128, tied=family == "llama")
    plain = load_policy(toy, BF16(), None)
    padded = load_policy(PaddedSource(toy, 512), BF16(), None)  # sqrt(128 / 512) is exact in bf16
    assert padded.spec.hidden_size == 512
    tokens = [5, 6, 7, 8, 9]
    assert torch.allclose(logits(padded, tokens), logits(plain, tokens), atol=1e-4)


def test_a_family_without_a_head_width_of_its_own_is_not_padded() -> None:
    with pytest.raises(ValueError, match="config of qwen2 has no head width"):
        PaddedSource(Toy(family="qwen2"), 512)
