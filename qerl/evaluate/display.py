"""The progress of an evaluation: a bar on a terminal, a line a chunk anywhere else."""

import math
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from qerl.evaluate.score import score
from qerl.record.completions import Row
from qerl.record.progress import duration


class EvaluationProgress:
    """Use as a context; the display ends with it."""

    def __init__(self, name: str, console: Console | None = None) -> None:
        self.name = name
        self.console = console or Console()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._seconds = 0.0  # per drawn problem, of the mode at work
        self._drawn = 0
        self._done = 0
        self._mode = ""

    def __enter__(self) -> "EvaluationProgress":
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description:<22}"),
                BarColumn(24, complete_style="green"),
                TextColumn("{task.completed:.0f}/{task.total:.0f} problems"),
                TimeElapsedColumn(),
                TextColumn("[cyan]{task.fields[figures]}"),
            )
            self._progress = Progress(*columns, console=self.console)
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def sequences(self, mode: str, done: int, total: int) -> None:
        """Show the completions of the chunk at work."""
        if self._progress is not None and mode in self._tasks:
            self._progress.update(self._tasks[mode], figures=f"drawing {done}/{total}")

    def chunk(self, mode: str, done: int, total: int, rows: Sequence[Row], seconds: float) -> None:
        """Show where a mode stands after a chunk."""
        if mode != self._mode:
            self._mode, self._seconds, self._drawn, self._done = mode, 0.0, 0, 0
        if seconds:
            self._seconds += seconds
            self._drawn += done - self._done
        self._done = done
        figures = f"{self._accuracy(mode, rows)}  eta {self._eta(total - done)}"
        if self._progress is None:
            stamp = time.strftime("%H:%M:%S")
            line = f"{stamp} {self.name}  {mode} {done}/{total} problems  {figures}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        if mode not in self._tasks:
            self._tasks[mode] = self._progress.add_task(mode, total=total, figures="")
        self._progress.update(self._tasks[mode], completed=done, figures=figures)

    def _accuracy(self, mode: str, rows: Sequence[Row]) -> str:
        of = score(mode, rows).estimate
        error = f" ± {100 * of.standard_error:.1f}" if math.isfinite(of.standard_error) else ""
        return f"{100 * of.mean:.1f}{error} %"

    def _eta(self, left: int) -> str:
        if left and not self._drawn:
            return "–"
        return duration(self._seconds / max(1, self._drawn) * left)
