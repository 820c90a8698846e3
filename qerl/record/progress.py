"""The live display of a run: a bar of the steps, the last step's figures, the phase in progress.

On a terminal it redraws in place; anywhere else (a log file, CI) it is one plain line a step.
"""

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from qerl.record.completions import Step
from qerl.record.curves import mean

REWARD = "train/reward"
ENTROPY = "train/entropy_nats"
SIGMA = "noise/sigma"
SPEED = "rollout/tok_per_s"

_WIDE = 136  # columns that the bar and the figures need side by side
_LABEL = 16  # columns before a bar, so that bars stand under each other


class Observed(Protocol):
    """The part of the learner that observers read."""

    @property
    def last_step(self) -> Step | None: ...
    @property
    def rollout_step(self) -> int: ...


class StepProgress(ProgressBar):
    """Takes the place of Lightning's progress bar (one `ProgressBar` callback is all it accepts).

    Register it with the learner as well (``learner.observers.append(progress)``) to see phases.
    """

    def __init__(self, total_steps: int, window: int = 10, console: Console | None = None) -> None:
        super().__init__()
        if total_steps < 1:
            raise ValueError(f"total_steps={total_steps}: at least 1 rollout step")
        self.total_steps = total_steps
        self.console = console or Console()
        self._enabled = True
        self._live: Live | None = None
        self._done = 0
        self._metrics: Mapping[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=window)
        self._durations: deque[float] = deque(maxlen=window)
        self._logging: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._phase: tuple[str, int, int] | None = None
        self._started = self._stepped = time.monotonic()

    # Lightning's side ---------------------------------------------------------------------------

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, **_: Any) -> None:
        """Text above the display."""
        self.console.print(*args, markup=False, highlight=False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._done = cast(Observed, pl_module).rollout_step
        self._started = self._stepped = time.monotonic()
        self._open()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._stepped = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        step = cast(Observed, pl_module).last_step
        if step is not None and self._enabled:
            self.show_step(step.rollout_step, step.metrics, time.monotonic() - self._stepped)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._close()

    # The display --------------------------------------------------------------------------------

    def on_phase(self, name: str, done: int, total: int) -> None:
        """Show how far a long phase of the step has come; `total` 0 where that is not known."""
        self._phase = (name, done, total)
        self._open()  # an evaluation before the first step has phases too

    def show_step(self, rollout_step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """Show the figures of a step that took `seconds`."""
        self._done = rollout_step + 1
        self._metrics = metrics
        self._phase = None
        self._durations.append(seconds)
        reward = metrics.get(REWARD, math.nan)
        if math.isfinite(reward):
            self._rewards.append(reward)
        if not self.console.is_terminal:
            self.console.print(self.line(), markup=False, highlight=False, soft_wrap=True)

    def line(self) -> str:
        """The last step as plain text."""
        return "  ".join(
            [f"step {self._done}/{self.total_steps}", *self._figures(), f"eta {self._eta()}"]
        )

    def __rich__(self) -> RenderableType:
        wide = self.console.width >= _WIDE
        figures = Text("  ".join(self._figures(with_mean=True)), style="cyan")
        elapsed = duration(time.monotonic() - self._started)
        head = Table.grid(padding=(0, 1, 0, 0))
        head.add_row(
            Text(f"step {self._done}/{self.total_steps}".ljust(_LABEL), style="bold"),
            _bar(self._done, self.total_steps),
            Text(f"{elapsed} · eta {self._eta()}".ljust(18), style="dim"),
            *([figures] if wide else []),
        )
        lines: list[RenderableType] = [head] if wide or not figures else [head, figures]
        if self._phase is not None:
            lines.append(_phase_line(*self._phase))
        return Group(*lines)

    def _figures(self, with_mean: bool = False) -> list[str]:
        """The figures that the step has, each with its unit."""
        metrics = self._metrics
        found = []
        if REWARD in metrics:
            smooth = (
                f" (mean {mean(list(self._rewards)):.2f})" if with_mean and self._rewards else ""
            )
            found.append(f"reward {_number(metrics[REWARD], '.2f')}{smooth}")
        if ENTROPY in metrics:
            found.append(f"entropy {_number(metrics[ENTROPY], '.2f')} nats")
        if SIGMA in metrics:
            found.append(f"sigma {_number(metrics[SIGMA], '.4f')}")
        if SPEED in metrics:
            found.append(f"{_number(metrics[SPEED], '.0f')} tok/s")
        return found

    def _eta(self) -> str:
        if not self._durations:
            return "–"
        return duration(mean(list(self._durations)) * max(0, self.total_steps - self._done))

    def _open(self) -> None:
        if self._enabled and self._live is None and self.console.is_terminal:
            self._live = Live(
                get_renderable=self.__rich__, console=self.console, refresh_per_second=4
            )
            terminal = (sys.stdout, sys.stderr)
            self._live.start()
            # Handlers hold the streams they were made with; their lines must go above the display.
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream in terminal:
                    self._logging.append((handler, handler.setStream(sys.stdout)))

    def _close(self) -> None:
        if self._live is not None:
            self._phase = None
            for handler, stream in self._logging:
                handler.setStream(stream)
            self._logging.clear()
            self._live.stop()
            self._live = None


def duration(seconds: float) -> str:
    """``42s``, ``1m20s`` or ``2h05m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _phase_line(name: str, done: int, total: int) -> RenderableType:
    line = Table.grid(padding=(0, 1, 0, 0))
    if total > 0:
        line.add_row(
            Text(f"  {name}".ljust(_LABEL)), _bar(done, total), Text(f"{done}/{total}", style="dim")
        )
    else:
        line.add_row(Text(f"  {name}".ljust(_LABEL)), Text(str(done), style="dim"))
    return line


def _bar(done: int, total: int) -> Bar:
    return Bar(
        total=total,
        completed=min(done, total),
        width=24,
        complete_style="green",
        finished_style="green",
    )


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "–"
