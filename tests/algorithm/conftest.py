"""A policy small enough for fp64 that notices a wrong parent, position or predictor."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qerl.types import Packed, Prompts, Rollouts, Scored, Verdict

VOCABULARY = 13


class PrefixPolicy(torch.nn.Module):
    """A token's logits depend on every token of its sequence so far and on their positions."""

    def __init__(self, width: int = 6, seed: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shape = (VOCABULARY, width)
        self.embed = torch.nn.Parameter(torch.randn(shape, generator=generator).double())
        self.head = torch.nn.Parameter(torch.randn(shape, generator=generator).double())

    def _inputs(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embed[tokens] * torch.cos(0.7 * positions.double())[:, None]  # [S, D]

    def _logprobs(self, states: Tensor, temperature: float = 1.0) -> Tensor:
        return (states.tanh() @ self.head.T / temperature).log_softmax(-1)  # [N, V]

    def score(self, packed: Packed, chunk: int = 10_000) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each target, the head applied `chunk` rows at a time."""
        inputs = self._inputs(packed.tokens, packed.positions)
        ends: list[Tensor] = []
        states: list[Tensor] = []
        for segment in packed.segments:
            rows = inputs[segment.start : segment.start + segment.length]
            before = torch.zeros_like(rows[0]) if segment.parent is None else ends[segment.parent]
            run = before + rows.cumsum(0)
            states.append(run)
            ends.append(run[-1])
        hidden = torch.cat(states)[packed.predictors]  # [N, D]
        pieces = [self._logprobs(piece) for piece in hidden.split(chunk)]
        logprobs = torch.cat(pieces)  # [N, V]
        chosen = logprobs.gather(1, packed.targets[:, None])[:, 0]
        return chosen, -(logprobs.exp() * logprobs).sum(-1).detach()

    def dense(self, rollouts: Rollouts) -> Tensor:
        """[B, C] log-probabilities, one whole sequence after the other."""
        out = torch.zeros(rollouts.completions.shape, dtype=torch.float64)
        rows = []
        for b in range(len(rollouts.lengths)):
            prompt = list(rollouts.prompts.tokens[b // rollouts.group_size])
            completion = rollouts.completion(b)
            tokens = torch.tensor(prompt + completion)
            states = self._inputs(tokens, torch.arange(len(tokens))).cumsum(0)
            logprobs = self._logprobs(states)
            at = torch.arange(len(prompt) - 1, len(tokens) - 1)
            row = logprobs[at, tokens[len(prompt) :]]
            rows.append(torch.cat([row, out[b, len(completion) :]]))
        return torch.stack(rows)


def build_rollouts(
    prompts: list[tuple[int, ...]],
    lengths: list[int],
    *,
    group_size: int,
    truncated: list[bool] | None = None,
    seed: int = 0,
    padding: int = 0,
    step: int = 0,
    sigma: float = 0.0,
) -> Rollouts:
    """Random completions of the given lengths; `padding` extra columns of 0."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths, default=0) + padding
    columns = torch.arange(width) < torch.tensor(lengths)[:, None]
    shape = (len(lengths), width)
    drawn = torch.randint(0, VOCABULARY, shape, generator=generator)
    logprobs = -3 * torch.rand(shape, generator=generator)
    return Rollouts(
        prompts=Prompts(
            ids=tuple(f"toy/{seed}/{p}" for p in range(len(prompts))),
            questions=tuple("?" for _ in prompts),
            tokens=tuple(prompts),
            golds=tuple("0" for _ in prompts),
        ),
        group_size=group_size,
        completions=drawn * columns,
        lengths=torch.tensor(lengths),
        sampler_logprobs=logprobs * columns,
        truncated=torch.tensor(truncated or [False] * len(lengths)),
        rollout_step=step,
        sigma=sigma,
    )


def build_scored(rewards: Tensor) -> Scored:
    """`rewards` [P, G] with verdicts to match."""
    verdicts = tuple(
        Verdict(correct=None if reward != reward else reward > 0, reason="", answer=None)
        for reward in rewards.flatten().tolist()
    )
    return Scored(
        rewards=rewards,
        components={"answer": rewards},
        verdicts=verdicts,
        texts=tuple(f"text {b}" for b in range(rewards.numel())),
    )


@pytest.fixture(scope="session")
def make_rollouts() -> Callable[..., Rollouts]:
    return build_rollouts


@pytest.fixture(scope="session")
def make_scored() -> Callable[[Tensor], Scored]:
    return build_scored


def build_unchecked(options: type, **fields: object) -> object:
    """An options object as a run makes it: without the type checks that tests add."""
    made = object.__new__(options)
    for option in dataclasses.fields(options):
        default = option.default
        if default is dataclasses.MISSING and option.default_factory is not dataclasses.MISSING:
            default = option.default_factory()
        object.__setattr__(made, option.name, fields.get(option.name, default))
    made.__post_init__()
    return made


@pytest.fixture(scope="session")
def unchecked() -> Callable[..., object]:
    return build_unchecked


@pytest.fixture
def policy() -> PrefixPolicy:
    return PrefixPolicy()


@pytest.fixture
def step() -> tuple[Rollouts, Scored]:
    """4 prompts that begin alike, 4 completions each: short, long, truncated, abstained, equal."""
    common = (1, 2, 3, 4, 5)
    prompts = [(*common, 6, 7), (*common, 8), (*common, 6, 9, 10, 11), (*common, 6, 7, 12)]
    lengths = [3, 1, 9, 4, 2, 2, 7, 9, 5, 1, 1, 6, 9, 3, 2, 8]
    truncated = [length == 9 for length in lengths]
    rewards = torch.tensor(
        [
            [1.0, 0.0, 0.2, 0.0],
            [0.0, 1.2, torch.nan, 0.0],
            [1.0, 1.0, 1.0, 1.0],
            [0.0, 1.0, 1.0, 0.2],
        ]
    )
    rollouts = build_rollouts(prompts, lengths, group_size=4, truncated=truncated, seed=3)
    return rollouts, build_scored(rewards)
