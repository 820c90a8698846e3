"""Credit: which completions count, and how much better each was than its group.

A_i = (r_i - mean(r)) / (std(r) + eps), mean and std over the G completions of one prompt.

A reward of NaN is an abstention (the verifier could not judge), which is not a 0: it enters
neither mean nor std, and its completion learns nothing.

Departures: docs/departures.md, rows "std of a group", "abstentions", "truncated completions".
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Scale = Literal["std", "none"]
EqualGroups = Literal["keep", "skip", "drop"]

# Rewards are sums of a few weighted components in fp32: what differs by less differs by rounding.
REWARD_TOLERANCE = 1e-6


def mixed_groups(rewards: Float[Tensor, "P G"]) -> Bool[Tensor, " P"]:
    """True for each group whose rewards differ: the only groups that carry a gradient.

    Abstentions (NaN) do not take part; a group with one judged completion or none is not mixed.

    Source: the constraint of DAPO (arXiv:2503.14476, Eq. 8), on rewards instead of correctness.
    """
    absent = rewards.isnan()  # [P, G]
    highest = rewards.masked_fill(absent, -torch.inf).amax(1)  # [P]
    lowest = rewards.masked_fill(absent, torch.inf).amin(1)  # [P]
    return highest - lowest > REWARD_TOLERANCE


def group_advantages(
    rewards: Float[Tensor, "P G"],
    scale: Scale = "std",
    eps: float = 1e-4,
    ddof: int = 1,
) -> Float[Tensor, "P G"]:
    """Reward of each completion relative to its group; exactly 0 where a group is not mixed.

    Args:
        rewards: NaN where the verifier abstained; that completion gets advantage 0.
        scale: ``std`` divides by the group's deviation (GRPO); ``none`` only centres (Dr. GRPO).
        eps: Added to the standard deviation, in units of reward.
        ddof: 1 divides the sum of squares by n - 1, 0 by n, n the completions that were judged.

    Returns:
        fp32. The judged completions of a group sum to 0.

    Raises:
        ValueError: G is 1, or a reward is infinite.

    Source: GRPO (arXiv:2402.03300, Sec. 4.1), QeRL (arXiv:2510.11696, Eq. 4); ``none``: Dr. GRPO
    (arXiv:2503.20783, Sec. 3). `ddof` and `eps` as TRL 0.21, which QeRL's released code runs.
    """
    group_size = rewards.shape[1]
    if group_size < 2:
        raise ValueError(
            f"group_size={group_size}: advantages need at least 2 completions per prompt"
        )
    if rewards.isinf().any():
        raise ValueError("a reward is infinite: rewards are finite, or NaN for an abstention")
    judged = ~rewards.isnan()  # [P, G]
    count = judged.sum(1, keepdim=True)  # [P, 1]
    filled = rewards.double().masked_fill(~judged, 0.0)  # [P, G]
    mean = filled.sum(1, keepdim=True) / count.clamp(min=1)  # [P, 1]
    centred = (filled - mean).masked_fill(~judged, 0.0)  # [P, G]
    if scale == "std":
        variance = centred.square().sum(1, keepdim=True) / (count - ddof).clamp(min=1)  # [P, 1]
        centred = centred / (variance.sqrt() + eps)
    return centred.masked_fill(~mixed_groups(rewards)[:, None], 0.0).float()


@dataclass(frozen=True, kw_only=True)
class OverlongPenalty:
    """A penalty that grows over the last `cache` tokens below the length cap.

    R(y) = 0                              |y| <= cap - cache
           (cap - cache - |y|) / cache    up to the cap
           -1                             beyond it, and for every truncated completion

    Added to the reward before the advantage. Lengths count completion tokens only.

    Source: DAPO (arXiv:2503.14476, Eq. 13).
    """

    max_new_tokens: int
    """The cap, in tokens; the same as the sampler's."""

    cache: int | None = None
    """Tokens below the cap over which the penalty ramps; None: a fifth of the cap, as in DAPO."""

    weight: float = 1.0
    """Multiplies the penalty. DAPO adds it to rewards of -1 and 1; with rewards of 0 and 1, 0.5
    keeps its proportion."""

    def __post_init__(self) -> None:
        if not 0 < self.ramp <= self.max_new_tokens:
            raise ValueError(
                f"cache={self.cache}: above 0 and at most max_new_tokens={self.max_new_tokens}"
            )
        if self.weight < 0:
            raise ValueError(f"weight={self.weight}: 0 or above; the penalty is already negative")

    @property
    def ramp(self) -> int:
        """`cache`, or its default."""
        return max(1, self.max_new_tokens // 5) if self.cache is None else self.cache

    def __call__(
        self, lengths: Int[Tensor, " B"], truncated: Bool[Tensor, " B"]
    ) -> Float[Tensor, " B"]:
        """The penalty of each completion, in [-weight, 0]. fp32."""
        free = self.max_new_tokens - self.ramp  # tokens
        penalty = (free - lengths.float()) / self.ramp  # [B]
        return self.weight * penalty.clamp(-1.0, 0.0).masked_fill(truncated, -1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """What the completions of a step may teach. All [B], prompt-major, on the CPU."""

    advantages: Float[Tensor, " B"]
    """fp32; 0 for completions without signal."""

    counted: Bool[Tensor, " B"]
    """True where the completion is part of the loss's denominator."""

    learned: Bool[Tensor, " B"]
    """True where its tokens get a weight above 0 and the policy scores them; implies `counted`."""


@dataclass(frozen=True, kw_only=True)
class Credit:
    """Turns the rewards of a step into advantages, and says which completions count.

    A completion that does not count leaves numerator and denominator alike, so that the loss is
    the loss of the others alone.
    """

    scale: Scale = "std"
    """``std``: GRPO, DAPO. ``none``: Dr. GRPO."""

    eps: float = 1e-4
    """Added to the group's standard deviation, in units of reward."""

    ddof: int = 1
    """Delta degrees of freedom of the standard deviation."""

    mask_truncated: bool = True
    """Completions cut off at the length cap do not count, while their rewards stay in mean and
    std of their group. As QeRL's released scripts set it."""

    equal_groups: EqualGroups = "keep"
    """What becomes of groups whose rewards are all equal, which have advantage 0.

    ``keep``  they count and are scored, so that entropy and mismatch cover every completion.
    ``skip``  they count, but no pass is spent on them: without a KL term the gradient is that of
              ``keep`` to the bit, and the diagnostics cover the other groups only.
    ``drop``  they do not count: the loss is that of the mixed groups alone."""

    def __post_init__(self) -> None:
        if self.scale not in get_args(Scale):
            raise ValueError(f"scale={self.scale!r}: one of {get_args(Scale)}")
        if self.equal_groups not in get_args(EqualGroups):
            raise ValueError(f"equal_groups={self.equal_groups!r}: one of {get_args(EqualGroups)}")
        if self.eps < 0:
            raise ValueError(f"eps={self.eps}: 0 or above")
        if self.ddof not in (0, 1):
            raise ValueError(f"ddof={self.ddof}: 0 (population) or 1 (sample)")

    def __call__(self, rewards: Float[Tensor, "P G"], truncated: Bool[Tensor, " B"]) -> Credited:
        """Advantages and standing of every completion; B = P * G, row b in group b // G."""
        advantages = group_advantages(rewards, self.scale, self.eps, self.ddof)  # [P, G]
        mixed = mixed_groups(rewards)[:, None].expand_as(rewards).flatten()  # [B]
        counted = ~rewards.isnan().flatten()  # [B]
        if self.mask_truncated:
            counted = counted & ~truncated
        if self.equal_groups == "drop":
            counted = counted & mixed
        learned = counted & mixed if self.equal_groups == "skip" else counted
        return Credited(advantages=advantages.flatten(), counted=counted, learned=learned)
