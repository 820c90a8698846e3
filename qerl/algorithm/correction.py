"""Importance correction: how far the sampler was from the policy that learns.

The sampler draws from mu (4-bit kernels of its own, noise on its norms), the trainer differentiates
pi. The weight pi / mu of each token makes the expectation the trainer's again; a cap bounds its
variance. The weight carries no gradient.

The denominators of the loss do not change: a token that the correction masks out has gain 0 and
still counts. So the loss stays invariant to how a step is split, and a step whose sampler drifts
takes a smaller step instead of a noisier one; ``train/correction_kept`` shows how much is left.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qerl.algorithm.diagnostics import MAX_LOG_RATIO

Level = Literal["token", "sequence"]
CorrectionKind = Literal["none", "truncate", "mask"]


def sequence_mean(values: Float[Tensor, " N"], sequence: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Each token's entry replaced by the mean over its sequence, differentiably.

    Args:
        values: One number per token. All tokens of a sequence must be present.
        sequence: Which sequence each token belongs to; any integers.
    """
    _, member, size = torch.unique(sequence, return_inverse=True, return_counts=True)
    total = values.new_zeros(len(size)).index_add(0, member, values)  # [sequences]
    return (total / size)[member]


@dataclass(frozen=True, kw_only=True)
class ImportanceCorrection:
    """Weight w = pi / mu of each token, bounded.

    Source: ``truncate`` is truncated importance sampling (Ionides 2008), as used against
    sampler-trainer mismatch by FlashRL and TRL; ``mask`` is IcePop's two-sided mask.
    """

    kind: CorrectionKind = "none"
    """``none``: w is 1, as QeRL. ``truncate``: min(w, cap). ``mask``: w within [1 / cap, cap],
    else 0."""

    cap: float = 2.0
    """Largest weight, dimensionless."""

    level: Level = "token"
    """``token``: each token its own ratio. ``sequence``: the geometric mean of the ratios of a
    completion, which does not grow with its length."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(CorrectionKind):
            raise ValueError(f"kind={self.kind!r}: one of {get_args(CorrectionKind)}")
        if self.level not in get_args(Level):
            raise ValueError(f"level={self.level!r}: one of {get_args(Level)}")
        if self.cap <= 1:
            raise ValueError(f"cap={self.cap}: above 1, the weight of a perfect sampler")

    def __call__(
        self,
        trainer_logprobs: Float[Tensor, " N"],
        sampler_logprobs: Float[Tensor, " N"],
        sequence: Int[Tensor, " N"],
    ) -> Float[Tensor, " N"] | None:
        """The weight of each token, detached; None for ``none``.

        Args:
            trainer_logprobs: log pi of the adapters that sampled: before the step's first update.
            sampler_logprobs: log mu, as the engine saw it.
            sequence: Which completion each token belongs to.
        """
        if self.kind == "none":
            return None
        gap = (trainer_logprobs - sampler_logprobs).detach()  # [N] nats
        if self.level == "sequence":
            gap = sequence_mean(gap, sequence)  # [N] nats
        weight = gap.clamp(max=MAX_LOG_RATIO).exp()  # [N]
        if self.kind == "truncate":
            return weight.clamp(max=self.cap)
        inside = (weight >= 1 / self.cap) & (weight <= self.cap)  # [N]
        return weight.masked_fill(~inside, 0.0)
