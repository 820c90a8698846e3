"""Ctrl-C and SIGTERM end a run between two steps, with a checkpoint; a second one, at once."""

import logging
import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

log = logging.getLogger(__name__)


class GracefulStop(Callback):
    """The first signal asks the loop to stop after the step in progress; the second raises."""

    def __init__(self) -> None:
        self.requested = False
        self._trainer: Trainer | None = None
        self._previous: dict[int, Any] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._trainer = trainer
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.requested:
            trainer.should_stop = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        log.warning(
            "%s: finishing the step in progress, then saving; once more stops at once "
            "(the last checkpoint stays)",
            signal.Signals(number).name,
        )
