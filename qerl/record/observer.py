"""RunObserver: listens to a run, keeps its curves and completions, and writes what remains of it.

At the end, however it comes (the last step, Ctrl-C, an error), the run folder holds
``record.json``, ``curves.png``, ``samples.md`` and ``completions.jsonl``, and `record_dir` holds
the record. The curves are part of every checkpoint, so a resumed run's record is the whole run's.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from qerl.record import provenance
from qerl.record.completions import (
    CompletionTable,
    Row,
    Step,
    completion_rows,
    pick_samples,
    samples_page,
    shorten,
)
from qerl.record.curves import CurveBook, mean, named_errors
from qerl.record.figure import plot_curves
from qerl.record.files import write_atomic, write_once
from qerl.record.loggers import WandbRun, wandb_state
from qerl.record.meter import memory_use
from qerl.record.progress import ENTROPY, REWARD, SPEED, Observed, duration
from qerl.record.schema import Record, Status, check_identity, encode

log = logging.getLogger(__name__)

HeldOutResults = Mapping[str, Mapping[str, float]]

_SHARE = 5  # the first and the last figures of a run are means over a fifth of its steps
_SAMPLE_CHARS = 4000  # of a completion in the record; completions.jsonl keeps more


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What the builder knows of a run and the trainer does not."""

    name: str
    seed: int
    total_steps: int
    """Rollout steps of the whole run; a run that ends earlier counts as interrupted."""

    config: Mapping[str, Any]
    """The resolved configuration as plain JSON values."""

    overrides: tuple[str, ...] = ()
    command: str = field(default_factory=provenance.command_line)

    def __post_init__(self) -> None:
        # What a record would refuse after hours is refused before the first step.
        check_identity(self.name, self.config)


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How much of the completions is kept."""

    every_n_steps: int = 1
    """Rollout steps between two entries of ``completions.jsonl``."""

    max_rows: int = 64
    """Completions of a step, from its first prompts on."""

    max_chars: int = 20_000
    """Longer completions lose their middle."""


class RunObserver(Callback):
    """Register it before the callback that saves checkpoints, so that they hold every step.

    Args:
        run: the run's identity and configuration.
        run_dir: the run's own folder.
        record_dir: where records are collected; None keeps this one in `run_dir` only.
        table: how much of the completions is kept.
        held_out: gives the held-out results by ``"before"`` and ``"after"``, each with
            ``mean_at_k`` and ``standard_error``; empty where nothing was evaluated.
    """

    def __init__(
        self,
        run: RunInfo,
        run_dir: Path,
        record_dir: Path | None = None,
        table: TableOptions | None = None,
        held_out: Callable[[], HeldOutResults] = dict,
    ) -> None:
        self.run = run
        self.run_dir = run_dir
        self.record_dir = record_dir
        self.table = table or TableOptions()
        self.held_out = held_out
        self.record_path: Path | None = None
        self.status: Status | None = None
        self._book = CurveBook()
        self._completions = CompletionTable(run_dir / "completions.jsonl")
        self._first: list[Row] = []
        self._last: list[Row] = []
        self._started = provenance.now()
        self._seconds = 0.0  # of all stretches of a resumed run
        self._resumed_at: list[int] = []
        self._began = self._stepped = time.monotonic()
        self._listening = False
        self._wandb: dict[str, str] = {}
        self._places: dict[str, str] = {}
        self._told: set[str] = set()  # held-out results that curves and loggers have

    # During a run -------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or not trainer.is_global_zero:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb_state(trainer.loggers)
        for logger in trainer.loggers:
            logger.log_hyperparams(dict(self.run.config))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listening = trainer.is_global_zero
        if not self._listening:
            return
        done = cast(Observed, pl_module).rollout_step
        self._completions.begin(done if done else None)
        if done:
            self._resumed_at.append(done)
        self._began = self._stepped = time.monotonic()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._stepped = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        step = cast(Observed, pl_module).last_step
        if step is None or not self._listening:
            return
        metered = self._meter(step.metrics, pl_module.device)
        self._book.add(step.rollout_step, {**step.metrics, **metered})
        for logger in trainer.loggers:
            if isinstance(logger, WandbRun):  # in a CSV it would be a second row of the step
                logger.log_metrics(metered, step.rollout_step)
        self._keep_completions(trainer, step)
        self._take_held_out(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        done = cast(Observed, pl_module).rollout_step
        self._end(trainer, "completed" if done >= self.run.total_steps else "interrupted", None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # SystemExit is how Lightning spells SIGTERM.
        stopped = isinstance(exception, KeyboardInterrupt | SystemExit)
        reason = " ".join(f"{type(exception).__name__}: {exception}".split())
        try:
            self._end(trainer, "interrupted" if stopped else "failed", None if stopped else reason)
        except OSError as error:  # must not take the place of the exception that ends the run
            log.error("%s", error.strerror)

    # Checkpoints --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "curves": self._book.state(),
            "started": self._started,
            "seconds": self._seconds + time.monotonic() - self._began,
            "resumed_at": list(self._resumed_at),
            "first_samples": self._first,
            **self._wandb,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._book.load(state_dict["curves"])
        self._started = state_dict["started"]
        self._seconds = state_dict["seconds"]
        self._resumed_at = list(state_dict["resumed_at"])
        self._first = list(state_dict["first_samples"])

    # What remains -------------------------------------------------------------------------------

    @property
    def curves(self) -> CurveBook:
        """The curves so far."""
        return self._book

    def summary_text(self) -> str:
        """A few lines for a person: how the run ended, what it measured, where everything is."""
        count = self._fifth
        lines = [
            ("run", f"{self.run.name}, seed {self.run.seed}: {self.status or 'not started'}"),
            (
                "steps",
                f"{self._steps} of {self.run.total_steps} in {duration(self._seconds)}; "
                f"below, the means of the first and the last {count}",
            ),
        ]
        for label, metric, form, unit in (
            ("reward", REWARD, ".3f", ""),
            ("entropy", ENTROPY, ".3f", " nats"),
            ("speed", SPEED, ".0f", " tok/s"),
        ):
            if values := self._book.values(metric):
                first, last = mean(values[:count]), mean(values[-count:])
                lines.append((label, f"{first:{form}} → {last:{form}}{unit}"))
        if accuracy := self._held_out_text():
            lines.append(("held out", accuracy))
        if peaks := self._book.values("memory/peak_gib"):
            lines.append(("memory", f"peak {max(peaks):.2f} GiB"))
        lines += list(self._places.items())
        return "\n".join(f"{label:<12}{text}" for label, text in lines)

    @property
    def _steps(self) -> int:
        """Rollout steps that ended, of all stretches of a resumed run."""
        return len(self._book.values("time/step_s"))

    @property
    def _fifth(self) -> int:
        """Steps in a fifth of what ended; at least one."""
        return max(1, self._steps // _SHARE)

    def _meter(self, metrics: Mapping[str, float], device: torch.device) -> dict[str, float]:
        """Time and memory of the step, where the learner does not measure them itself."""
        measured = {"time/step_s": time.monotonic() - self._stepped}
        if "memory/peak_gib" not in metrics:
            measured["memory/peak_gib"] = memory_use(device).peak_gib
        return {name: value for name, value in measured.items() if name not in metrics}

    def _keep_completions(self, trainer: Trainer, step: Step) -> None:
        rows = completion_rows(step, self.table.max_rows, self.table.max_chars)
        if step.rollout_step % self.table.every_n_steps == 0:
            self._completions.append(rows)
        short = [{**row, "completion": shorten(row["completion"], _SAMPLE_CHARS)} for row in rows]
        self._first = self._first or pick_samples(short, 2)
        self._last = pick_samples(short, 4)
        for logger in trainer.loggers:
            if (
                isinstance(logger, WandbRun)
                and step.rollout_step % logger.option.table_every_n_steps == 0
            ):
                logger.log_completions(rows, step.rollout_step)

    def _end(self, trainer: Trainer, status: Status, error: str | None) -> None:
        if not self._listening:
            return
        self._listening = False
        self.status = status
        self._seconds += time.monotonic() - self._began
        self._began = time.monotonic()
        self._take_held_out(trainer)
        for logger in trainer.loggers:
            if isinstance(logger, WandbRun) and logger.place:
                self._places["W&B"] = logger.place
        if not self._book.curves:
            return
        self._write(self._record(status, error, trainer))

    def _take_held_out(self, trainer: Trainer) -> None:
        for when, result in self.held_out().items():
            if when in self._told:
                continue
            self._told.add(when)
            named = named_errors(result)
            step = 0 if when == "before" else self.run.total_steps
            self._book.add(step, {f"held_out/{name}": value for name, value in named.items()})
            for logger in trainer.loggers:
                scalars = {f"held_out_{when}/{name}": value for name, value in named.items()}
                logger.log_metrics(scalars, step)
                logger.save()

    def _record(self, status: Status, error: str | None, trainer: Trainer) -> Record:
        summary = self._book.summary(self._fifth)
        if rewards := self._book.values(REWARD):
            summary[f"{REWARD}_first_fifth"] = mean(rewards[: self._fifth])
            summary[f"{REWARD}_last_fifth"] = mean(rewards[-self._fifth :])
        summary["steps"] = self._steps
        summary["time/total_s"] = round(self._seconds, 1)
        for when, result in self.held_out().items():
            summary |= {
                f"held_out_{when}/{name}": value for name, value in named_errors(result).items()
            }
        last = [row for row in self._last if row not in self._first]
        return Record(
            kind="run",
            name=self.run.name,
            status=status,
            seed=self.run.seed,
            config=self.run.config,
            overrides=self.run.overrides,
            command=self.run.command,
            commit=provenance.commit(),
            versions=provenance.versions(),
            device=provenance.device_facts(trainer.strategy.root_device, trainer.world_size),
            started=self._started,
            ended=provenance.now(),
            resumed_at=tuple(self._resumed_at),
            error=error,
            summary=summary,
            curves=self._book.curves,
            samples=(*self._first, *last),
        )

    def _write(self, record: Record) -> None:
        title = f"{self.run.name}, seed {self.run.seed}"
        ending = "" if record.status == "completed" else f"-{record.status}"
        own = self.run_dir / f"record{ending}.json"
        self.record_path = write_once(own, encode(record.document()))
        if self.record_dir is not None:
            self.record_path = record.write(self.record_dir)
        self._places["record"] = str(self.record_path)
        figure = plot_curves({title: [record]}, self.run_dir / "curves.png")
        page = write_atomic(self.run_dir / "samples.md", samples_page(title, record.samples))
        self._places |= {"figure": str(figure), "samples": str(page)}
        if self._completions.path.exists():
            self._places["completions"] = str(self._completions.path)

    def _held_out_text(self) -> str:
        parts = []
        for when, result in self.held_out().items():
            named = named_errors(result)
            accuracy = named.get("mean_at_k", math.nan)
            stderr = named.get("mean_at_k_stderr", math.nan)
            margin = f" ± {stderr:.3f}" if math.isfinite(stderr) else ""
            parts.append(f"{accuracy:.3f}{margin} {when}")
        return ", ".join(parts) + (" (mean@k ± s.e. over problems)" if parts else "")
