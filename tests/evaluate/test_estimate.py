"""Means over problems have the standard error and the interval that the textbooks give."""

import math
import random

import pytest
from scipy import stats

from qerl.evaluate.estimate import estimate, standard_error, wilson


def test_pass_at_1_has_wilson_s_interval_as_scipy_computes_it() -> None:
    for right, n in ((0, 30), (3, 30), (17, 64), (1319, 1319)):
        found = estimate([1.0] * right + [0.0] * (n - right), samples=1)
        theirs = stats.binomtest(right, n).proportion_ci(0.95, method="wilson")
        assert found.method == "wilson"
        assert found.mean == pytest.approx(right / n)
        assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_the_interval_of_mean_at_k_is_t_over_the_problem_means() -> None:
    values = [0.0, 0.25, 0.5, 0.5, 1.0]
    found = estimate(values, samples=4)
    low, high = stats.t.interval(0.95, 4, loc=0.45, scale=stats.sem(values))
    assert found.method == "t"
    assert (found.low, found.high) == pytest.approx((max(low, 0), min(high, 1)))
    assert found.standard_error == pytest.approx(stats.sem(values))


def test_equal_problem_means_do_not_make_an_interval_of_no_width() -> None:
    found = estimate([0.0] * 16, samples=8)
    assert found.low == 0
    assert found.high == pytest.approx(stats.binomtest(0, 16).proportion_ci(method="wilson").high)


def test_problems_without_a_verdict_do_not_count() -> None:
    assert estimate([1.0, 0.0, math.nan], samples=1) == estimate([1.0, 0.0], samples=1)
    nothing = estimate([math.nan], samples=1)
    assert nothing.problems == 0
    assert math.isnan(nothing.mean)


@pytest.mark.parametrize(("p", "k", "n"), [(0.05, 1, 30), (0.5, 1, 64), (0.3, 8, 64)])
def test_the_interval_covers_the_truth_about_95_times_in_100(p: float, k: int, n: int) -> None:
    draw = random.Random(0)
    covered = 0
    for _ in range(400):
        skill = [min(1.0, max(0.0, draw.gauss(p, 0.1 * (k > 1)))) for _ in range(n)]
        values = [sum(draw.random() < s for _ in range(k)) / k for s in skill]
        found = estimate(values, samples=k)
        covered += found.low <= p <= found.high
    assert 0.92 <= covered / 400 <= 0.985


def test_one_problem_has_no_standard_error() -> None:
    assert math.isnan(standard_error([1.0]))
    assert wilson(1.0, 1)[0] < 0.5
