"""Where metrics go while a run lasts: a CSV file, Weights & Biases, or nowhere.

Each option opens a Lightning logger for a run. The x-axis of all of them is the rollout step: the
learner logs it as ``step``, which Lightning takes for the axis (its own counter under manual
optimisation counts optimizer steps).
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from qerl.record.completions import COLUMNS, Row

_WANDB_ID = "wandb_id"


class LogOption(Protocol):
    """An option of ``conf/logger/``."""

    def open(self, run_dir: Path, name: str, checkpoint: Path | None) -> Logger | Literal[False]:
        """The logger of a run.

        Args:
            run_dir: the run's own folder; nothing is written outside it.
            name: what the run is called where runs are listed.
            checkpoint: what the run resumes from, None for a new run.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class NoLog:
    """The record and the completions of the run folder, no logger."""

    def open(self, run_dir: Path, name: str, checkpoint: Path | None) -> Literal[False]:
        return False


@dataclass(frozen=True, kw_only=True)
class CsvLog:
    """``<run_dir>/csv/version_<n>/metrics.csv``, a row a step, on the disk at every step.

    A resumed run starts the next version: Lightning's CSV logger empties the folder it is given.
    """

    def open(self, run_dir: Path, name: str, checkpoint: Path | None) -> Logger:
        return CSVLogger(save_dir=run_dir, name="csv", flush_logs_every_n_steps=1)


@dataclass(frozen=True, kw_only=True)
class WandbLog:
    """A run of Weights & Biases; a resumed run goes on in the same one."""

    project: str = "qerl"

    entity: str | None = None
    """Team or user; None is the account's default."""

    mode: Literal["online", "offline", "disabled"] = "online"
    """``offline`` keeps the run in the run folder for ``wandb sync``."""

    table_every_n_steps: int = 10
    """Rollout steps between tables of completions."""

    tags: tuple[str, ...] = ()

    init_timeout_s: int = 30
    """Seconds to reach the server before the run gives up instead of waiting."""

    def __post_init__(self) -> None:
        if self.mode not in ("online", "offline", "disabled"):
            raise ValueError(f"logger.mode={self.mode!r}: online, offline or disabled")
        if self.table_every_n_steps < 1:
            raise ValueError(f"logger.table_every_n_steps={self.table_every_n_steps}: at least 1")

    def open(self, run_dir: Path, name: str, checkpoint: Path | None) -> Logger:
        saved = saved_wandb_id(checkpoint) if checkpoint else None
        return WandbRun(self, run_dir, name, saved or uuid.uuid4().hex[:8])


class WandbRun(WandbLogger):
    """Lightning's W&B logger with three differences.

    It never waits for a login that nobody can type, it ends its run with the trainer (a second
    job of a sweep in the same process would otherwise log into the first job's run), and it takes
    tables of completions. Checkpoints are not uploaded: they stay in the run folder.
    """

    def __init__(self, option: WandbLog, run_dir: Path, name: str, run_id: str) -> None:
        import wandb  # here and below: seconds of import that only runs with W&B should pay

        super().__init__(
            name=name,
            save_dir=run_dir,
            id=run_id,
            project=option.project,
            log_model=False,
            entity=option.entity,
            mode=option.mode,
            tags=list(option.tags),
            # The live display redraws lines; captured, it would fill the run's console log.
            settings=wandb.Settings(console="off", init_timeout=option.init_timeout_s, quiet=True),
        )
        run_dir.mkdir(parents=True, exist_ok=True)  # W&B falls back to /tmp without it
        self.option = option
        self.run_id = run_id

    @property
    def experiment(self) -> Any:
        """The W&B run, started at first use.

        Raises:
            ValueError: without a login and a terminal to type one, or without the server.
        """
        import wandb

        try:
            return super().experiment
        except (wandb.errors.UsageError, wandb.errors.CommError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"logger=wandb: no run could be started ({reason}): log in once (wandb login), or "
                "keep the run local with logger.mode=offline (wandb sync uploads it later), or "
                "choose logger=csv"
            ) from error

    @rank_zero_only
    def log_completions(self, rows: Sequence[Row], step: int) -> None:
        """Log rows as the table ``completions`` at a rollout step."""
        data = [[_cell(row[column]) for column in COLUMNS] for row in rows]
        self.log_table("completions", columns=list(COLUMNS), data=data, step=step)

    @property
    def place(self) -> str:
        """Where the run can be seen: its address, or the folder to sync."""
        if self._experiment is None or self.option.mode == "disabled":
            return ""
        if self.option.mode == "offline":
            return f"wandb sync {Path(self._experiment.dir).parent}"
        return str(self._experiment.url)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """End the W&B run with the trainer."""
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None


def saved_wandb_id(checkpoint: Path) -> str | None:
    """The W&B run that a checkpoint belongs to, None where it was logged elsewhere."""
    # The trainer loads this same file whole a moment later; mapping it reads only what is asked.
    saved = torch.load(checkpoint, map_location="cpu", weights_only=False, mmap=True)
    for state in saved.get("callbacks", {}).values():
        if isinstance(state, dict) and state.get(_WANDB_ID):
            return str(state[_WANDB_ID])
    return None


def wandb_state(loggers: Sequence[Logger]) -> dict[str, str]:
    """What a checkpoint needs for `saved_wandb_id`."""
    ids = [logger.run_id for logger in loggers if isinstance(logger, WandbRun)]
    return {_WANDB_ID: ids[0]} if ids else {}


def _cell(value: object) -> object:
    return str(value) if isinstance(value, dict) else value
