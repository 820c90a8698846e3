"""The main job: from a configuration to a trained adapter.

`check` states the rules between groups once; each class states its own at its constructor. After
`assemble` there is no configuration, only typed objects.
"""

import itertools
import logging
import os
import shlex
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, OmegaConf

from qerl.algorithm.algorithm import Algorithm
from qerl.build.config import check_whole, identity, make, quiet_libraries, resolved
from qerl.build.parts import base_model, build_policy, build_prompts, check_memory, decoder
from qerl.evaluate import Best, HeldOut, Validation
from qerl.model.adapter_io import save_peft
from qerl.model.load import load_tokenizer
from qerl.model.source import Source
from qerl.record.observer import RunInfo, RunObserver
from qerl.record.progress import StepProgress
from qerl.reward.reward import Reward
from qerl.rollout.parity import ParityProbe
from qerl.training.checkpoint import (
    AtomicCheckpointIO,
    Checkpoints,
    check_same_run,
    latest,
    latest_whole,
)
from qerl.training.compute import Compute
from qerl.training.interrupt import GracefulStop
from qerl.training.learner import LoopSettings, Parts, PolicyLearner

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    text: str
    """For a person: what was measured and where everything is."""

    objective: float | None
    """Mean reward of the last steps: what a hyper-parameter search maximises."""

    exit_status: int
    """0, or 128 and the number of the signal that stopped the run, as shells have it."""


_LEAST = {
    "seed": 0,
    "trainer.max_steps": 1,
    "trainer.devices": 1,
    "trainer.checkpoint_every": 1,
    "trainer.evaluation.problems": 0,
    "trainer.evaluation.samples": 1,
    "algorithm.prompts_per_step": 1,
    "algorithm.max_new_tokens": 1,
}


def train(cfg: DictConfig) -> Outcome:
    """Train as `cfg` says: the main job."""
    check(cfg)
    quiet_libraries()
    checkpoint = _checkpoint(cfg)
    record_dir = Path(cfg.record_dir) if cfg.record_dir else None
    if record_dir is not None:
        record_dir.mkdir(parents=True, exist_ok=True)  # rather now than after the last step
    learner, held_out = assemble(cfg)
    run_dir = _run_dir(cfg)
    observer = RunObserver(
        _run_info(cfg),
        run_dir,
        record_dir,
        held_out=(lambda: held_out.results) if held_out else dict,
    )
    progress = StepProgress(learner.settings.max_steps)
    stop = GracefulStop()
    learner.observers += [progress, stop]
    # Validation comes before the observer, whose curves take its figures; the others after it.
    callbacks: list[Callback] = [stop, progress, *_validation(cfg, held_out, run_dir), observer]
    callbacks += [held_out] if held_out else []
    callbacks.append(Checkpoints(run_dir / "checkpoints", cfg.trainer.checkpoint_every))
    trainer = _trainer(cfg, run_dir, checkpoint, callbacks)
    try:
        trainer.fit(learner, ckpt_path=checkpoint)
    except (KeyboardInterrupt, SystemExit):  # Lightning makes the one into the other
        if stop.signal is None:
            raise
    finally:
        learner.parts.reward.close()
        if trainer.is_global_zero and not learner.is_finished and latest(run_dir / "checkpoints"):
            log.warning("to go on: %s", _resume_command(run_dir))
    return _outcome(
        cfg, learner, observer, run_dir, 0 if stop.signal is None else 128 + stop.signal
    )


def _probe(cfg: DictConfig) -> ParityProbe | None:
    """The check that the sampler is the policy, as trainer.parity describes it."""
    parity = cfg.trainer.parity
    if parity is None:
        return None
    return ParityProbe(
        bound_nats=cfg.trainer.max_mismatch_nats, prompts=parity.prompts, tokens=parity.tokens
    )


def assemble(cfg: DictConfig) -> tuple[PolicyLearner, HeldOut | None]:
    """The learner and its held-out evaluation, as `cfg` describes them."""
    # What costs nothing comes first, so that a wrong number is refused before a model is loaded.
    settings = LoopSettings(
        seed=cfg.seed,
        max_steps=cfg.trainer.max_steps,
        grad_clip=cfg.trainer.grad_clip,
        max_mismatch_nats=cfg.trainer.max_mismatch_nats,
        probe=_probe(cfg),
        identity=dict(identity(cfg)),
    )
    algorithm: Algorithm = make(cfg.algorithm)
    noise, optimizer = make(cfg.noise), make(cfg.optimizer.factory)
    learning_rate, lora = make(cfg.optimizer.schedule), make(cfg.model.lora)
    reward: Reward = make(cfg.data.reward)
    source: Source = make(cfg.model.source)
    check_memory(cfg, source, lora)
    tokenizer = load_tokenizer(source)
    prompts, held_out = build_prompts(cfg, tokenizer, reward)
    policy = build_policy(cfg, source, lora)
    parts = Parts(
        policy=policy,
        engine=make(cfg.rollout)(policy=policy),
        prompts=prompts,
        reward=reward,
        decode=decoder(tokenizer),
        algorithm=algorithm,
        noise=noise,
        optimizer=optimizer,
        learning_rate=learning_rate,
    )
    return PolicyLearner(parts, settings), held_out


def check(cfg: DictConfig) -> None:
    """Refuse what no single group can see to be wrong: value, constraint, cure.

    Raises:
        ValueError: with one line a person can act on.
    """
    algorithm, world = cfg.algorithm, cfg.trainer.devices
    if algorithm.group_size == 1:
        raise ValueError(
            "algorithm.group_size=1: advantages compare completions of one prompt, so at least 2; "
            "try algorithm.group_size=8"
        )
    check_whole(cfg, {**_LEAST, "algorithm.group_size": 2})
    if algorithm.prompts_per_step % world:
        raise ValueError(
            f"algorithm.prompts_per_step={algorithm.prompts_per_step} does not divide among "
            f"trainer.devices={world}: choose a multiple"
        )
    if world > 1 and cfg.trainer.backend == "nccl" and not torch.cuda.is_available():
        raise ValueError(
            f"trainer.devices={world} with trainer.backend=nccl: NCCL joins GPUs and none is "
            "visible; use trainer.backend=gloo"
        )
    evaluation = cfg.trainer.evaluation
    if evaluation.keep_best and evaluation.every is None:
        raise ValueError(
            "trainer.evaluation.keep_best=true without trainer.evaluation.every: the best of no "
            "evaluation; try trainer.evaluation.every=10"
        )
    if evaluation.every is not None and not (evaluation.problems and cfg.data.held_out):
        raise ValueError(
            f"trainer.evaluation.every={evaluation.every}: there is nothing to validate on "
            f"(data={cfg.data.name} with trainer.evaluation.problems={evaluation.problems}); "
            "choose data that holds problems out, or trainer.evaluation.every=null"
        )
    if cfg.resume and not Path(cfg.resume).is_dir():
        raise ValueError(f"resume={cfg.resume}: no such run folder; name one below out/")


def _validation(cfg: DictConfig, held_out: HeldOut | None, run_dir: Path) -> list[Callback]:
    """The evaluation every n steps, on the problems of the one before and after; often none."""
    evaluation = cfg.trainer.evaluation
    if evaluation.every is None or held_out is None:
        return []
    name = base_model(cfg, make(cfg.model.source))
    best = Best(
        folder=run_dir / "adapter_best",
        save=lambda policy, folder: save_peft(policy, folder, name),
    )
    return [
        Validation(
            held_out.prompts,
            held_out.sampling,
            every=evaluation.every,
            best=best if evaluation.keep_best else None,
        )
    ]


def _trainer(
    cfg: DictConfig, run_dir: Path, checkpoint: Path | None, callbacks: list[Callback]
) -> Trainer:
    """Lightning's trainer: processes, hooks and checkpoints; the step and the bar are ours."""
    compute: Compute = make(cfg.trainer.compute)
    on_gpu = compute.torch_device().type == "cuda"
    strategy: Any = "auto"
    if cfg.trainer.devices > 1:
        # Adapters start from the same seed everywhere, so there is nothing to broadcast.
        strategy = DDPStrategy(process_group_backend=cfg.trainer.backend, init_sync=False)
    return Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=cfg.trainer.devices,
        strategy=strategy,
        max_epochs=1,
        logger=make(cfg.logger).open(run_dir, cfg.name, checkpoint),
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO()],
        default_root_dir=run_dir,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def _run_dir(cfg: DictConfig) -> Path:
    """The folder of this run: the one to resume, or a new one that nothing else uses."""
    if cfg.resume:
        return Path(cfg.resume)
    if os.environ.get("LOCAL_RANK", "0") != "0":  # a process that the first one started
        return Path(os.environ["QERL_RUN_DIR"])
    stamp = datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
    wanted = Path("out") / cfg.name / f"seed{cfg.seed}_{stamp}"
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for count in itertools.count(1):
        run_dir = wanted if count == 1 else wanted.with_name(f"{wanted.name}-{count}")
        try:
            run_dir.mkdir()  # the claim: of two runs that start together, one goes to the next name
        except FileExistsError:
            continue
        break
    os.environ["QERL_RUN_DIR"] = str(run_dir)
    OmegaConf.save(cfg, run_dir / "config.yaml", resolve=True)
    return run_dir


def _checkpoint(cfg: DictConfig) -> Path | None:
    """What to resume from; None for a new run."""
    if not cfg.resume:
        return None
    newest, state = latest_whole(Path(cfg.resume) / "checkpoints")
    check_same_run(state["identity"], dict(identity(cfg)))
    return newest


def _run_info(cfg: DictConfig) -> RunInfo:
    return RunInfo(
        name=cfg.name,
        seed=cfg.seed,
        total_steps=cfg.trainer.max_steps,
        config=resolved(cfg),
        overrides=tuple(HydraConfig.get().overrides.task),
    )


def _resume_command(run_dir: Path) -> str:
    overrides = [o for o in HydraConfig.get().overrides.task if not o.startswith("resume=")]
    return shlex.join(["python", "train.py", *overrides, f"resume={run_dir}"])


def _outcome(
    cfg: DictConfig,
    learner: PolicyLearner,
    observer: RunObserver,
    run_dir: Path,
    exit_status: int,
) -> Outcome:
    """What a person wants to know at the end, and the adapter saved for others to load."""
    rewards = observer.curves.values("train/reward")[-10:]
    objective = sum(rewards) / len(rewards) if rewards else None
    if learner.global_rank != 0:
        return Outcome(text="", objective=objective, exit_status=exit_status)
    adapter = run_dir / "adapter"
    save_peft(learner.policy, adapter, base_model(cfg, make(cfg.model.source)))
    lines = [observer.summary_text(), f"{'adapter':<12}{adapter}"]
    if cfg.trainer.evaluation.keep_best:
        lines.append(f"{'best':<12}{run_dir / 'adapter_best'}")
    if not learner.is_finished:
        lines.append(f"{'resume':<12}{_resume_command(run_dir)}")
    return Outcome(text="\n".join(lines), objective=objective, exit_status=exit_status)
