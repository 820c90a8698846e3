"""How much noise at which rollout step: one clean stage, then a decay in steps.

The run's rollout steps form K equal stages. Stage 0 is clean, so that only the quantisation error
of the weights explores; stage k >= 1 has, with t = (k - 1) / (K - 2),

exponential  s * (e / s)^t                    QeRL (arXiv:2510.11696, Eq. 8)
linear       s + (e - s) t
cosine       e + (s - e) (1 + cos pi t) / 2
logarithmic  s + (e - s) log(1 + 9 t) / log 10
constant     s

from s = sigma_start in stage 1 to e = sigma_end in stage K - 1, exactly. The paper plots linear,
cosine and logarithmic (Fig. 15) without a formula: these are ours.

Departures: docs/departures.md, rows "end of the decay" and "stage borders".
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["exponential", "linear", "cosine", "logarithmic", "constant"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Noise level of each rollout step, in units of a norm's weight."""

    sigma_start: float
    """Standard deviation in the first noisy stage."""

    sigma_end: float
    """Standard deviation in the last stage; ``constant`` does not read it."""

    stages: int
    """K. The decay takes at least 3: one clean, two noisy. ``constant`` takes at least 2."""

    total_steps: int
    """Rollout steps of the run. Later steps stay in the last stage; fewer steps than stages leave
    stages out."""

    kind: Kind = "exponential"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r}: one of {get_args(Kind)}")
        fewest = 2 if self.kind == "constant" else 3
        if self.stages < fewest:
            raise ValueError(
                f"stages={self.stages}: {self.kind} needs at least {fewest}, the first one clean"
            )
        if self.total_steps < 1:
            raise ValueError(f"total_steps={self.total_steps}: at least 1 rollout step")
        if not (self.sigma_start > 0 and math.isfinite(self.sigma_start)):
            raise ValueError(f"sigma_start={self.sigma_start}: above 0; noise=none runs without")
        if self.kind == "constant":
            return
        if not 0 <= self.sigma_end <= self.sigma_start:
            raise ValueError(
                f"sigma_end={self.sigma_end}: noise decays, to 0 ... sigma_start={self.sigma_start}"
            )
        if self.kind == "exponential" and self.sigma_end == 0:
            raise ValueError(
                "sigma_end=0: an exponential never reaches it; choose linear or cosine"
            )

    def stage(self, rollout_step: int) -> int:
        """The stage of a rollout step, both counted from 0."""
        if rollout_step < 0:
            raise ValueError(f"rollout_step={rollout_step}: steps are counted from 0")
        return min(rollout_step * self.stages // self.total_steps, self.stages - 1)

    def sigma(self, rollout_step: int) -> float:
        """Standard deviation of the noise at a rollout step; 0 in stage 0."""
        stage = self.stage(rollout_step)
        return 0.0 if stage == 0 else self.stage_sigma(stage)

    def stage_sigma(self, stage: int) -> float:
        """Standard deviation in a noisy stage, 1 to K - 1."""
        start, end = self.sigma_start, self.sigma_end
        if self.kind == "constant" or stage == 1:
            return start
        if stage == self.stages - 1:
            return end  # to the bit, where the formula would round
        t = (stage - 1) / (self.stages - 2)
        if self.kind == "exponential":
            return float(start * (end / start) ** t)
        if self.kind == "linear":
            return start + (end - start) * t
        if self.kind == "cosine":
            return end + (start - end) * (1 + math.cos(math.pi * t)) / 2
        return start + (end - start) * math.log(1 + 9 * t) / math.log(10)
