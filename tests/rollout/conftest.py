"""Builders shared by the rollout room's tests: toy policies with live adapters, prompts, scores."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from qerl.model.linear import LoRAConfig
from qerl.model.load import load_policy
from qerl.model.policy import Policy
from qerl.model.source import Toy
from qerl.model.spec import Family
from qerl.quant.nvfp4 import NVFP4
from qerl.types import Packed, Prompts, Rollouts, Segment


def _perturb_adapters(policy: Policy, std: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for adapter in policy.adapters().values():
            adapter.lora_b.copy_(torch.randn(adapter.lora_b.shape, generator=generator) * std)


@pytest.fixture
def make_policy() -> Callable[..., Policy]:
    """A toy policy whose adapters do something."""

    def make(family: Family = "qwen2", dtype: torch.dtype = torch.float32, **sizes: int) -> Policy:
        lora = LoRAConfig(rank=4, alpha=8)
        toy = Toy(family=family, **sizes)
        policy = load_policy(toy, NVFP4(), lora, dtype=dtype, shadow=True)
        _perturb_adapters(policy)
        return policy

    return make


@pytest.fixture
def policy(make_policy: Callable[..., Policy]) -> Policy:
    return make_policy()


@pytest.fixture
def make_prompts() -> Callable[[Sequence[Sequence[int]]], Prompts]:
    """Prompts of token ids; the ids are their places."""

    def make(tokens: Sequence[Sequence[int]]) -> Prompts:
        return Prompts(
            ids=tuple(f"test/{place}" for place in range(len(tokens))),
            questions=("",) * len(tokens),
            tokens=tuple(tuple(part) for part in tokens),
            golds=("",) * len(tokens),
        )

    return make


@pytest.fixture
def prompts(make_prompts: Callable[[Sequence[Sequence[int]]], Prompts]) -> Prompts:
    """Five prompts of 3 to 60 tokens, in no order; four begin with the same 40 tokens."""
    ids = torch.randint(3, 100, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    shared = ids[:40]
    return make_prompts(
        [shared + ids[40:45], shared + ids[45:65], ids[65:68], shared, shared + ids[68:70]]
    )


@pytest.fixture
def score() -> Callable[[Policy, Rollouts, float], Tensor]:
    """What the trainer says of the completions' tokens. [B, C], 0 beyond the lengths."""

    @torch.no_grad()
    def score(policy: Policy, rollouts: Rollouts, temperature: float = 1.0) -> Tensor:
        out = torch.zeros_like(rollouts.sampler_logprobs)
        for row in range(len(out)):
            prompt = list(rollouts.prompts.tokens[row // rollouts.group_size])
            completion = rollouts.completion(row)
            tokens = torch.tensor(prompt + completion)
            size = len(tokens)
            packed = Packed(
                tokens=tokens,
                positions=torch.arange(size),
                segments=(Segment(start=0, length=size, parent=None),),
                predictors=torch.arange(len(prompt) - 1, size - 1),
                targets=tokens[len(prompt) :],
                sequence=torch.full((len(completion),), row),
                offset=torch.arange(len(completion)),
            )
            out[row, : len(completion)] = policy.score(packed, temperature)[0]
        return out

    return score
