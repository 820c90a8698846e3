"""The paired difference of two evaluations on the same problems.

Both policies answered the same problems, so the difference is taken problem by problem: what makes
a problem hard for both cancels. The interval is Student's t over the n differences; the p-value of
the decision is that of the sign-flip permutation test (Fisher 1935; under the hypothesis of no
difference each problem's difference is as likely as its negative), which for greedy pass@1 is
McNemar's exact test. The t-test's p-value stands beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from tabulate import tabulate

from qerl.evaluate.estimate import CONFIDENCE, standard_error
from qerl.evaluate.report import problem_set
from qerl.evaluate.score import METRIC
from qerl.record.schema import Record

RESAMPLES = 9999
"""Sign flips drawn where all 2^n are more than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Second minus first, over the problems that both were judged on."""

    mean: float
    standard_error: float
    low: float
    high: float
    """95 % interval, Student's t."""

    p_permutation: float
    p_t: float
    """1 where every difference is zero, 0 where all are the same other number."""

    problems: int
    better: int
    """Problems on which the second is ahead."""

    worse: int


def paired(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Difference:
    """The difference of two sequences of values, the same problem at the same place.

    Args:
        first: one value in [0, 1] a problem; NaN where it was not judged.
        second: likewise.
        seed: of the sign flips.

    Raises:
        ValueError: fewer than two problems were judged for both.
    """
    both = [
        (a, b) for a, b in zip(first, second, strict=True) if not (math.isnan(a) or math.isnan(b))
    ]
    differences = np.array([b - a for a, b in both])  # [n]
    n = len(differences)
    if n < 2:
        raise ValueError(f"{n} problems judged in both evaluations: a comparison needs at least 2")
    mean, error = float(differences.mean()), standard_error(differences.tolist())
    margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * error
    if error > 0:
        p_t = float(2 * stats.t.sf(abs(mean) / error, n - 1))
    else:
        p_t = 1.0 if mean == 0 else 0.0
    return Difference(
        mean=mean,
        standard_error=error,
        low=mean - margin,
        high=mean + margin,
        p_permutation=_sign_flips(differences, seed),
        p_t=p_t,
        problems=n,
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
    )


def _sign_flips(differences: np.ndarray, seed: int) -> float:
    """Two-sided p-value of the mean under random signs; exact where there are few."""
    moved = differences[differences != 0]  # a flipped zero stays zero
    if len(moved) == 0:
        return 1.0
    if len(moved) == 1:
        return 1.0  # one sign of two is no evidence, and scipy wants two observations
    result: Any = stats.permutation_test(
        (moved,),
        np.sum,
        permutation_type="samples",
        n_resamples=RESAMPLES,
        batch=256,
        vectorized=True,
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


def compare(first: Record, second: Record) -> dict[str, Difference]:
    """The differences by mode, over the modes that both were evaluated in.

    Raises:
        ValueError: the records are no evaluations, or of different problems or lengths.
    """
    for record in (first, second):
        if record.kind != "eval":
            raise ValueError(f"{record.path or record.name}: kind={record.kind}, not an evaluation")
    _check_same_problems(first, second)
    a = {row["prompt"]: row for row in first.rows}
    b = {row["prompt"]: row for row in second.rows}
    modes = [m for m in METRIC if all(f"{m}/{METRIC[m]}" in r.summary for r in (first, second))]
    if not modes:
        raise ValueError(
            "one evaluation is greedy only and the other sampled only: nothing to compare"
        )
    return {
        mode: paired(
            [_value(a[prompt][mode]) for prompt in a], [_value(b[prompt][mode]) for prompt in a]
        )
        for mode in modes
    }


def differing_settings(first: Record, second: Record) -> list[str]:
    """How the two were drawn differently, a line each; empty where only the policies differ."""
    a, b = (dict(r.config["evaluation"]["drawn"]) for r in (first, second))
    return [f"{k}: {a.get(k)} and {b.get(k)}" for k in sorted(a | b) if a.get(k) != b.get(k)]


def comparison_table(first: Record, second: Record, found: dict[str, Difference]) -> str:
    """The differences in GitHub's Markdown, in percentage points."""
    headings = ["", "first", "second", "difference ± s.e. [95 %]", "p", "p (t)", "better/worse/n"]
    body = []
    for mode, d in found.items():
        key = f"{mode}/{METRIC[mode]}"
        body.append(
            [
                key,
                f"{100 * first.summary[key]:.1f}",
                f"{100 * second.summary[key]:.1f}",
                f"{100 * d.mean:+.1f} ± {100 * d.standard_error:.1f} "
                f"[{100 * d.low:+.1f}, {100 * d.high:+.1f}]",
                _p(d.p_permutation),
                _p(d.p_t),
                f"{d.better}/{d.worse}/{d.problems}",
            ]
        )
    align = ["left"] + ["right"] * (len(headings) - 1)
    grid = tabulate(body, headings, tablefmt="pipe", colalign=align, disable_numparse=True)
    notes = ["per cent; differences in points, paired over problems; p by sign flips, and by t"]
    notes += [f"drawn differently: {line}" for line in differing_settings(first, second)]
    return (
        f"**second: {second.name}**, seed {second.seed}, "
        f"**against first: {first.name}**, seed {first.seed}\n\n{grid}\n\n"
        + "\n".join(f"<sub>{note}</sub>  " for note in notes)
        + "\n"
    )


def _check_same_problems(first: Record, second: Record) -> None:
    ids = [{str(row["prompt"]) for row in record.rows} for record in (first, second)]
    only = [sorted(ids[0] - ids[1]), sorted(ids[1] - ids[0])]
    if only[0] or only[1]:
        examples = ", ".join((only[0] + only[1])[:2])
        raise ValueError(
            f"different problem sets: {len(only[0])} problems only in {first.name}, "
            f"{len(only[1])} only in {second.name} (such as {examples}); evaluate both with the "
            "same data and evaluate.limit"
        )
    if problem_set(first) != problem_set(second):
        raise ValueError(
            f"different problem sets: {first.name} and {second.name} have the same ids but other "
            "questions or golds; evaluate both from the same copy of the data"
        )


def _value(stored: float | None) -> float:
    return math.nan if stored is None else float(stored)


def _p(value: float) -> str:
    return f"{value:.4f}" if value >= 1e-4 else "< 0.0001"
