"""The learning loop: sample, score, credit, update.

Two clocks run: `rollout_step` counts batches of prompts that were sampled and learned from, and
drives noise, seeds and the learning rate; `updates_done` counts optimizer steps.
Lightning owns processes, devices, checkpoints and loggers; the step is ours (manual
optimisation), because a batch of prompts is not one backward pass.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from qerl.algorithm.algorithm import Algorithm
from qerl.algorithm.diagnostics import Diagnostics
from qerl.data.prompt_set import PromptSet
from qerl.model.policy import Policy
from qerl.noise.aqn import Noise
from qerl.noise.scope import NoiseReport
from qerl.reward.reward import Reward
from qerl.rollout.engine import Engine
from qerl.rollout.parity import ParityProbe, SamplerIsNotPolicyError
from qerl.training import distributed
from qerl.training.checkpoint import check_same_run
from qerl.training.schedule import LearningRate
from qerl.training.steps import RemainingSteps
from qerl.types import Experience, Rollouts, Scored

log = logging.getLogger(__name__)

# Draws of one rollout step must not repeat each other's samples where a small prompt set comes
# round again within the step.
_SEED_STRIDE = 1_000_003


class Observer(Protocol):
    """Hears how far a long phase of a step has come."""

    def on_phase(self, name: str, done: int, total: int) -> None:
        """`done` of `total` of phase `name`."""
        ...


class NothingToLearnError(RuntimeError):
    """Every group that was drawn is all right or all wrong."""


@dataclass(frozen=True, kw_only=True)
class StepView:
    """The step that just ended, for observers."""

    rollout_step: int
    metrics: Mapping[str, float]
    rollouts: Rollouts
    scored: Scored


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a learner is made of."""

    policy: Policy
    engine: Engine
    prompts: PromptSet
    reward: Reward
    decode: Callable[[list[int]], str]
    """Text of token ids, special tokens kept."""
    algorithm: Algorithm
    noise: Noise
    optimizer: Callable[..., torch.optim.Optimizer]
    """Called with the trainable parameters and `lr`."""
    learning_rate: LearningRate


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The loop's own numbers."""

    seed: int
    max_steps: int
    """Rollout steps."""
    grad_clip: float
    """Largest global norm of the adapters' gradient."""
    max_mismatch_nats: float
    """Bound on the mean |log mu - log pi| of a step without noise; the run stops beyond it."""
    probe: ParityProbe | None = None
    """Before the first step, and where its own tokens carry noise; None does not look."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Settings that make the run what it is, flat; a resumed run must agree on them."""

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ValueError(f"max_steps={self.max_steps}: at least 1 rollout step")
        if not self.grad_clip > 0:  # a NaN is not above 0 either
            raise ValueError(f"grad_clip={self.grad_clip}: a gradient norm above 0")


class PolicyLearner(LightningModule):
    """One policy learning from its own completions."""

    def __init__(self, parts: Parts, settings: LoopSettings) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False
        self.policy = parts.policy
        self.parts = parts
        self.settings = settings
        self.rollout_step = 0
        self.updates_done = 0
        self.cursor = 0
        """Prompts drawn so far, over all processes."""
        self.observers: list[Observer] = []
        self.last_step: StepView | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every rollout step is done."""
        return self.rollout_step >= self.settings.max_steps

    def training_step(self, batch: int, batch_idx: int) -> None:
        """One rollout step: sample, score, credit, update."""
        rollouts, scored, metrics = self.sample()
        with self.parts.noise.learning(self.policy.noisy_norms, self.rollout_step):
            experience = self.credit(rollouts, scored)
            metrics |= self.update(experience)
        self._finish(rollouts, scored, metrics)

    def sample(self) -> tuple[Rollouts, Scored, dict[str, float]]:
        """The step's rollouts with their scores.

        With dynamic sampling, prompts are drawn until every group has mixed rewards or the budget
        is spent; the metrics describe everything that was drawn.

        Raises:
            NothingToLearnError: dynamic sampling spent its budget without one group to learn from.
        """
        algorithm = self.parts.algorithm
        local = algorithm.prompts_per_step // self.trainer.world_size
        draws = [self._draw(0)]
        if algorithm.dynamic_sampling is None:
            rollouts, scored = draws[0][0], draws[0][1]
            return rollouts, scored, self._sampling_metrics(draws)
        while True:
            pairs = [(rollouts, scored) for rollouts, scored, _ in draws]
            selection = algorithm.dynamic_sampling.select(pairs, local)
            # All processes draw while one has to, so that they share one place in the prompts.
            if distributed.sum_over_processes(float(selection.status == "drawing")) == 0:
                break
            draws.append(self._draw(len(draws)))
        if distributed.sum_over_processes(float(selection.groups_mixed)) == 0:
            raise NothingToLearnError(selection.describe())
        if selection.status == "exhausted":
            log.warning(selection.describe())
        metrics = self._sampling_metrics(draws) | selection.metrics()
        return selection.rollouts, selection.scored, metrics

    def credit(self, rollouts: Rollouts, scored: Scored) -> Experience:
        """What the rollouts teach, with the log-probabilities that the objective needs."""
        algorithm = self.parts.algorithm
        experience = algorithm.experience(
            rollouts, scored, reduce_sum=distributed.sum_over_processes
        )
        if algorithm.needs_old_logprobs:
            experience = replace(experience, old_logprobs=self._logprobs(experience, "old"))
        if algorithm.needs_ref_logprobs:
            with self.policy.reference():
                experience = replace(experience, ref_logprobs=self._logprobs(experience, "ref"))
        return experience

    def update(self, experience: Experience) -> dict[str, float]:
        """One optimizer step for each of the algorithm's minibatches."""
        rate = self.parts.learning_rate.at(self.rollout_step)
        started = time.perf_counter()
        total, norms = Diagnostics.empty(self.device), []
        loss_sum = 0.0
        for rows in self.parts.algorithm.minibatches(experience):
            loss, diagnostics = self._accumulate(experience, rows)
            self._check_sampler(diagnostics, experience.rollouts)
            total = total + diagnostics
            loss_sum += loss
            if distributed.sum_over_processes(float(len(rows))) > 0:
                norms.append(self._apply_gradient(rate))
        metrics = total.reduced(distributed.all_sum, distributed.all_max).metrics()
        return metrics | {
            "train/loss": distributed.sum_over_processes(loss_sum),
            "train/grad_norm": max(norms, default=0.0),
            "train/updates": float(len(norms)),
            "train/learning_rate": rate,
            "time/update_s": time.perf_counter() - started,
        }

    def phase(self, name: str, done: int, total: int) -> None:
        """Tell the observers how far a long phase has come."""
        for observer in self.observers:
            observer.on_phase(name, done, total)

    # Sampling -----------------------------------------------------------------------------------

    def _draw(self, draw: int) -> tuple[Rollouts, Scored, dict[str, float]]:
        """One batch of prompts, sampled under this step's noise, and scored."""
        parts, algorithm, step = self.parts, self.parts.algorithm, self.rollout_step
        prompts = parts.prompts.batch(
            self.cursor,
            algorithm.prompts_per_step,
            rank=self.trainer.global_rank,
            world=self.trainer.world_size,
        )
        self.cursor += algorithm.prompts_per_step
        parts.engine.sync()
        hidden = parts.noise.scope == "sampler" and parts.noise.sigma(step) > 0
        if (probe := self._probe()) is not None and hidden and draw == 0:
            probe.check(self.policy, parts.engine, prompts, rollout_step=step)
        with parts.noise.sampling(parts.engine.norms, step) as report:
            rollouts = parts.engine.generate(
                prompts,
                algorithm.sampling,
                seed=self.settings.seed + _SEED_STRIDE * draw,
                rollout_step=step,
                sigma=report.sigma,
                progress=lambda done, total: self.phase("sampling", done, total),
            )
        parts.engine.release()
        started = time.perf_counter()
        self.phase("scoring", 0, len(rollouts.lengths))
        scored = parts.reward(rollouts, parts.decode)
        return rollouts, scored, self._draw_metrics(report, time.perf_counter() - started)

    def _probe(self) -> ParityProbe | None:
        """The check of an engine that can fall out of step with the policy."""
        return self.settings.probe if self.parts.engine.copies else None

    def _draw_metrics(self, report: NoiseReport, reward_s: float) -> dict[str, float]:
        stats = self.parts.engine.stats
        engine = {} if stats is None else stats.metrics()
        return engine | report.metrics() | {"time/reward_s": reward_s}

    def _sampling_metrics(
        self, draws: list[tuple[Rollouts, Scored, dict[str, float]]]
    ) -> dict[str, float]:
        """Rewards, lengths and speed over everything that was drawn."""
        rewards = torch.cat([scored.rewards.flatten() for _, scored, _ in draws])  # [B]
        lengths = torch.cat([rollouts.lengths for rollouts, _, _ in draws]).float()  # [B]
        truncated = torch.cat([rollouts.truncated for rollouts, _, _ in draws])  # [B]
        verdicts = [verdict for _, scored, _ in draws for verdict in scored.verdicts]
        metrics = dict(draws[-1][2])
        seconds = sum(drawn["rollout/seconds"] for _, _, drawn in draws)
        metrics["rollout/tokens"] = float(lengths.sum())
        metrics["rollout/seconds"] = metrics["time/rollout_s"] = seconds
        metrics["rollout/tok_per_s"] = float(lengths.sum()) / max(seconds, 1e-9)
        metrics["time/reward_s"] = sum(drawn["time/reward_s"] for _, _, drawn in draws)
        metrics["train/reward"] = float(rewards.nanmean())
        for name in draws[0][1].components:
            values = torch.cat([scored.components[name].flatten() for _, scored, _ in draws])
            metrics[f"reward/{name}"] = float(values.nanmean())
        metrics["rollout/length_mean"] = float(lengths.mean())
        metrics["rollout/truncated_share"] = float(truncated.float().mean())
        metrics["rollout/no_answer_share"] = sum(v.answer is None for v in verdicts) / len(verdicts)
        return metrics | self.parts.algorithm.group_metrics(draws[-1][1])

    # Learning -----------------------------------------------------------------------------------

    @torch.no_grad()
    def _logprobs(self, experience: Experience, name: str) -> Tensor:
        """Log-probability of every token that counts, nats [B, C]; 0 elsewhere."""
        algorithm = self.parts.algorithm
        logprobs = torch.zeros_like(experience.weights)  # [B, C]
        packs = algorithm.micro_batches(experience, experience.rows)
        for done, packed in enumerate(packs):
            self.phase(f"scoring with {name}", done, len(packs))
            scores, _ = self.policy.score(packed.to(self.device), algorithm.temperature)  # [N]
            logprobs[packed.sequence, packed.offset] = scores.cpu()
        return logprobs

    def _accumulate(self, experience: Experience, rows: list[int]) -> tuple[float, Diagnostics]:
        """Add the gradient of the loss over `rows`; the loss and what it looked like."""
        algorithm = self.parts.algorithm
        packs = algorithm.micro_batches(experience, rows)
        total = Diagnostics.empty(self.device)
        loss_sum = torch.zeros((), device=self.device)
        for done, packed in enumerate(packs):
            self.phase("updating", done, len(packs))
            on_device = packed.to(self.device)
            logprobs, entropy = self.policy.score(on_device, algorithm.temperature)  # [N], [N]
            out = algorithm.loss(packed, experience, logprobs, entropy)
            # Not manual_backward: gradients are summed over processes once, after the last pack.
            out.loss.backward()
            total = total + out.diagnostics
            loss_sum += out.loss.detach()
        return float(loss_sum), total

    def _check_sampler(self, diagnostics: Diagnostics, rollouts: Rollouts) -> None:
        """Stop before learning from samples of something that is not the policy."""
        noisy_sampler = rollouts.sigma > 0 and self.parts.noise.scope == "sampler"
        gap = diagnostics.metrics().get("train/mismatch_mean_abs", 0.0)
        bound, engine = self.settings.max_mismatch_nats, self.parts.engine.name
        if not (noisy_sampler or gap <= bound):  # NaN is above every bound
            raise SamplerIsNotPolicyError.of(engine, gap, bound, self.rollout_step)

    def _apply_gradient(self, rate: float) -> float:
        """One optimizer step at `rate`; the gradient's norm before clipping.

        Raises:
            FloatingPointError: the gradient is not finite; the adapters are left as they were.
        """
        parameters = self._trainable()
        distributed.sum_gradients(parameters)
        norm = float(nn.utils.clip_grad_norm_(parameters, self.settings.grad_clip))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"rollout step {self.rollout_step}: the gradient's norm is {norm}; nothing was "
                "updated. Resume from the last checkpoint with a smaller learning rate or noise"
            )
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.updates_done += 1
        return norm

    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.policy.parameters() if parameter.requires_grad]

    def _finish(self, rollouts: Rollouts, scored: Scored, metrics: dict[str, float]) -> None:
        """Publish the step and advance the clock."""
        metrics |= {
            "train/optimizer_step": float(self.updates_done),
            "train/epoch": self.parts.prompts.epoch(self.cursor),
        }
        metrics = distributed.merged_metrics(metrics)
        self.last_step = StepView(
            rollout_step=self.rollout_step, metrics=metrics, rollouts=rollouts, scored=scored
        )
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.rollout_step)
        self.rollout_step += 1

    # Lightning's side ---------------------------------------------------------------------------

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = self._trainable()
        if not parameters:
            raise ValueError("nothing to train: the policy has no adapters (model.lora)")
        return self.parts.optimizer(parameters, lr=self.parts.learning_rate.at(0))

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(RemainingSteps(self), batch_size=None)

    def on_train_start(self) -> None:
        """See that the sampler follows every kind of adapter before it is learned from."""
        probe, engine = self._probe(), self.parts.engine
        if probe is not None and not self.is_finished:
            self.phase("checking the sampler", 0, 1)
            few = self.parts.prompts.batch(0, probe.prompts)
            probe.check_targets(self.policy, engine, few, rollout_step=self.rollout_step)
            engine.release()

    def on_train_end(self) -> None:
        distributed.assert_equal(self._trainable(), "adapters")

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """The adapters alone; the base is frozen and comes from its checkpoint."""
        return self.policy.adapter_state()

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> None:
        """Set the adapters."""
        self.policy.load_adapter_state(state_dict)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["qerl"] = {
            "rollout_step": self.rollout_step,
            "optimizer_step": self.updates_done,
            "cursor": self.cursor,
            "noise": self.parts.noise.state_dict(),
            "identity": dict(self.settings.identity),
            "torch_rng": torch.get_rng_state(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["qerl"]
        check_same_run(saved["identity"], dict(self.settings.identity))
        self.parts.noise.load_state_dict(saved["noise"])
        self.rollout_step = saved["rollout_step"]
        self.updates_done = saved["optimizer_step"]
        self.cursor = saved["cursor"]
        torch.set_rng_state(saved["torch_rng"])
