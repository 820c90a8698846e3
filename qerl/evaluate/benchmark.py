"""A policy on a benchmark: chunk by chunk through the harness, greedy and sampled."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from qerl.evaluate.harness import EVALUATION_STEP, Evaluation, evaluate
from qerl.evaluate.store import Store
from qerl.record.completions import Row, completion_rows
from qerl.reward.reward import Reward
from qerl.rollout.engine import Engine
from qerl.types import Prompts, Rollouts, Sampling, Scored


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to draw: ``greedy`` or ``sampled``."""

    name: str
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Harness:
    """What draws and judges."""

    engine: Engine
    reward: Reward
    decode: Callable[[list[int]], str]
    """Text of token ids, special tokens kept."""


class Display(Protocol):
    """Sees an evaluation advance."""

    def sequences(self, mode: str, done: int, total: int) -> None:
        """`done` of the `total` completions of the chunk at work are drawn."""
        ...

    def chunk(self, mode: str, done: int, total: int, rows: Sequence[Row], seconds: float) -> None:
        """`done` of `total` problems have `rows`; the newest took `seconds`, 0 if only read."""
        ...


def run_benchmark(
    harness: Callable[[], Harness],
    prompts: Prompts,
    modes: Sequence[Mode],
    store: Store,
    *,
    chunk: int,
    seed: int,
    display: Display,
) -> Mapping[str, list[Row]]:
    """Every completion of every prompt by mode, prompt-major; chunks that `store` has are read.

    Args:
        harness: called once, when the first chunk has to be drawn.
        prompts: the benchmark, in its order.
        modes: how to draw.
        store: takes each chunk when it is judged.
        chunk: problems drawn at a time. Results do not depend on it, up to the rounding of matrix
            products of different heights.
        seed: with mode, prompt id and sample it fixes each draw.
        display: told of the progress.
    """
    if chunk < 1:
        raise ValueError(f"evaluate.chunk={chunk}: at least 1 problem")
    found: dict[str, list[Row]] = {}
    made: Harness | None = None
    for mode in modes:
        rows = found.setdefault(mode.name, [])
        for part in _parts(prompts, chunk):
            kept = store.take(mode.name, part.ids, mode.sampling.group_size)
            seconds = 0.0
            if kept is None:
                made = made or harness()
                started = time.monotonic()  # loading the model is no part of the chunk's time
                kept = _draw(made, part, mode, seed, display)
                store.add(kept)
                seconds = time.monotonic() - started
            rows += kept
            done = len(rows) // mode.sampling.group_size
            display.chunk(mode.name, done, len(prompts), rows, seconds)
    return found


def _parts(prompts: Prompts, chunk: int) -> Iterator[Prompts]:
    for start in range(0, len(prompts), chunk):
        yield prompts.take(list(range(start, min(start + chunk, len(prompts)))))


def _draw(harness: Harness, prompts: Prompts, mode: Mode, seed: int, display: Display) -> list[Row]:
    result = evaluate(
        harness.engine,
        prompts,
        mode.sampling,
        harness.reward,
        harness.decode,
        seed=seed,
        progress=lambda done, total: display.sequences(mode.name, done, total),
    )
    return _rows(mode.name, result)


@dataclass(frozen=True, kw_only=True)
class _View:
    """An evaluation as the table of completions reads a step."""

    rollouts: Rollouts
    scored: Scored
    metrics: dict[str, float]
    rollout_step: int = EVALUATION_STEP


def _rows(mode: str, result: Evaluation) -> list[Row]:
    view = _View(rollouts=result.rollouts, scored=result.scored, metrics={})
    rows = completion_rows(view, len(result.scored.verdicts), max_chars=1 << 24)
    return [
        {"mode": mode, **{name: value for name, value in row.items() if name != "rollout_step"}}
        for row in rows
    ]
