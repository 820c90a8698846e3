"""Learning rate as a pure function of the rollout step, so that a resumed run needs no state."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up to `peak`, then constant or cosine to zero.

    Source: NVlabs/QeRL@e8c6e79 training/*.sh (cosine, warm-up over a tenth of the steps).
    """

    peak: float
    """Highest learning rate."""

    total_steps: int
    """Rollout steps of the run."""

    warmup_share: float = 0.1
    """Share of the steps over which the rate rises, in [0, 1)."""

    decay: Literal["constant", "cosine"] = "cosine"

    def __post_init__(self) -> None:
        if not self.peak > 0:  # a NaN is not above 0 either
            raise ValueError(f"peak={self.peak}: a learning rate above 0")
        if not 0 <= self.warmup_share < 1:
            raise ValueError(f"warmup_share={self.warmup_share}: in [0, 1)")
        if self.decay not in ("constant", "cosine"):
            raise ValueError(f"decay={self.decay!r}: constant or cosine")

    def at(self, rollout_step: int) -> float:
        """The rate of this step; above 0 at every step of the run."""
        warmup = round(self.warmup_share * self.total_steps)
        if rollout_step < warmup:
            return self.peak * (rollout_step + 1) / (warmup + 1)
        if self.decay == "constant":
            return self.peak
        progress = (rollout_step - warmup) / max(1, self.total_steps - warmup)
        return self.peak * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
