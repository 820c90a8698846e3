"""The progress of a conversion: a bar on a terminal, a line a part anywhere else."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from qerl.convert.job import Stage
from qerl.record.progress import duration


class ConversionProgress:
    """Use as a context; the display ends with it."""

    def __init__(self, name: str, console: Console | None = None, unit: str = "weights") -> None:
        self.name = name
        self.unit = unit
        self.console = console or Console()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._first: tuple[float, int] | None = None  # when, and weights done by then
        self._found = 0

    def __enter__(self) -> "ConversionProgress":
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(24, complete_style="green"),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                TextColumn("[cyan]{task.fields[figures]}"),
            )
            self._progress = Progress(*columns, console=self.console)
            self._task = self._progress.add_task(self.name, total=None, figures="")
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

    def stage(self, stage: Stage) -> None:
        """Show a part that is done."""
        if stage.found:
            self._found += 1
            if stage.done < stage.total:
                return
        now = time.monotonic()
        # The first part counts for nothing: it is the embedding, which is only copied, or what a
        # resumed conversion started up with.
        self._first = self._first or (now, stage.done)
        figures = f"{stage.label}  {self._speed(now, stage)}"
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task, total=stage.total, completed=stage.done, figures=figures
            )
            return
        stamp = time.strftime("%H:%M:%S")
        taken_up = f"  {self._found} parts found" if self._found else ""
        self._found = 0
        percent = 100 * stage.done / stage.total
        line = f"{stamp} {self.name}  {percent:.0f} %  {figures}{taken_up}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def calibration(self, what: str, done: int, total: int) -> None:
        """Show calibration sequences on their way through a layer."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, figures=f"{what} {done}/{total} sequences")

    def _speed(self, now: float, stage: Stage) -> str:
        assert self._first is not None
        seconds, weights = now - self._first[0], stage.done - self._first[1]
        if not weights or seconds <= 0:
            return "eta –"
        left = (stage.total - stage.done) * seconds / weights
        return f"{weights / seconds / 1e6:.1f} M {self.unit}/s  eta {duration(left)}"
