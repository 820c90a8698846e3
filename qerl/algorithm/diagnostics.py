"""Diagnostics of an update as sums and counts, which add up exactly over micro-batches and ranks.

Every mean is a token mean over the tokens that count. Sign conventions, with pi the trainer's
policy, mu the sampler, old the trainer's policy before the update, ref the policy without adapters:

======================  ==============================================================
train/mismatch_mean     mean of log pi - log mu; below 0: the sampler was surer
train/mismatch_kl       k3 of KL(mu || pi) = mean of r - 1 - log r, r = pi / mu; >= 0
train/mismatch_max      largest |log pi - log mu|
train/kl_old            k3 of KL(old || pi), r = pi / old
train/kl_ref            k3 of KL(pi || ref), r = ref / pi
======================  ==============================================================

Source: k3 is from joschu.net/blog/kl-approx.html.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MEANS = (
    "train/entropy_nats",
    "train/clip_fraction",
    "train/clip_fraction_low",
    "train/clip_fraction_high",
    "train/ratio_mean",
    "train/kl_old",
    "train/kl_ref",
    "train/mismatch_kl",
    "train/mismatch_mean",
    "train/mismatch_mean_abs",
    "train/correction_mean",
    "train/correction_kept",
)
MAXIMA = ("train/ratio_max", "train/mismatch_max")

# exp(20) = 4.9e8: far outside every trust region, far inside fp32 and its squares.
MAX_LOG_RATIO = 20.0


def k3(log_ratio: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """exp(x) - x - 1 of each log-ratio x, in nats: >= 0.

    At tokens drawn from q and with x = log p - log q, its mean is unbiased for KL(q || p). x is
    capped at `MAX_LOG_RATIO`; beyond it the value stays finite and the gradient is 0.
    """
    capped = log_ratio.clamp(max=MAX_LOG_RATIO)  # [N]
    return capped.exp() - capped - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Diagnostics:
    """Sums, counts and maxima under the fixed names `MEANS` and `MAXIMA`; ``a + b`` is exact.

    The vectors stay on the device they were made on, so that adding micro-batches waits for
    nothing; `metrics` is the one transfer.
    """

    sums: Float[Tensor, " means"]
    """One for each name of `MEANS`. fp64."""

    counts: Float[Tensor, " means"]
    """Tokens behind each sum; 0 where the quantity was not measured. fp64."""

    maxima: Float[Tensor, " maxima"]
    """One for each name of `MAXIMA`; -inf where not measured. fp64."""

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> "Diagnostics":
        """Nothing measured: the 0 of addition."""
        zeros = torch.zeros(len(MEANS), dtype=torch.float64, device=device)
        lowest = torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64, device=device)
        return cls(sums=zeros, counts=zeros.clone(), maxima=lowest)

    @classmethod
    def measure(
        cls,
        counted: Bool[Tensor, " N"],
        means: Mapping[str, Tensor],
        maxima: Mapping[str, Tensor],
    ) -> "Diagnostics":
        """Sum per-token quantities over the tokens that count.

        Args:
            counted: Tokens that enter; the others may hold anything, NaN included.
            means: A tensor of [N] for some of the names of `MEANS`.
            maxima: A tensor of [N] for some of the names of `MAXIMA`.
        """
        unknown = sorted((set(means) - set(MEANS)) | (set(maxima) - set(MAXIMA)))
        if unknown:
            raise ValueError(
                f"diagnostics {unknown} have no name in MEANS or MAXIMA: add them there"
            )
        empty = cls.empty(counted.device)
        tokens = counted.sum(dtype=torch.float64)
        sums, counts, highest = empty.sums, empty.counts, empty.maxima
        for name, values in means.items():
            at = MEANS.index(name)
            sums[at] = values.detach().double().masked_fill(~counted, 0.0).sum()
            counts[at] = tokens
        for name, values in maxima.items():
            if values.numel():
                kept = values.detach().double().masked_fill(~counted, -torch.inf)
                highest[MAXIMA.index(name)] = kept.max()
        return cls(sums=sums, counts=counts, maxima=highest)

    def __add__(self, other: "Diagnostics") -> "Diagnostics":
        return Diagnostics(
            sums=self.sums + other.sums,
            counts=self.counts + other.counts,
            maxima=torch.maximum(self.maxima, other.maxima),
        )

    def reduced(
        self, all_sum: Callable[[Tensor], Tensor], all_max: Callable[[Tensor], Tensor]
    ) -> "Diagnostics":
        """The diagnostics of all ranks, given what sums and maximises a tensor over them."""
        totals = all_sum(torch.stack([self.sums, self.counts]))  # [2, means]
        return Diagnostics(sums=totals[0], counts=totals[1], maxima=all_max(self.maxima))

    def metrics(self) -> dict[str, float]:
        """Token means and maxima of what was measured, and ``train/tokens``."""
        sums, counts, maxima = self.sums.tolist(), self.counts.tolist(), self.maxima.tolist()
        found = {
            name: total / count
            for name, total, count in zip(MEANS, sums, counts, strict=True)
            if count > 0
        }
        found |= {
            name: value for name, value in zip(MAXIMA, maxima, strict=True) if value != -torch.inf
        }
        return found | {"train/tokens": max(counts)}
