"""From a configuration to objects: the only file that sees a DictConfig.

`check` states the rules between groups once; each class states its own at its constructor. After
`assemble` there is no configuration, only typed objects.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerBase

from qerl.algorithm.algorithm import Algorithm
from qerl.data.prepare import prepare
from qerl.data.prompt_set import PromptSet
from qerl.evaluate import HeldOut
from qerl.model.adapter_io import save_peft
from qerl.model.load import load_policy, load_tokenizer
from qerl.model.plan import MemoryPlan, check_fits, memory_plan
from qerl.model.policy import Policy
from qerl.model.source import Source
from qerl.quant.packed import Format
from qerl.record.observer import RunInfo, RunObserver
from qerl.record.progress import StepProgress
from qerl.reward.reward import Reward
from qerl.training.checkpoint import AtomicCheckpointIO, CheckpointError, Checkpoints, latest
from qerl.training.compute import Compute
from qerl.training.interrupt import GracefulStop
from qerl.training.learner import LoopSettings, Parts, PolicyLearner, SamplerIsNotPolicyError
from qerl.types import Sampling

log = logging.getLogger(__name__)

EXPECTED_ERRORS = (
    ValueError,
    OSError,
    CheckpointError,
    FloatingPointError,
    InstantiationException,
    SamplerIsNotPolicyError,
)
"""What a person at the keyboard can cure; shown as one line instead of a traceback."""

# Groups whose settings make a run what it is; a resumed run must agree on all of them.
_IDENTITY = ("model", "quant", "noise", "algorithm", "data", "optimizer", "seed")

# Settings inside them that say where something lies, not what it is.
_PLACES = ("cache_dir", "path")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    text: str
    """For a person: what was measured and where everything is."""

    objective: float | None
    """Mean reward of the last steps: what a hyper-parameter search maximises."""

    interrupted: bool


def train(cfg: DictConfig) -> Outcome:
    """Train as `cfg` says: the main job."""
    check(cfg)
    _quiet_libraries()
    run_dir = _run_dir(cfg)
    checkpoint = _checkpoint(cfg)
    learner, held_out = assemble(cfg)
    observer = RunObserver(
        _run_info(cfg),
        run_dir,
        Path(cfg.record_dir) if cfg.record_dir else None,
        held_out=(lambda: held_out.results) if held_out else dict,
    )
    progress = StepProgress(learner.settings.max_steps)
    learner.observers.append(progress)
    stop = GracefulStop()
    callbacks: list[Callback] = [stop, progress, observer, *([held_out] if held_out else [])]
    callbacks.append(Checkpoints(run_dir / "checkpoints", cfg.trainer.checkpoint_every))
    trainer = _trainer(cfg, run_dir, checkpoint, callbacks)
    if trainer.is_global_zero:
        run_dir.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(cfg, run_dir / "config.yaml", resolve=True)
    try:
        trainer.fit(learner, ckpt_path=checkpoint)
    finally:
        learner.parts.reward.close()
        newest = latest(run_dir / "checkpoints")
        if trainer.is_global_zero and learner.rollout_step < learner.settings.max_steps and newest:
            log.warning("to go on from %s: %s", newest.name, _resume_command(run_dir))
    return _outcome(cfg, learner, observer, run_dir, interrupted=stop.requested)


def assemble(cfg: DictConfig) -> tuple[PolicyLearner, HeldOut | None]:
    """The learner and its held-out evaluation, as `cfg` describes them."""
    # What costs nothing comes first, so that a wrong number is refused before a model is loaded.
    settings = LoopSettings(
        seed=cfg.seed,
        max_steps=cfg.trainer.max_steps,
        grad_clip=cfg.trainer.grad_clip,
        max_mismatch_nats=cfg.trainer.max_mismatch_nats,
        identity=dict(_identity(cfg)),
    )
    algorithm: Algorithm = _make(cfg.algorithm)
    noise, optimizer = _make(cfg.noise), _make(cfg.optimizer.factory)
    learning_rate = _make(cfg.optimizer.schedule)
    reward: Reward = _make(cfg.data.reward)
    source: Source = _make(cfg.model.source)
    tokenizer = load_tokenizer(source)
    prompts, held_out = _prompts(cfg, tokenizer, reward)
    policy = _policy(cfg, source)
    parts = Parts(
        policy=policy,
        engine=_make(cfg.rollout)(policy=policy),
        prompts=prompts,
        reward=reward,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
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
    if algorithm.group_size < 2:
        raise ValueError(
            f"algorithm.group_size={algorithm.group_size}: advantages compare completions of one "
            "prompt, so at least 2; try algorithm.group_size=8"
        )
    if algorithm.prompts_per_step % world:
        raise ValueError(
            f"algorithm.prompts_per_step={algorithm.prompts_per_step} does not divide among "
            f"trainer.devices={world}: choose a multiple"
        )
    if cfg.resume and not Path(cfg.resume).is_dir():
        raise ValueError(f"resume={cfg.resume}: no such run folder; name one below out/")


def one_line(error: BaseException) -> str:
    """The error as one line; that of a constructor called by Hydra without Hydra's frame."""
    cause = error.__cause__ if isinstance(error, InstantiationException) else None
    text = " ".join(str(cause if cause is not None else error).split())
    return f"{text} (HYDRA_FULL_ERROR=1 shows the traceback)"


# Objects --------------------------------------------------------------------------------------


def _make(node: Any) -> Any:
    """The object that a `_target_` node describes, with plain Python containers."""
    return instantiate(node, _convert_="all")


def _policy(cfg: DictConfig, source: Source) -> Policy:
    """The policy on its device, after a check that it fits."""
    compute: Compute = _make(cfg.trainer.compute)
    format: Format = _make(cfg.quant)
    lora = _make(cfg.model.lora)
    device = compute.torch_device(int(os.environ.get("LOCAL_RANK", "0")))
    _check_memory(cfg, source, compute, device)
    policy = load_policy(
        source,
        format,
        lora,
        device=device,
        dtype=compute.torch_dtype(),
        shadow=compute.keeps_shadow(),
        seed=cfg.seed,
        checkpoint_layers=compute.checkpoint_layers,
    )
    sizes = {name: count / 2**20 for name, count in policy.memory_bytes().items() if count}
    log.info(
        "%s in %s on %s: %.2f bits per weight of the linears; MiB: %s",
        cfg.model.name,
        format.name,
        device,
        policy.linear_bits_per_weight(),
        ", ".join(f"{name} {size:.0f}" for name, size in sizes.items()),
    )
    return policy


def _check_memory(cfg: DictConfig, source: Source, compute: Compute, device: torch.device) -> None:
    """Refuse a model that cannot fit, naming formats and models that would."""
    lora, dtype, shadow = _make(cfg.model.lora), compute.torch_dtype(), compute.keeps_shadow()

    def plan(geometry: Any, format: Format) -> MemoryPlan:
        return memory_plan(geometry, format, lora, dtype=dtype, shadow=shadow)

    chosen = HydraConfig.get().runtime.choices
    format: Format = _make(cfg.quant)
    geometry = source.geometry()
    others = {
        f"quant={name}": plan(geometry, _make(OmegaConf.load(path)))
        for name, path in _options("quant")
        if name != chosen["quant"]
    }
    for name, path in _options("model"):
        node = OmegaConf.load(path)
        declared = OmegaConf.select(node, "source.geometry")
        if declared is not None and name != chosen["model"]:
            others[f"model={name}"] = plan(_make(declared), format)
    if device.type == "cuda":
        free, name = torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
    else:
        free, name = psutil.virtual_memory().available, "this machine's memory"
    check_fits(plan(geometry, format), free, name, others)


def _options(group: str) -> Iterator[tuple[str, Path]]:
    """Name and file of each option of a group."""
    folder = Path(__file__).parent.parent / "conf" / group
    for path in sorted(folder.glob("[!_]*.yaml")):
        yield path.stem, path


def _prompts(
    cfg: DictConfig, tokenizer: PreTrainedTokenizerBase, reward: Reward
) -> tuple[PromptSet, HeldOut | None]:
    """Training prompts, and the held-out ones with how they are evaluated."""
    data, evaluation = cfg.data, cfg.trainer.evaluation
    prepare_with = partial(
        prepare,
        builder=_make(data.prompt),
        tokenizer=tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        seed=data.seed,
        verify=reward.pool.agree,
    )
    apart = [_make(benchmark).load() for benchmark in data.benchmarks.values()]
    held_out = None
    if data.held_out is not None:
        loaded = _make(data.held_out).load()
        apart.append(loaded)
        if evaluation.problems:
            chosen, report = prepare_with(loaded)
            log.info("held out: %s", report.summary())
            held_out = HeldOut(
                chosen.all().take(list(range(min(evaluation.problems, len(chosen))))),
                Sampling(
                    group_size=evaluation.samples,
                    max_new_tokens=cfg.algorithm.max_new_tokens,
                    temperature=cfg.algorithm.temperature,
                ),
                before=evaluation.before,
                after=evaluation.after,
            )
    prompts, report = prepare_with(
        _make(data.problems).load(), apart_from=apart, overlap=_make(data.overlap)
    )
    log.info("prompts: %s", report.summary())
    return prompts, held_out


def _trainer(
    cfg: DictConfig, run_dir: Path, checkpoint: Path | None, callbacks: list[Callback]
) -> Trainer:
    """Lightning's trainer: processes, hooks and checkpoints; the step and the bar are ours."""
    compute: Compute = _make(cfg.trainer.compute)
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
        logger=_make(cfg.logger).open(run_dir, cfg.name, checkpoint),
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO()],
        default_root_dir=run_dir,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )


# The run's own facts ----------------------------------------------------------------------------


def _run_dir(cfg: DictConfig) -> Path:
    """The folder of this run: the one to resume, or a new one that nothing else uses."""
    if cfg.resume:
        return Path(cfg.resume)
    if os.environ.get("LOCAL_RANK", "0") != "0":  # a process that the first one started
        return Path(os.environ["QERL_RUN_DIR"])
    stamp = datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
    wanted = Path("out") / cfg.name / f"seed{cfg.seed}_{stamp}"
    run_dir, count = wanted, 1
    while run_dir.exists():
        count += 1
        run_dir = wanted.with_name(f"{wanted.name}-{count}")
    os.environ["QERL_RUN_DIR"] = str(run_dir)
    return run_dir


def _checkpoint(cfg: DictConfig) -> Path | None:
    """What to resume from; None for a new run."""
    if not cfg.resume:
        return None
    newest = latest(Path(cfg.resume) / "checkpoints")
    if newest is None:
        raise ValueError(f"resume={cfg.resume}: no checkpoints/step-*.ckpt in it; start a new run")
    return newest


def _identity(cfg: DictConfig) -> Iterator[tuple[str, Any]]:
    """Flat settings that a resumed run must share."""
    resolved = _resolved(cfg)
    pending: list[tuple[str, Any]] = [(key, resolved[key]) for key in _IDENTITY]
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{key}.{inner}", entry) for inner, entry in value.items()]
        elif key.rpartition(".")[2] not in _PLACES:
            yield key, value


def _resolved(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain values."""
    resolved = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _run_info(cfg: DictConfig) -> RunInfo:
    return RunInfo(
        name=cfg.name,
        seed=cfg.seed,
        total_steps=cfg.trainer.max_steps,
        config=_resolved(cfg),
        overrides=tuple(HydraConfig.get().overrides.task),
    )


def _resume_command(run_dir: Path) -> str:
    overrides = [o for o in HydraConfig.get().overrides.task if not o.startswith("resume=")]
    return " ".join(["python train.py", *overrides, f"resume={run_dir}"])


def _outcome(
    cfg: DictConfig,
    learner: PolicyLearner,
    observer: RunObserver,
    run_dir: Path,
    *,
    interrupted: bool,
) -> Outcome:
    """What a person wants to know at the end, and the adapter saved for others to load."""
    adapter = run_dir / "adapter"
    lines = [observer.summary_text()]
    if learner.global_rank == 0:
        save_peft(learner.policy, adapter, cfg.model.name)
        lines.append(f"{'adapter':<12}{adapter}")
    if learner.rollout_step < learner.settings.max_steps:
        lines.append(f"{'resume':<12}{_resume_command(run_dir)}")
    rewards = observer.curves.values("train/reward")[-10:]
    return Outcome(
        text="\n".join(lines),
        objective=sum(rewards) / len(rewards) if rewards else None,
        interrupted=interrupted and HydraConfig.get().mode == RunMode.RUN,
    )


def _quiet_libraries() -> None:
    """Leave the terminal to the run: libraries speak when something is wrong."""
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    for name in ("lightning.pytorch", "lightning.fabric", "transformers", "httpx", "datasets"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Comes with peft when an adapter is written, and warns of kernels that nobody asked for.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
