"""The second job: from a configuration to an evaluation with its record, table and chart."""

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerBase

from qerl.build.config import checkpoint_identity, flat, make, quiet_libraries, resolved
from qerl.build.parts import build_policy, check_memory, decoder, preparation
from qerl.evaluate.adapter import check_effect
from qerl.evaluate.benchmark import Harness, Mode, run_benchmark
from qerl.evaluate.display import EvaluationProgress
from qerl.evaluate.report import alike, table, write_report
from qerl.evaluate.score import problem_rows, score
from qerl.evaluate.store import Store, fingerprint
from qerl.model.adapter_io import load_peft, read_lora, weights_digest
from qerl.model.load import load_tokenizer
from qerl.model.source import Source
from qerl.record import provenance
from qerl.record.completions import Row, pick_samples, shorten
from qerl.record.files import write_once
from qerl.record.schema import Record, check_identity, encode, load
from qerl.reward.reward import Reward
from qerl.training.compute import Compute
from qerl.types import Prompts, Sampling

log = logging.getLogger(__name__)

# What completions and verdicts depend on, besides the `evaluate` settings and the adapter.
_IDENTITY = ("model", "quant", "data", "rollout", "seed")

_SAMPLES, _SAMPLE_CHARS = 6, 4000


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The adapter under evaluation."""

    folder: Path
    label: str
    """In file names and tables."""
    digest: str
    """SHA-256 of its matrices."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What an evaluation tells a person."""

    text: str
    """The table of every evaluation on the same problems, and where everything is."""

    record: Record


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is evaluated and how; nothing of it needs the model's weights."""

    name: str
    benchmark: str
    adapter: Adapter | None
    prompts: Prompts
    modes: tuple[Mode, ...]
    facts: dict[str, Any]
    """The record's ``config.evaluation``."""
    settings: dict[str, Any]
    """Flat; another value of one of them is another evaluation."""
    folder: Path


def evaluate(cfg: DictConfig) -> Report:
    """Evaluate as `cfg` says, or go on where an earlier call was stopped.

    Raises:
        ValueError: with one line a person can act on.
    """
    quiet_libraries()
    adapter, modes = _adapter(cfg), _modes(cfg)
    source: Source = make(cfg.model.source)
    tokenizer = load_tokenizer(source)
    reward: Reward = make(cfg.data.reward)
    try:
        plan = _plan(cfg, adapter, modes, _problems(cfg, tokenizer, reward))
        store = Store(plan.folder, plan.settings, provenance.now())
        try:
            with EvaluationProgress(plan.name) as display:
                rows = run_benchmark(
                    lambda: _harness(cfg, plan, source, tokenizer, reward),
                    plan.prompts,
                    plan.modes,
                    store,
                    chunk=cfg.evaluate.chunk,
                    seed=cfg.seed,
                    display=display,
                )
            record = _record(cfg, plan, store.started, rows)
        finally:
            store.close()
    finally:
        reward.close()
    return _report(cfg, plan, record)


def _modes(cfg: DictConfig) -> tuple[Mode, ...]:
    """Greedy, sampled, or both."""
    options = cfg.evaluate
    length = options.max_new_tokens
    if length is None:
        length = min(cfg.data.max_new_tokens, options.reply_cap or cfg.data.max_new_tokens)
    modes = []
    if options.greedy:
        greedy = Sampling(group_size=1, max_new_tokens=length, temperature=0.0)
        modes.append(Mode(name="greedy", sampling=greedy))
    if options.samples:
        if options.temperature <= 0:
            raise ValueError(
                f"evaluate.temperature={options.temperature}: above 0 for {options.samples} "
                "samples; greedy completions are those of evaluate.greedy=true"
            )
        sampled = Sampling(
            group_size=options.samples,
            max_new_tokens=length,
            temperature=options.temperature,
            top_p=options.top_p,
        )
        modes.append(Mode(name="sampled", sampling=sampled))
    if not modes:
        raise ValueError(
            "evaluate.greedy=false evaluate.samples=0: nothing to draw; choose at least one"
        )
    return tuple(modes)


def _adapter(cfg: DictConfig) -> Adapter | None:
    """The adapter that ``adapter=`` or ``run=`` names; None for the base model."""
    if cfg.adapter and cfg.run:
        raise ValueError(f"adapter={cfg.adapter} run={cfg.run}: name one of the two")
    if not cfg.adapter and not cfg.run:
        return None
    folder = Path(cfg.adapter or Path(cfg.run) / "adapter").expanduser()
    if cfg.run:
        _check_run(cfg, Path(cfg.run).expanduser())
    read_lora(folder)  # refuses what is no adapter
    place = folder.resolve()
    label = place.name
    if label in ("adapter", "adapter_best"):  # what a run calls its own
        label = place.parent.name + label.removeprefix("adapter").replace("_", "-")
    label = re.sub(r"[^A-Za-z0-9.+=-]+", "-", label).strip("-.") or "adapter"
    return Adapter(folder=folder, label=label, digest=weights_digest(folder))


def _check_run(cfg: DictConfig, run: Path) -> None:
    """The run must be of this model; another format is a choice, but not one to make unawares."""
    path = run / "config.yaml"
    if not path.is_file():
        raise ValueError(f"run={run}: no config.yaml there; name a run folder below out/")
    trained = OmegaConf.load(path)
    model, quant = OmegaConf.select(trained, "model.name"), OmegaConf.select(trained, "quant")
    if model != cfg.model.name:
        raise ValueError(
            f"run={run} trained model={model}, not {cfg.model.name}: set model={model}"
        )
    if quant is not None and quant != cfg.quant:
        log.warning(
            "run=%s trained on %s, evaluated on %s", run, quant._target_, cfg.quant._target_
        )


def _problems(
    cfg: DictConfig, tokenizer: PreTrainedTokenizerBase, reward: Reward
) -> tuple[str, Prompts]:
    """The benchmark's name and its prompts, those held out where the data set trains."""
    data, limit = cfg.data, cfg.evaluate.limit
    node = data.held_out if data.held_out is not None else data.problems
    if data.held_out is None and data.benchmarks:
        names = ", ".join(f"data=benchmark_{name}" for name in data.benchmarks)
        raise ValueError(f"data={data.name} holds no problems out; evaluate on one of {names}")
    if limit is not None and limit < 1:
        raise ValueError(f"evaluate.limit={limit}: at least 1 problem; null takes all")
    loaded = make(node).load()
    # A benchmark is scored whole: no prompt is left out for its length.
    chosen, report = preparation(data, tokenizer, reward, None)(loaded)
    log.info("problems: %s", report.summary())
    prompts = chosen.all()
    name = loaded.name.replace("/", "-")
    if limit is not None and limit < len(prompts):
        return f"{name}-first{limit}", prompts.take(list(range(limit)))
    return name, prompts


def _plan(
    cfg: DictConfig,
    adapter: Adapter | None,
    modes: tuple[Mode, ...],
    problems: tuple[str, Prompts],
) -> _Plan:
    benchmark, prompts = problems
    quant = HydraConfig.get().runtime.choices["quant"]
    label = adapter.label if adapter else "base"
    name = "_".join((cfg.model.name, quant, label, benchmark))
    check_identity(name, resolved(cfg))
    compute: Compute = make(cfg.trainer.compute)
    code = provenance.commit()
    drawn = {
        f"{mode.name}.{key}": getattr(mode.sampling, key)
        for mode in modes
        for key in ("group_size", "max_new_tokens", "temperature", "top_p")
    }
    checkpoint = checkpoint_identity(cfg)
    settings = {
        **dict(flat(cfg, _IDENTITY)),
        **checkpoint,
        **drawn,
        "adapter": adapter.digest if adapter else None,
        "dtype": str(compute.torch_dtype()),
        # A record names one commit as the code that measured all of it.
        "commit": code.short if code else None,
        "benchmark": benchmark,
        "prompts": _digest([prompts.ids, prompts.golds, prompts.tokens]),
    }
    identity = fingerprint(settings)
    folder = cfg.evaluate.folder or Path("out/evals") / name / f"seed{cfg.seed}-{identity[:8]}"
    facts = {
        "model": f"{cfg.model.name} ({Path(cfg.model.source.path).name})"
        if checkpoint
        else cfg.model.name,
        "weights": checkpoint.get("model.source.weights"),
        "quant": quant,
        "adapter": label,
        "adapter_sha256": adapter.digest if adapter else None,
        "benchmark": benchmark,
        "problem_set": _digest([prompts.ids, prompts.questions, prompts.golds]),
        "fingerprint": identity,
        "drawn": drawn,
    }
    return _Plan(
        name=name,
        benchmark=benchmark,
        adapter=adapter,
        prompts=prompts,
        modes=modes,
        facts=facts,
        settings=settings,
        folder=Path(folder),
    )


def _harness(
    cfg: DictConfig,
    plan: _Plan,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    reward: Reward,
) -> Harness:
    """The policy with its adapter, checked to have an effect, behind its engine."""
    lora = read_lora(plan.adapter.folder) if plan.adapter else None
    check_memory(cfg, source, lora)
    policy = build_policy(cfg, source, lora)
    if plan.adapter is not None:
        load_peft(policy, plan.adapter.folder)
        check_effect(policy, plan.prompts, str(plan.adapter.folder))
    return Harness(
        engine=make(cfg.rollout)(policy=policy),
        reward=reward,
        decode=decoder(tokenizer),
    )


def _record(cfg: DictConfig, plan: _Plan, started: str, rows: Mapping[str, list[Row]]) -> Record:
    """The evaluation's record: the folder's own where it ended before."""
    own = plan.folder / "record.json"
    if own.exists():
        return load(own)
    scores = [score(mode.name, rows[mode.name]) for mode in plan.modes]
    compute: Compute = make(cfg.trainer.compute)
    shown = [row for mode in plan.modes for row in pick_samples(rows[mode.name], _SAMPLES // 2)]
    record = Record(
        kind="eval",
        name=plan.name,
        status="completed",
        seed=cfg.seed,
        config={**resolved(cfg), "evaluation": plan.facts},
        overrides=tuple(HydraConfig.get().overrides.task),
        command=provenance.command_line(),
        commit=provenance.commit(),
        versions=provenance.versions(),
        device=provenance.device_facts(compute.torch_device()),
        started=started,
        ended=provenance.now(),
        summary={name: value for s in scores for name, value in s.summary().items()},
        rows=tuple(problem_rows(scores)),
        samples=tuple(
            {**row, "completion": shorten(row["completion"], _SAMPLE_CHARS)} for row in shown
        ),
    )
    write_once(own, encode(record.document()))
    return record


def _report(cfg: DictConfig, plan: _Plan, record: Record) -> Report:
    own = plan.folder / "record.json"
    path = record.write(Path(cfg.record_dir)) if cfg.record_dir else own
    kept = (
        (Path(cfg.record_dir), "*.json") if cfg.record_dir else (Path("out/evals"), "record.json")
    )
    records = alike(kept[0], record, kept[1])
    page, figure = write_report(records, Path("out/evals/tables"), plan.benchmark)
    places = {
        "record": path,
        "completions": plan.folder / "completions.jsonl",
        "table": page,
        "figure": figure,
    }
    lines = [f"{what:<12}{place}" for what, place in places.items()]
    return Report(
        text=f"{table(records)}\n" + "\n".join(lines),
        record=record,
    )


def _digest(parts: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
