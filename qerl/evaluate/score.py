"""Rows of completions → what a record and a table say of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qerl.evaluate.estimate import Estimate, estimate
from qerl.record.completions import Row

METRIC = {"greedy": "pass_at_1", "sampled": "mean_at_k"}
"""What the mean over problems is called, by mode."""

_MARKS = {"correct": 1.0, "wrong": 0.0, "abstained": math.nan}


@dataclass(frozen=True, kw_only=True)
class Score:
    """One mode's figures."""

    mode: str
    samples: int
    """k, completions per problem."""

    per_problem: Mapping[str, float]
    """Share of right completions of each problem by prompt id; NaN where none was judged."""

    estimate: Estimate
    truncated_share: float
    no_answer_share: float
    abstained_share: float
    """Completions that the verifier could not judge; they count neither as right nor as wrong."""

    length_mean_tokens: float

    def summary(self) -> dict[str, float]:
        """The figures under the names of a record's summary: ``greedy/pass_at_1`` and so on."""
        of, name = self.estimate, METRIC[self.mode]
        figures = {
            name: of.mean,
            f"{name}_stderr": of.standard_error,
            f"{name}_low": of.low,
            f"{name}_high": of.high,
            "samples": float(self.samples),
            "problems": float(of.problems),
            "truncated_share": self.truncated_share,
            "no_answer_share": self.no_answer_share,
            "abstained_share": self.abstained_share,
            "length_mean_tokens": self.length_mean_tokens,
        }
        return {f"{self.mode}/{key}": value for key, value in figures.items()}


def score(mode: str, rows: Sequence[Row]) -> Score:
    """The figures of all completions of one mode, prompt-major."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["prompt"], []).append(_MARKS[row["verdict"]])
    per_problem = {prompt: _judged_mean(marks) for prompt, marks in groups.items()}
    samples = len(rows) // len(groups)
    return Score(
        mode=mode,
        samples=samples,
        per_problem=per_problem,
        estimate=estimate(list(per_problem.values()), samples),
        truncated_share=_share(bool(row["truncated"]) for row in rows),
        no_answer_share=_share(row["answer"] is None for row in rows),
        abstained_share=_share(row["verdict"] == "abstained" for row in rows),
        length_mean_tokens=math.fsum(row["length_tokens"] for row in rows) / len(rows),
    )


def problem_rows(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """One row a problem with the value of each mode, for a record: what comparisons pair."""
    return [
        {"prompt": prompt, **{s.mode: _or_none(s.per_problem[prompt]) for s in scores}}
        for prompt in scores[0].per_problem
    ]


def _judged_mean(marks: Sequence[float]) -> float:
    judged = [mark for mark in marks if not math.isnan(mark)]
    return math.fsum(judged) / len(judged) if judged else math.nan


def _share(flags: Any) -> float:
    listed = list(flags)
    return sum(listed) / len(listed)


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
