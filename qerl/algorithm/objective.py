"""The clipped objective of GRPO, DAPO and Dr. GRPO on the flat tokens of a micro-batch.

J = sum_t weight_t * ( w_t * min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
                       - kl_coef * k3(log ref_t - log pi_t) ),      loss = -J

r = pi / pi_old is the trust region's ratio, w = pi / mu the importance correction. All of the
normalisation is in the weights (see weights.py): the loss is a plain sum, so the losses of
micro-batches add up to the loss of the step.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qerl.algorithm.correction import sequence_mean
from qerl.algorithm.diagnostics import MAX_LOG_RATIO, Diagnostics, k3

RatioLevel = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectiveOut:
    """What one micro-batch contributes to a step."""

    loss: Float[Tensor, ""]
    """Its share of the step's loss, with gradient."""

    diagnostics: Diagnostics
    """Its share of the step's diagnostics, without gradient."""


@dataclass(frozen=True, kw_only=True)
class ClippedObjective:
    """J = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - kl_coef * KL, per token.

    Source: GRPO (arXiv:2402.03300, Sec. 4.1); the two-sided clip range, DAPO (arXiv:2503.14476,
    Eq. 8); ``ratio="sequence"``, GSPO (arXiv:2507.18071, Sec. 4); `dual_clip`, Ye et al.
    (arXiv:1912.09729). The KL is the k3 estimator.
    """

    clip_low: float = 0.2
    """Lower half-width of the trust region, dimensionless."""

    clip_high: float = 0.28
    """Upper half-width; above `clip_low` it lets rare tokens grow (DAPO's clip-higher)."""

    kl_coef: float = 0.0
    """Weight of KL(policy || reference), per nat. 0 needs no reference pass."""

    ratio: RatioLevel = "token"
    """``token``: each token its own ratio. ``sequence``: one for a completion, the geometric mean
    of its tokens' ratios; its clip range is then some hundred times narrower (GSPO: 3e-4, 4e-4)."""

    dual_clip: float | None = None
    """Where A < 0, the largest ratio that still counts, above 1; None sets no limit."""

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low={self.clip_low}: in [0, 1]; a ratio is never below 0")
        if self.clip_high < 0:
            raise ValueError(f"clip_high={self.clip_high}: 0 or above")
        if self.kl_coef < 0:
            raise ValueError(f"kl_coef={self.kl_coef}: 0 (no KL term) or above")
        if self.ratio not in get_args(RatioLevel):
            raise ValueError(f"ratio={self.ratio!r}: one of {get_args(RatioLevel)}")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip={self.dual_clip}: above 1 + clip_high = {1 + self.clip_high}, or null"
            )

    def __call__(
        self,
        logprobs: Float[Tensor, " N"],
        old_logprobs: Float[Tensor, " N"] | None,
        advantages: Float[Tensor, " N"],
        weights: Float[Tensor, " N"],
        ref_logprobs: Float[Tensor, " N"] | None = None,
        correction: Float[Tensor, " N"] | None = None,
        sequence: Int[Tensor, " N"] | None = None,
    ) -> ObjectiveOut:
        """Loss and diagnostics of N tokens.

        Args:
            logprobs: log pi with gradient, nats.
            old_logprobs: log pi_old; None where pi_old is pi itself (one update per rollout): the
                ratio is then exactly 1, with gradient.
            advantages: A of each token's completion.
            weights: The token's weight in the step's loss; 0 for a token that does not count.
            ref_logprobs: log pi with adapters off; only a KL term reads it.
            correction: Detached importance weight; None for 1.
            sequence: The completion of each token; only ``ratio="sequence"`` reads it.
        """
        log_ratio = self._log_ratio(logprobs, old_logprobs, sequence)  # [N] nats
        ratio = log_ratio.exp()  # [N]
        gain = self._clipped(ratio, advantages)  # [N]
        if correction is not None:
            gain = correction * gain
        counted = weights != 0  # [N]
        means = self._clip_fractions(ratio, advantages) | {
            "train/ratio_mean": ratio,
            "train/kl_old": k3(log_ratio.detach()),
        }
        if correction is not None:
            means["train/correction_mean"] = correction
            means["train/correction_kept"] = correction > 0
        if self.kl_coef > 0:
            if ref_logprobs is None:
                raise ValueError(f"kl_coef={self.kl_coef}: the KL term needs ref_logprobs")
            kl = k3(ref_logprobs - logprobs)  # [N] nats
            gain = gain - self.kl_coef * kl
            means["train/kl_ref"] = kl
        return ObjectiveOut(
            loss=-(weights * gain).sum(),
            diagnostics=Diagnostics.measure(counted, means, {"train/ratio_max": ratio}),
        )

    def _log_ratio(
        self,
        logprobs: Float[Tensor, " N"],
        old_logprobs: Float[Tensor, " N"] | None,
        sequence: Int[Tensor, " N"] | None,
    ) -> Float[Tensor, " N"]:
        """log(pi / pi_old), capped so that its exponential stays finite.

        Beyond the cap the gradient is 0. That alters nothing where A > 0, which is clipped there,
        and spares A < 0 a gradient of exp(20) times the usual one.
        """
        old = logprobs.detach() if old_logprobs is None else old_logprobs  # [N] nats
        log_ratio = logprobs - old  # [N] nats
        if self.ratio == "sequence":
            if sequence is None:
                raise ValueError("ratio='sequence' needs to know the sequence of each token")
            log_ratio = sequence_mean(log_ratio, sequence)  # [N] nats
        return log_ratio.clamp(max=MAX_LOG_RATIO)

    def _clipped(
        self, ratio: Float[Tensor, " N"], advantages: Float[Tensor, " N"]
    ) -> Float[Tensor, " N"]:
        """min(r A, clip(r) A), and with a dual clip not below `dual_clip` * A where A < 0."""
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)  # [N]
        gain = torch.minimum(ratio * advantages, clipped * advantages)  # [N]
        if self.dual_clip is None:
            return gain
        floor = self.dual_clip * advantages  # [N]
        return torch.where(advantages < 0, torch.maximum(gain, floor), gain)

    def _clip_fractions(
        self, ratio: Float[Tensor, " N"], advantages: Float[Tensor, " N"]
    ) -> dict[str, Tensor]:
        """Where the clip takes the gradient away, below and above the trust region."""
        low = (advantages < 0) & (ratio < 1 - self.clip_low)  # [N]
        high = (advantages > 0) & (ratio > 1 + self.clip_high)  # [N]
        return {
            "train/clip_fraction": low | high,
            "train/clip_fraction_low": low,
            "train/clip_fraction_high": high,
        }
