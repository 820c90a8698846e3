"""Evaluation during a run: before and after it, and every n steps on a fixed subset."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer

from qerl.evaluate.harness import Evaluation, evaluate
from qerl.model.policy import Policy
from qerl.record.curves import named_errors
from qerl.training.learner import PolicyLearner
from qerl.types import Prompts, Sampling

Save = Callable[[Policy, Path], None]
"""Writes a policy's adapters to a folder."""


class HeldOut(Callback):
    """Evaluates on held-out problems before the first step and after the last.

    The result before training is part of the checkpoint, so that a resumed run compares with the
    start of the run and not with its own.
    """

    def __init__(self, prompts: Prompts, sampling: Sampling, *, before: bool, after: bool) -> None:
        self.prompts = prompts
        self.sampling = sampling
        self.before = before
        self.after = after
        self.results: dict[str, dict[str, float]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.before and "before" not in self.results:
            self._run("before", pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        learner = cast(PolicyLearner, pl_module)
        if self.after and learner.rollout_step >= learner.settings.max_steps:
            self._run("after", pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"results": self.results}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.results = dict(state_dict["results"])

    def _run(self, when: str, module: LightningModule) -> None:
        learner = cast(PolicyLearner, module)
        result = _evaluate(learner, self.prompts, self.sampling, f"held-out {when}")
        self.results[when] = result.summary()


@dataclass(frozen=True, kw_only=True)
class Best:
    """Where the best adapters go."""

    folder: Path
    save: Save


class Validation(Callback):
    """Evaluates every `every` rollout steps; the figures become ``val/...`` of that step.

    Register it before the observer that keeps curves and before the callback that saves
    checkpoints: both take the step's figures from the learner. Noise is off, and every evaluation
    draws with the same random numbers, so that differences between steps are those of the policy.

    Args:
        prompts: the fixed subset.
        sampling: how completions are drawn.
        every: rollout steps from one evaluation to the next; the first follows step `every`.
        best: where the adapters with the highest mean@k so far are kept; None keeps none. Of
            equals the earlier stays.
    """

    def __init__(
        self, prompts: Prompts, sampling: Sampling, *, every: int, best: Best | None = None
    ) -> None:
        if every < 1:
            raise ValueError(
                f"trainer.evaluation.every={every}: at least 1 rollout step; null validates never"
            )
        self.prompts = prompts
        self.sampling = sampling
        self.every = every
        self.best = best
        self.best_mean = -math.inf
        self.best_step: int | None = None
        """Rollout steps learned from by the adapters that are kept; None before the first."""
        self._began = time.monotonic()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._began = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        learner = cast(PolicyLearner, pl_module)
        step = learner.last_step
        if step is None or learner.rollout_step % self.every:
            return
        ended = time.monotonic()
        result = _evaluate(learner, self.prompts, self.sampling, "validation")
        self._keep(learner, result)
        metrics = {f"val/{name}": value for name, value in named_errors(result.summary()).items()}
        metrics["val/best_mean_at_k"] = self.best_mean
        metrics["time/validation_s"] = time.monotonic() - ended
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step.rollout_step)
        # The observer would count the evaluation as time of the step.
        timed = {"time/step_s": ended - self._began, **step.metrics, **metrics}
        learner.last_step = replace(step, metrics=timed)

    def state_dict(self) -> dict[str, Any]:
        return {"best_mean": self.best_mean, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_mean, self.best_step = state_dict["best_mean"], state_dict["best_step"]

    def _keep(self, learner: PolicyLearner, result: Evaluation) -> None:
        if not result.mean > self.best_mean:
            return
        self.best_mean, self.best_step = result.mean, learner.rollout_step
        if self.best is not None and learner.global_rank == 0:
            self.best.save(learner.policy, self.best.folder)


def _evaluate(
    learner: PolicyLearner, prompts: Prompts, sampling: Sampling, phase: str
) -> Evaluation:
    parts = learner.parts
    return evaluate(
        parts.engine,
        prompts,
        sampling,
        parts.reward,
        parts.decode,
        seed=learner.settings.seed,
        progress=lambda done, total: learner.phase(phase, done, total),
    )
