"""A learner without a model: the interface that observers see, at no cost."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset

from qerl.record.observer import RunInfo
from qerl.record.schema import Commit, Curve, Record
from qerl.types import Prompts, Rollouts, Scored, Verdict

VERDICTS = (
    Verdict(correct=True, reason="5 = 5", answer="5"),
    Verdict(correct=False, reason="56 != 55", answer="56"),
    Verdict(correct=None, reason="gold unreadable", answer=None),
    Verdict(correct=False, reason="no answer", answer=None),
)


@dataclass(frozen=True, kw_only=True)
class Step:
    rollout_step: int
    metrics: dict[str, float]
    rollouts: Rollouts
    scored: Scored


def make_step(k: int) -> Step:
    """2 prompts x 2 completions; the reward of step k is k / 10."""
    prompts = Prompts(
        ids=("toy/0", "toy/1"), questions=("2+3?", "50+5?"), tokens=((1,), (2,)), golds=("5", "55")
    )
    rollouts = Rollouts(
        prompts=prompts,
        group_size=2,
        completions=torch.ones(4, 3, dtype=torch.int64),
        lengths=torch.tensor([3, 2, 1, 3]),
        sampler_logprobs=torch.zeros(4, 3),
        truncated=torch.tensor([False, False, False, True]),
        rollout_step=k,
        sigma=0.01,
    )
    scored = Scored(
        rewards=torch.tensor([[1.0, 0.0], [float("nan"), 0.0]]),
        components={"accuracy": torch.tensor([[1.0, 0.0], [float("nan"), 0.0]])},
        verdicts=VERDICTS,
        texts=tuple(f"text {b} of step {k}<|end|>" for b in range(4)),
    )
    metrics = {
        "train/reward": k / 10,
        "train/entropy_nats": 0.5 - k / 100,
        "noise/sigma": 0.01,
        "rollout/tok_per_s": 400.0 + k,
    }
    return Step(rollout_step=k, metrics=metrics, rollouts=rollouts, scored=scored)


class _Steps(IterableDataset[int]):
    def __init__(self, learner: "ToyLearner") -> None:
        self.learner = learner

    def __iter__(self) -> Iterator[int]:
        yield from range(self.learner.rollout_step, self.learner.total)


class ToyLearner(LightningModule):
    """Two optimizer steps a rollout step; `stop` is called with each rollout step."""

    def __init__(self, total: int, stop: Callable[[int], None] = lambda k: None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.total = total
        self.stop = stop
        self.layer = torch.nn.Linear(1, 1)
        self.rollout_step = 0
        self.observers: list[Any] = []
        self.last_step: Step | None = None

    def training_step(self, batch: int, batch_idx: int) -> None:
        self.stop(self.rollout_step)
        for observer in self.observers:
            observer.on_phase("sampling", 1, 2)
        for _ in range(2):
            self.layer(torch.ones(1, 1)).sum().backward()
            self.optimizers().step()
            self.optimizers().zero_grad()
        self.last_step = make_step(self.rollout_step)
        for logger in self.loggers:
            logger.log_metrics(self.last_step.metrics, step=self.rollout_step)
        self.rollout_step += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(_Steps(self), batch_size=None)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rollout_step"] = self.rollout_step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.rollout_step = checkpoint["rollout_step"]


class SaveEvery(Callback):
    """A checkpoint after the steps named, like the trainer's own."""

    def __init__(self, folder: Path, after: tuple[int, ...]) -> None:
        self.folder = folder
        self.after = after

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if pl_module.rollout_step in self.after:
            trainer.save_checkpoint(self.folder / f"step-{pl_module.rollout_step}.ckpt")


@pytest.fixture
def learner() -> type[ToyLearner]:
    return ToyLearner


@pytest.fixture
def step() -> Callable[[int], Step]:
    return make_step


@pytest.fixture
def save_every() -> type[SaveEvery]:
    return SaveEvery


@pytest.fixture
def run_info() -> RunInfo:
    return RunInfo(
        name="toy", seed=3, total_steps=5, config={"quant": {"name": "nvfp4"}}, command="python t"
    )


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Trainer]:
    """Fit a learner with callbacks; returns the trainer."""

    def run(
        module: LightningModule,
        callbacks: list[Callback],
        logger: Any = False,
        checkpoint: Path | None = None,
        bar: bool = False,
    ) -> Trainer:
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=logger,
            callbacks=callbacks,
            default_root_dir=tmp_path,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=bar,
            log_every_n_steps=1,
        )
        trainer.fit(module, ckpt_path=checkpoint, weights_only=False)
        return trainer

    return run


@pytest.fixture
def make_record() -> Callable[..., Record]:
    def make(**changes: Any) -> Record:
        fields: dict[str, Any] = {
            "kind": "run",
            "name": "gsm8k_3b_nvfp4",
            "status": "completed",
            "seed": 0,
            "config": {"quant": {"name": "nvfp4"}, "lr": 1e-5, "tags": ["a", "b"]},
            "overrides": ("quant=nvfp4",),
            "command": "python train.py quant=nvfp4",
            "commit": Commit(sha="abcdef0123456789", dirty=False),
            "versions": {"torch": "2.11.0", "vllm": None},
            "device": {"name": "H200", "count": 1},
            "started": "2025-01-31T09:30:00+00:00",
            "ended": "2025-01-31T10:30:00+00:00",
            "summary": {"train/reward": 0.5},
            "curves": {"train/reward": Curve(steps=(0, 1, 3), values=(0.1, 0.2, 0.5))},
            "samples": ({"completion": "a\nb", "reward": 1.0},),
        }
        return Record(**(fields | changes))

    return make
