"""Checkpoints that a kill cannot spoil, and the check that a resumed run is the same run.

A checkpoint holds the adapters (fp32), the optimizer, the two clocks, every process's place in the
prompts, the noise's state and the callbacks' curves; never the frozen base. Sampling needs no
random state: each sequence's seed derives from (seed, rollout step, prompt, sample).
"""

import logging
import os
import pickle
import re
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{6})\.ckpt")


class Clocked(Protocol):
    """The part of the learner that names a checkpoint."""

    rollout_step: int

    @property
    def is_finished(self) -> bool:
        """Whether every rollout step is done."""
        ...


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or does not belong to this run."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames, so that a file with its final name is whole."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".partial-{os.getpid()}")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except (OSError, RuntimeError) as error:
            partial.unlink(missing_ok=True)
            newest = latest(target.parent)
            kept = (
                f"the last whole checkpoint is {newest}" if newest else "no checkpoint exists yet"
            )
            raise CheckpointError(
                f"{target}: not written ({error}); {kept}; free disk space and resume"
            ) from error


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder` by rising rollout step; other files, copies too, do not count."""
    return sorted(path for path in folder.glob("step-*.ckpt") if _NAME.fullmatch(path.name))


def latest(folder: Path) -> Path | None:
    """The checkpoint with the highest rollout step in `folder`; None where there is none."""
    return max(checkpoints(folder), default=None)


def latest_whole(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint in `folder` that can be read, and the learner's state in it.

    Raises:
        CheckpointError: there is none; names those that are damaged.
    """
    damaged = []
    for path in reversed(checkpoints(folder)):
        try:
            # Mapped, so that only what is asked for is read; the trainer loads it whole later.
            saved = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
            state: dict[str, Any] = saved["qerl"]
        except (RuntimeError, EOFError, KeyError, OSError, pickle.UnpicklingError) as error:
            log.warning("%s is damaged (%s); trying the one before it", path, _first_line(error))
            damaged.append(path.name)
            continue
        return path, state
    found = f"only damaged ones ({', '.join(damaged)})" if damaged else "none"
    raise CheckpointError(
        f"{folder}: no checkpoint step-*.ckpt to resume from, {found}; start a new run"
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class Checkpoints(Callback):
    """Saves at the start, every `every` rollout steps and at the end; keeps the newest `keep`."""

    def __init__(self, folder: Path, every: int, keep: int = 2) -> None:
        if every < 1:
            raise ValueError(f"checkpoint_every={every}: at least 1 rollout step")
        self.folder = folder
        self.every = every
        self.keep = keep
        self._saved: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            for left in self.folder.glob("step-*.partial-*"):  # of a process that was killed
                left.unlink()
        # The first process's view for all: another may look when the file is already there.
        if trainer.strategy.broadcast(latest(self.folder) is None):
            self._save(trainer, pl_module)
        else:
            self._saved = cast(Clocked, pl_module).rollout_step

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        clock = cast(Clocked, pl_module)
        # The last step is saved here and not at the end: an evaluation may come between the two.
        if clock.rollout_step % self.every == 0 or trainer.should_stop or clock.is_finished:
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer, pl_module)

    def _save(self, trainer: Trainer, module: LightningModule) -> None:
        """Save this rollout step once; every process takes part in every save."""
        step = cast(Clocked, module).rollout_step
        if step == self._saved:
            return
        trainer.save_checkpoint(self.folder / f"step-{step:06d}.ckpt")
        self._saved = step
        if trainer.is_global_zero:
            for old in checkpoints(self.folder)[: -self.keep]:
                old.unlink()


def check_same_run(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Refuse to continue a run under settings that would make it another run.

    Args:
        saved: flat settings of the checkpoint's run.
        current: flat settings of this run.

    Raises:
        CheckpointError: naming each setting that differs, with both values.
    """
    keys = sorted(saved.keys() | current.keys())
    changed = [key for key in keys if saved.get(key) != current.get(key)]
    if changed:
        listed = "; ".join(f"{key}: {saved.get(key)!r} -> {current.get(key)!r}" for key in changed)
        raise CheckpointError(
            f"the checkpoint belongs to a run with other settings ({listed}); "
            "resume with the same settings, or start a new run"
        )
