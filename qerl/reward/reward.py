"""Completions to rewards: text, verdicts, components, and their weighted sum.

The components of a completion are added with their weights. A component that abstains (None) adds
nothing, and where all abstain the reward is NaN. An abstention would then look like a 0 of that
component beside siblings that have it, so a component may be `required`: where it abstains, the
whole reward is NaN, and the sample stays out of its group's statistics.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.reward.components import Completions, Component
from qerl.reward.pool import VerifierPool
from qerl.types import Rollouts, Scored


class Reward:
    """Scores the rollouts of a step.

    Args:
        components: Parts of the reward, with their weights.
        pool: Where completions are verified. Every completion is, whatever the components are, so
            that the logged correctness means the same in every run.
        required: Names of components without which a completion has no reward.
        answers: Where the answer stands: ``marked`` as `parse` describes, or ``whole`` for tasks
            whose completions are nothing but the answer.
    """

    def __init__(
        self,
        components: Sequence[Component],
        pool: VerifierPool,
        required: Sequence[str] = (),
        answers: Literal["marked", "whole"] = "marked",
    ) -> None:
        names = [component.name for component in components]
        if not names:
            raise ValueError("components=[]: a reward needs at least one")
        if len(set(names)) < len(names):
            raise ValueError(f"components named {names}: give each a name of its own")
        if unknown := set(required) - set(names):
            raise ValueError(f"required={sorted(unknown)}: no such component among {names}")
        if answers not in ("marked", "whole"):
            raise ValueError(f"answers={answers!r}: marked or whole")
        self.components = tuple(components)
        self.pool = pool
        self.required = tuple(required)
        self.answers = answers

    def __call__(self, rollouts: Rollouts, decode: Callable[[list[int]], str]) -> Scored:
        """Rewards of `rollouts`.

        Args:
            rollouts: P prompts with G completions each.
            decode: Token ids to text, special tokens kept.
        """
        rows = range(len(rollouts.lengths))
        texts = [decode(rollouts.completion(row)) for row in rows]
        golds = [rollouts.prompts.golds[row // rollouts.group_size] for row in rows]
        bare = [
            _without_eos(rollouts, row, text, decode) for row, text in zip(rows, texts, strict=True)
        ]
        boxed = bare if self.answers == "marked" else [rf"\boxed{{{text}}}" for text in bare]
        verdicts = self.pool.verify(boxed, golds)
        completions = Completions(
            texts=bare, golds=golds, lengths=rollouts.lengths.tolist(), verdicts=verdicts
        )
        shape = (len(rollouts.prompts), rollouts.group_size)
        values = {
            component.name: _tensor(component(completions), shape) for component in self.components
        }
        return Scored(
            rewards=self._sum(values),
            components=values,
            verdicts=tuple(verdicts),
            texts=tuple(texts),
        )

    def close(self) -> None:
        """End the verifier's processes."""
        self.pool.close()

    def _sum(self, values: dict[str, Float[Tensor, "P G"]]) -> Float[Tensor, "P G"]:
        weights = torch.tensor([component.weight for component in self.components])
        stacked = torch.stack([values[component.name] for component in self.components], -1)
        abstains = stacked.isnan()  # [P, G, components]
        total = (stacked.nan_to_num() * weights).sum(-1)  # [P, G]
        missing = abstains.all(-1)
        for index, component in enumerate(self.components):
            if component.name in self.required:
                missing = missing | abstains[..., index]
        return total.masked_fill(missing, math.nan)


def _without_eos(
    rollouts: Rollouts, row: int, text: str, decode: Callable[[list[int]], str]
) -> str:
    """`text` without the end-of-sequence token that ended it, for parsing."""
    ids = rollouts.completion(row)
    if not ids or bool(rollouts.truncated[row]):
        return text
    return text.removesuffix(decode(ids[-1:]))


def _tensor(values: list[float | None], shape: tuple[int, int]) -> Float[Tensor, "P G"]:
    known = [math.nan if value is None else value for value in values]
    return torch.tensor(known, dtype=torch.float32).view(shape)
