"""The curves of a run while they grow: points in, `Curve` objects, state and summary out."""

import math
from collections.abc import Mapping
from typing import Any

from qerl.record.schema import Curve


class CurveBook:
    """Values of every metric by rollout step; a step that is done again replaces its values."""

    def __init__(self) -> None:
        self._points: dict[str, dict[int, float]] = {}

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one rollout step."""
        for metric, value in metrics.items():
            self._points.setdefault(metric, {})[step] = _seven_digits(value)

    @property
    def curves(self) -> dict[str, Curve]:
        """Every metric, in alphabetical order."""
        found = {}
        for metric, points in sorted(self._points.items()):
            steps = sorted(points)
            found[metric] = Curve(steps=tuple(steps), values=tuple(points[step] for step in steps))
        return found

    def values(self, metric: str) -> list[float]:
        """The finite values of `metric` in the order of its steps."""
        points = self._points.get(metric, {})
        return [points[step] for step in sorted(points) if math.isfinite(points[step])]

    def summary(self, window: int) -> dict[str, float]:
        """One number a metric: the mean over its last `window` finite values.

        Of a ``memory/`` metric it is the largest value, of an evaluation (``held_out/``, ``val/``)
        the last.
        """
        found: dict[str, float] = {}
        for metric in sorted(self._points):
            values = self.values(metric)
            if not values:
                found[metric] = math.nan
            elif metric.startswith("memory/"):
                found[metric] = max(values)
            elif metric.startswith(("held_out/", "val/")):
                found[metric] = values[-1]
            else:
                found[metric] = _seven_digits(mean(values[-window:]))
        return found

    def state(self) -> dict[str, Any]:
        """Plain lists and numbers, for a checkpoint."""
        return {
            metric: {"steps": list(curve.steps), "values": list(curve.values)}
            for metric, curve in self.curves.items()
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self._points = {
            metric: dict(zip(curve["steps"], curve["values"], strict=True))
            for metric, curve in state.items()
        }


def _seven_digits(value: float) -> float:
    """What fp32 knows of a number; more would only fill the record."""
    return float(f"{value:.7g}")


def named_errors(result: Mapping[str, float]) -> dict[str, float]:
    """An evaluation's figures, its ``standard_error`` under the name of what it is the error of."""
    return {
        "mean_at_k_stderr" if name == "standard_error" else name: value
        for name, value in result.items()
    }


def mean(values: list[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan
