"""Paired differences by hand and by scipy; evaluations of different problems are refused."""

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from scipy import stats

from qerl.evaluate.compare import compare, comparison_table, paired
from qerl.record.schema import Record

Make = Callable[..., Record]


def test_a_known_example_by_hand() -> None:
    # Differences 0, 1, 1, -1, 1, 1: mean 0.5, squared deviations .25 * 5 + 2.25 = 3.5.
    found = paired([1, 0, 0, 1, 0, 0], [1, 1, 1, 0, 1, 1])
    assert found.mean == pytest.approx(0.5)
    assert found.standard_error == pytest.approx(math.sqrt(3.5 / 5 / 6))
    assert (found.better, found.worse, found.problems) == (4, 1, 6)
    margin = 2.5705818 * math.sqrt(3.5 / 30)  # t(5, 0.975)
    assert (found.low, found.high) == pytest.approx((0.5 - margin, 0.5 + margin), abs=1e-6)
    # McNemar: 5 discordant pairs, 4 to 1; two-sided 2 * (C(5,4) + C(5,5)) / 32.
    assert found.p_permutation == pytest.approx(2 * 6 / 32)


def test_scipy_agrees() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.random(40), draw.random(40) * 1.2
    found, theirs = paired(a.tolist(), b.tolist()), stats.ttest_rel(b, a)
    interval = theirs.confidence_interval(0.95)
    assert found.p_t == pytest.approx(theirs.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.p_permutation == pytest.approx(theirs.pvalue, abs=0.03)


def test_few_differences_get_the_exact_permutation_value() -> None:
    differences = [0.25, -0.125, 0.5, 0.375]
    found = paired([0.0] * 4, differences)
    sums = [sum(s * d for s, d in zip(signs, differences, strict=True))
            for signs in product((1, -1), repeat=4)]  # fmt: skip
    extreme = sum(abs(total) >= sum(differences) for total in sums)
    assert found.p_permutation == pytest.approx(extreme / 16)


def test_equal_evaluations_do_not_differ() -> None:
    found = paired([1.0, 0.0, 0.5], [1.0, 0.0, 0.5])
    assert (found.mean, found.low, found.high) == (0, 0, 0)
    assert (found.p_permutation, found.p_t) == (1, 1)


def test_a_problem_that_one_was_not_judged_on_is_left_out() -> None:
    assert paired([1, 0, math.nan], [0, 1, 1]) == paired([1, 0], [0, 1])
    with pytest.raises(ValueError, match=r"1 problems judged in both.*at least 2"):
        paired([1, math.nan], [0, 1])


def test_pairing_is_by_problem_and_not_by_place(eval_record: Make) -> None:
    first = eval_record("a", greedy=[1, 0, 1])
    second = eval_record("b", greedy=[1, 0, 1])
    shuffled = Record(
        **{f: getattr(second, f) for f in Record.__dataclass_fields__ if f != "rows"},
        rows=second.rows[::-1][1:] + second.rows[2:],
    )
    assert compare(first, shuffled)["greedy"].better == 0


def test_the_table_shows_both_modes_and_what_was_drawn_differently(eval_record: Make) -> None:
    first = eval_record("a", greedy=[1, 0, 0, 0], sampled=[0.5, 0.0, 0.25, None])
    second = eval_record("b", greedy=[1, 1, 1, 0], sampled=[0.5, 0.5, 0.25, 1.0])
    second.config["evaluation"]["drawn"]["sampled.temperature"] = 1.0
    text = comparison_table(first, second, compare(first, second))
    (line,) = [line for line in text.splitlines() if line.startswith("| greedy/pass_at_1")]
    assert [cell.strip() for cell in line.split("|")][2:4] == ["25.0", "75.0"]
    assert "2/0/4" in text
    assert "1/0/3" in text
    assert "drawn differently: sampled.temperature: 0.6 and 1.0" in text


def test_different_problem_sets_are_refused(eval_record: Make) -> None:
    with pytest.raises(ValueError, match=r"different problem sets: 1 problems only in a, 0 only"):
        compare(eval_record("a", greedy=[1, 0, 1]), eval_record("b", greedy=[1, 0]))
    with pytest.raises(ValueError, match="same ids but other questions or golds"):
        compare(
            eval_record("a", greedy=[1, 0]),
            eval_record("b", problem_set="other", greedy=[1, 0]),
        )


def test_evaluations_without_a_common_mode_are_refused(eval_record: Make) -> None:
    with pytest.raises(ValueError, match="greedy only"):
        compare(eval_record("a", greedy=[1, 0]), eval_record("b", sampled=[1, 0]))
