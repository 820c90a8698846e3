"""Adaptive quantisation noise of a run: the schedule, whom the noise reaches, and the seed.

``sampler`` is QeRL as published: the sampler's norms carry the noise, the policy that learns does
not. ``both`` gives the trainer's passes over a rollout the very noise that it was drawn with, so
that nothing but the update separates sampler and trainer. The choice tells exploration by noise
from the bias of learning on another policy's samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from qerl.noise.schedule import Schedule
from qerl.noise.scope import SILENT, NoiseReport, Norm, noisy

Scope = Literal["sampler", "both"]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise of a run; without a schedule there is none."""

    schedule: Schedule | None = None
    """Standard deviation at each rollout step; None for a run without noise."""

    scope: Scope = "sampler"
    """Whose passes carry it."""

    seed: int = 0
    """Of the noise; with the rollout step it determines every draw."""

    def __post_init__(self) -> None:
        if self.scope not in get_args(Scope):
            raise ValueError(f"scope={self.scope!r}: one of {get_args(Scope)}")

    def sigma(self, rollout_step: int) -> float:
        """Standard deviation at a rollout step; 0 for none."""
        return 0.0 if self.schedule is None else self.schedule.sigma(rollout_step)

    @contextmanager
    def sampling(self, norms: Sequence[Norm], rollout_step: int) -> Iterator[NoiseReport]:
        """The scope of a rollout: `norms` are those the engine samples with.

        Raises:
            ValueError: There is a schedule and no norm, in a clean stage too.
        """
        if self.schedule is None:
            yield SILENT
            return
        with noisy(
            norms, self.sigma(rollout_step), seed=self.seed, rollout_step=rollout_step
        ) as report:
            yield report

    @contextmanager
    def learning(self, norms: Sequence[Norm], rollout_step: int) -> Iterator[NoiseReport]:
        """The scope of the trainer's passes over that rollout, backward included.

        It changes nothing unless `scope` is ``both``. `norms` are the policy's, in the engine's
        order, `rollout_step` is that of the rollout. The reference policy stays outside.
        """
        if self.scope == "sampler":
            yield SILENT
            return
        with self.sampling(norms, rollout_step) as report:
            yield report

    def state_dict(self) -> dict[str, Any]:
        """What fixes every draw; there is no other state."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that a checkpoint was made with this noise.

        Raises:
            ValueError: It was not, so that going on would change the schedule in mid-run.
        """
        mine, theirs = _flat(self.state_dict()), _flat(state)
        changed = [
            f"{key} {theirs.get(key)!r} -> {mine.get(key)!r}"
            for key in sorted(set(mine) | set(theirs))
            if mine.get(key) != theirs.get(key)
        ]
        if changed:
            raise ValueError(
                f"the noise differs from the checkpoint's: {', '.join(changed)}; set it to the "
                "checkpoint's values or start a new run"
            )


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """Nested fields under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": entry for inner, entry in value.items()}
        else:
            flat[key] = value
    return flat
