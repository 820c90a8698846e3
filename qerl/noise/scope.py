"""Noise as a scope: ``with noisy(norms, sigma): ...`` perturbs, then the same bits return.

Inside the block each weight w of the norms is w + Z, Z ~ N(0, sigma^2) per channel, which is the
noise Z / w on the rows of the matrices that read the norm's output.

Z is a function of (seed, rollout step, index of the norm) alone: it is drawn on the CPU by a
generator of its own and touches no other random state, so that every device, rank and resumed run
sees the same noise. Weights change in place, so that captured CUDA graphs see it too.

Source: QeRL (arXiv:2510.11696, Eq. 10).
"""

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Set on a weight while it carries noise. On the tensor itself, because two scopes can know of each
# other by nothing else; restoring from a nested scope would leave noise behind.
_MARK = "carries_noise"


class Norm(Protocol):
    """What noise needs to know of a norm: the scale it multiplies each channel with."""

    @property
    def weight(self) -> Tensor:
        """[D], fp32."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseReport:
    """What a scope really did to the weights, measured after their storage rounded it."""

    sigma: float
    """The standard deviation asked for."""

    tensors: int
    """Norms that were perturbed."""

    channels: int
    """Weights of those norms."""

    applied_std: float
    """Root mean square of (stored noisy weight - clean weight)."""

    changed_fraction: float
    """Share of channels whose stored weight differs from the clean one."""

    relative_std: float
    """`applied_std` over the root mean square of the clean weights."""

    def metrics(self) -> dict[str, float]:
        """For logs."""
        return {
            "noise/sigma": self.sigma,
            "noise/applied_std": self.applied_std,
            "noise/relative_std": self.relative_std,
            "noise/changed_fraction": self.changed_fraction,
            "noise/tensors": float(self.tensors),
        }


SILENT = NoiseReport(
    sigma=0.0, tensors=0, channels=0, applied_std=0.0, changed_fraction=0.0, relative_std=0.0
)


@contextmanager
def noisy(
    norms: Sequence[Norm], sigma: float, *, seed: int, rollout_step: int
) -> Iterator[NoiseReport]:
    """Perturb every norm inside the block; restore the same bits after, also when it raises.

    A backward pass through the noisy weights belongs inside the block: autograd sees the restoring
    write, and refuses a later one.

    Args:
        norms: Norms with fp32 weights; at least one, each once.
        sigma: Standard deviation, in units of the weights. 0 leaves the weights alone.
        seed: Of the run.
        rollout_step: Rollouts drawn before this one.

    Yields:
        What was done to the weights.

    Raises:
        ValueError: `sigma` is negative or not finite, `norms` is empty, a weight is not fp32, or
            a weight carries noise already.
        RuntimeError: `sigma` is above 0 and no weight changed.
    """
    if not (sigma >= 0 and math.isfinite(sigma)):
        raise ValueError(f"sigma={sigma}: 0 or above, and finite")
    weights = _weights(norms)
    if sigma == 0:
        yield SILENT
        return
    clean: list[Tensor] = []
    try:
        for weight in weights:
            if getattr(weight, _MARK, False):
                raise ValueError("a norm carries noise already: scopes do not nest or share norms")
            clean.append(weight.detach().clone())
            setattr(weight, _MARK, True)
        report = _perturb(weights, clean, sigma, seed=seed, rollout_step=rollout_step)
        if report.changed_fraction == 0:
            raise RuntimeError(
                f"sigma={sigma}: no weight of {report.tensors} norms changed; the noise is below "
                "their rounding"
            )
        yield report
    finally:
        with torch.no_grad():
            for weight, kept in zip(weights, clean, strict=False):
                weight.copy_(kept)
                setattr(weight, _MARK, False)


def draw(shape: torch.Size, *, seed: int, rollout_step: int, index: int) -> Tensor:
    """Standard normal noise of the `index`-th norm at a rollout step. fp32, CPU."""
    key = struct.pack("<qqq", seed, rollout_step, index)
    digest = hashlib.blake2b(key, digest_size=8, person=b"qerl.noise").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def _weights(norms: Sequence[Norm]) -> list[Tensor]:
    """The weights of `norms`, checked."""
    if not norms:
        raise ValueError("no norm to perturb: noise that touches nothing must not pass silently")
    weights = [norm.weight for norm in norms]
    for index, weight in enumerate(weights):
        if weight.dtype != torch.float32:
            raise ValueError(
                f"norm {index} has {weight.dtype} weights: noise needs fp32 weights; near 1, "
                "bfloat16 rounds noise of sigma 1e-3 away in 98 % of channels"
            )
    return weights


@torch.no_grad()
def _perturb(
    weights: list[Tensor], clean: list[Tensor], sigma: float, *, seed: int, rollout_step: int
) -> NoiseReport:
    """Add the noise in place and measure what was stored."""
    device = weights[0].device
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # noise², weight², channels changed
    for index, (weight, before) in enumerate(zip(weights, clean, strict=True)):
        noise = draw(weight.shape, seed=seed, rollout_step=rollout_step, index=index)  # [D]
        weight.copy_(before + sigma * noise.to(weight.device))
        applied = weight.double() - before.double()  # [D]
        squares = torch.stack(
            [applied.square().sum(), before.double().square().sum(), (applied != 0).sum().double()]
        )
        totals += squares.to(device)
    noise_square, weight_square, changed = totals.tolist()
    channels = sum(weight.numel() for weight in weights)
    applied_std = math.sqrt(noise_square / channels)
    size = math.sqrt(weight_square / channels)
    return NoiseReport(
        sigma=sigma,
        tensors=len(weights),
        channels=channels,
        applied_std=applied_std,
        changed_fraction=changed / channels,
        relative_std=applied_std / size if size > 0 else math.inf,
    )
