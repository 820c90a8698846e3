"""Dynamic sampling: draw until a step holds only groups that carry a gradient.

A group whose rewards are all equal has advantage 0. With pass rate p, that is
p^G + (1 - p)^G of the groups. DAPO draws further prompts until the step is full of mixed groups.

Here is the selecting and merging, pure; the training room draws. Draws of one step share their
rollout step and their noise level, so that a step has one of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Shaped
from torch import Tensor

from qerl.algorithm.credit import mixed_groups
from qerl.types import Prompts, Rollouts, Scored

Status = Literal["full", "drawing", "exhausted"]


def group_waste(p: float, group_size: int) -> float:
    """Share of groups without a gradient, p^G + (1 - p)^G, for binary rewards of pass rate p."""
    if not 0 <= p <= 1:
        raise ValueError(f"p={p}: a pass rate is in [0, 1]")
    return float(p**group_size + (1 - p) ** group_size)


def suggested_group_size(p: float, *, limit: float = 0.25, largest: int = 64) -> int | None:
    """Smallest G whose `group_waste` is at most `limit`; None where even `largest` wastes more."""
    fitting = (size for size in range(2, largest + 1) if group_waste(p, size) <= limit)
    return next(fitting, None)


def select_groups(rollouts: Rollouts, keep: list[int]) -> Rollouts:
    """The groups at `keep`, in that order, cut to the width of their longest completion."""
    rows = _rows(keep, rollouts.group_size)
    lengths = rollouts.lengths[rows]  # [B]
    width = int(lengths.max()) if rows else 0
    return Rollouts(
        prompts=rollouts.prompts.take(keep),
        group_size=rollouts.group_size,
        completions=rollouts.completions[rows, :width],
        lengths=lengths,
        sampler_logprobs=rollouts.sampler_logprobs[rows, :width],
        truncated=rollouts.truncated[rows],
        rollout_step=rollouts.rollout_step,
        sigma=rollouts.sigma,
    )


def select_scored(scored: Scored, keep: list[int]) -> Scored:
    """The groups at `keep`, in that order."""
    rows = _rows(keep, scored.rewards.shape[1])
    return Scored(
        rewards=scored.rewards[keep],
        components={name: values[keep] for name, values in scored.components.items()},
        verdicts=tuple(scored.verdicts[row] for row in rows),
        texts=tuple(scored.texts[row] for row in rows),
    )


def concat_rollouts(parts: Sequence[Rollouts]) -> Rollouts:
    """The groups of all parts, one after the other, padded to the longest completion.

    Raises:
        ValueError: There is no part, or they differ in group size, rollout step or noise.
    """
    if not parts:
        raise ValueError("no rollouts to concatenate")
    first = parts[0]
    for part in parts:
        mine = (part.group_size, part.rollout_step, part.sigma)
        if mine != (first.group_size, first.rollout_step, first.sigma):
            raise ValueError(
                f"rollouts of (group_size, rollout_step, sigma) = {mine} and "
                f"{(first.group_size, first.rollout_step, first.sigma)} do not make one step"
            )
    width = max(part.completions.shape[1] for part in parts)
    prompts = [part.prompts for part in parts]
    return Rollouts(
        prompts=Prompts(
            ids=tuple(one for part in prompts for one in part.ids),
            questions=tuple(one for part in prompts for one in part.questions),
            tokens=tuple(one for part in prompts for one in part.tokens),
            golds=tuple(one for part in prompts for one in part.golds),
        ),
        group_size=first.group_size,
        completions=torch.cat([_padded(part.completions, width) for part in parts]),
        lengths=torch.cat([part.lengths for part in parts]),
        sampler_logprobs=torch.cat([_padded(part.sampler_logprobs, width) for part in parts]),
        truncated=torch.cat([part.truncated for part in parts]),
        rollout_step=first.rollout_step,
        sigma=first.sigma,
    )


def concat_scored(parts: Sequence[Scored]) -> Scored:
    """The groups of all parts, one after the other.

    Raises:
        ValueError: There is no part, or they differ in the components they name.
    """
    if not parts:
        raise ValueError("no scored rollouts to concatenate")
    names = list(parts[0].components)
    for part in parts:
        if set(part.components) != set(names):
            raise ValueError(f"reward components {sorted(part.components)} != {sorted(names)}")
    return Scored(
        rewards=torch.cat([part.rewards for part in parts]),
        components={name: torch.cat([part.components[name] for part in parts]) for name in names},
        verdicts=tuple(verdict for part in parts for verdict in part.verdicts),
        texts=tuple(text for part in parts for text in part.texts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What dynamic sampling holds after some draws."""

    status: Status
    """``full``: `prompts_per_step` mixed groups. ``drawing``: too few, draw again. ``exhausted``:
    too few, and `max_rollouts` draws are spent."""

    rollouts: Rollouts
    """The mixed groups so far, at most `prompts_per_step`; possibly none."""

    scored: Scored
    """Their rewards. The rewards of a step, as logged, are those of all draws instead: these are
    selected."""

    draws: int
    """Rollouts drawn so far."""

    groups_drawn: int
    groups_mixed: int
    """Groups with a gradient among them, those beyond a full step included."""

    def metrics(self) -> dict[str, float]:
        """What the drawing cost."""
        return {
            "rollout/draws": float(self.draws),
            "rollout/groups_drawn": float(self.groups_drawn),
            "rollout/groups_mixed_fraction": self.groups_mixed / max(self.groups_drawn, 1),
        }

    def describe(self) -> str:
        """One line for a log or an error, with the cure."""
        found = (
            f"{self.groups_mixed} of {self.groups_drawn} groups are mixed after {self.draws} draws"
        )
        if self.status != "exhausted":
            return f"dynamic sampling {self.status}: {found}"
        return (
            f"dynamic sampling exhausted: {found}; the other groups are all right or all wrong: "
            "choose prompts of another difficulty, a larger group_size or a larger max_rollouts"
        )


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """Keep mixed groups of several rollouts until a step is full.

    Source: DAPO (arXiv:2503.14476, Sec. 3.2).
    """

    max_rollouts: int = 10
    """Rollouts that one step may draw; NeMo-RL's default."""

    def __post_init__(self) -> None:
        if self.max_rollouts < 1:
            raise ValueError(f"max_rollouts={self.max_rollouts}: at least 1")

    def select(self, draws: Sequence[tuple[Rollouts, Scored]], prompts_per_step: int) -> Selection:
        """The first `prompts_per_step` mixed groups of `draws`, and whether to draw again.

        Mixed is judged on the rewards as scored, before any length penalty: a group that is all
        right and differs only in length stays out, as in DAPO.
        """
        if not draws:
            raise ValueError("no draw to select from")
        kept_rollouts: list[Rollouts] = []
        kept_scored: list[Scored] = []
        mixed_total = 0
        for rollouts, scored in draws:
            mixed = mixed_groups(scored.rewards).nonzero().flatten().tolist()
            room = max(prompts_per_step - mixed_total, 0)
            mixed_total += len(mixed)
            kept_rollouts.append(select_groups(rollouts, mixed[:room]))
            kept_scored.append(select_scored(scored, mixed[:room]))
        status: Status = "drawing"
        if mixed_total >= prompts_per_step:
            status = "full"
        elif len(draws) >= self.max_rollouts:
            status = "exhausted"
        return Selection(
            status=status,
            rollouts=concat_rollouts(kept_rollouts),
            scored=concat_scored(kept_scored),
            draws=len(draws),
            groups_drawn=sum(len(rollouts.prompts) for rollouts, _ in draws),
            groups_mixed=mixed_total,
        )


def _rows(groups: list[int], group_size: int) -> list[int]:
    """Rows b of the completions of `groups`."""
    return [group * group_size + member for group in groups for member in range(group_size)]


def _padded(values: Shaped[Tensor, "B _"], width: int) -> Shaped[Tensor, "B {width}"]:
    """`values` with zeros up to `width` columns."""
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))
