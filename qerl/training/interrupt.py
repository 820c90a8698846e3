"""Ctrl-C and SIGTERM end a run between two steps, with a checkpoint; a second one, at once."""

import logging
import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from qerl.training.distributed import sum_over_processes

log = logging.getLogger(__name__)


class GracefulStop(Callback):
    """The first signal asks the loop to stop after the step in progress; the second raises.

    An evaluation changes nothing that would have to be saved, so a signal ends it at once: register
    this callback with the learner's observers too, which hear of its progress. Put it first among
    the callbacks, so that those after it see the request at the end of the same step.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The signal that asked for the stop; None where nobody did."""

        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not earlier: Lightning sets its own handler for SIGTERM when the fit begins, and that one
        # would end the process as if nothing had been left to do.
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # Every process stops after the same step, whichever of them got the signal.
        if sum_over_processes(float(self.signal is not None)) > 0:
            trainer.should_stop = True

    def on_phase(self, name: str, done: int, total: int) -> None:
        """End an evaluation that a signal came into."""
        if self.signal is not None and name.startswith("held-out"):
            raise KeyboardInterrupt

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        log.warning(
            "%s: finishing the step in progress, then saving; once more stops at once "
            "(the last checkpoint stays)",
            self.signal.name,
        )
