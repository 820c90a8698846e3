"""The completions of a run, to be read: a JSON line each, and a page of a few.

A reward curve says that something rose; only the completions say what. Every line carries the
question, the text as it was sampled (special tokens included) and why it was judged as it was.
"""

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from qerl.record.files import append, write_atomic, write_once
from qerl.types import Rollouts, Scored

log = logging.getLogger(__name__)

Row = dict[str, Any]

COLUMNS = (
    "rollout_step",
    "prompt",
    "sample",
    "question",
    "completion",
    "gold",
    "answer",
    "verdict",
    "reason",
    "reward",
    "components",
    "length_tokens",
    "truncated",
)
_VERDICTS = {True: "correct", False: "wrong", None: "abstained"}


class Step(Protocol):
    """What the table reads of a step that just ended (`qerl.training.learner.StepView`)."""

    @property
    def rollout_step(self) -> int: ...
    @property
    def metrics(self) -> dict[str, float]: ...
    @property
    def rollouts(self) -> Rollouts: ...
    @property
    def scored(self) -> Scored: ...


def completion_rows(step: Step, max_rows: int, max_chars: int) -> list[Row]:
    """The step's first `max_rows` completions, prompt-major, as flat rows of `COLUMNS`.

    Args:
        step: rollouts and verdicts of one step.
        max_rows: upper bound on the rows.
        max_chars: longer texts lose their middle, where the cut is marked.
    """
    rollouts, scored = step.rollouts, step.scored
    G, prompts = rollouts.group_size, rollouts.prompts
    rows = []
    for b, (text, verdict) in enumerate(zip(scored.texts, scored.verdicts, strict=True)):
        if b == max_rows:
            break
        p, g = divmod(b, G)
        rows.append(
            {
                "rollout_step": step.rollout_step,
                "prompt": prompts.ids[p],
                "sample": g,
                "question": prompts.questions[p],
                "completion": shorten(text, max_chars),
                "gold": prompts.golds[p],
                "answer": verdict.answer,
                "verdict": _VERDICTS[verdict.correct],
                "reason": verdict.reason,
                "reward": _number(float(scored.rewards[p, g])),
                "components": {
                    name: _number(float(values[p, g])) for name, values in scored.components.items()
                },
                "length_tokens": int(rollouts.lengths[b]),
                "truncated": bool(rollouts.truncated[b]),
            }
        )
    return rows


class CompletionTable:
    """``completions.jsonl`` of a run folder.

    Where the disk is full or the bound is reached, the table ends with a warning and the run goes
    on.
    """

    def __init__(self, path: Path, max_bytes: int = 2**30) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._open = True

    def begin(self, keep_before: int | None) -> None:
        """Start the table.

        Args:
            keep_before: a resumed run keeps the rows of earlier rollout steps; a new run (None)
                puts the table of another run aside under a name of its own.
        """
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        if keep_before is None:
            write_once(self.path.with_name("completions-earlier.jsonl"), "".join(lines))
            self.path.unlink()
            return
        kept = [line for line in lines if _step_of(line) < keep_before]
        write_atomic(self.path, "".join(kept))

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows, whole lines or none."""
        if not self._open:
            return
        lines = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        size = self.path.stat().st_size if self.path.exists() else 0
        if size + len(lines) > self._max_bytes:
            self._open = False
            log.warning("%s has reached %d bytes: no more completions", self.path, self._max_bytes)
            return
        try:
            append(self.path, lines)
        except OSError as error:
            self._open = False
            log.warning("the run goes on without its table of completions: %s", error.strerror)


def pick_samples(rows: Sequence[Row], count: int) -> list[Row]:
    """Up to `count` rows that differ: one of each verdict and one truncated, then the rest."""
    picked: list[int] = []
    for wanted in (
        lambda row: row["verdict"] == "correct",
        lambda row: row["verdict"] == "wrong",
        lambda row: row["truncated"],
        lambda row: row["verdict"] == "abstained",
        lambda row: True,
    ):
        matching = [i for i, row in enumerate(rows) if wanted(row) and i not in picked]
        picked += matching if len(picked) >= 4 else matching[:1]
    rest = [i for i in range(len(rows)) if i not in picked]
    return [rows[i] for i in sorted((picked + rest)[:count])]


def samples_page(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown that shows each row with its question, text and verdict."""
    parts = [f"# {title}\n"]
    for row in rows:
        facts = [
            f"**{row['verdict']}** ({row['reason']})",
            f"reward {_shown(row['reward'])}",
            f"answer `{_shown(row['answer'])}`",
            f"gold `{row['gold']}`",
            f"{row['length_tokens']} tokens" + (", cut at the cap" if row["truncated"] else ""),
        ]
        parts.append(
            f"## Step {row['rollout_step']}, {row['prompt']}, sample {row['sample']}\n\n"
            f"{' · '.join(facts)}\n\n{_fenced(row['question'])}\n\n{_fenced(row['completion'])}\n"
        )
    return "\n".join(parts)


def shorten(text: str, max_chars: int) -> str:
    """`text`, its middle replaced by a mark where it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} [… {len(text) - 2 * half} characters …] {text[len(text) - half :]}"


def _fenced(text: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["rollout_step"])
    except ValueError as error:
        raise ValueError(f"completions.jsonl: not a row of this table: {line[:80]!r}") from error


def _number(value: float) -> float | None:
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _shown(value: object) -> str:
    return "–" if value is None else str(value)
