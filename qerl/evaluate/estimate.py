"""A mean over problems with its standard error and 95 % interval.

One observation is one problem: the mean of its k verdicts. Samples of one problem are no
independent draws from the benchmark, so n counts problems and never completions.

* k = 1: every observation is 0 or 1, and the interval is Wilson's score interval, which keeps its
  coverage near 0 and 1 and at the 30 problems of AIME (Brown, Cai, DasGupta 2001, "Interval
  estimation for a binomial proportion", recommends it for small n).
* k > 1: Student's t over the problem means, cut to [0, 1].
* Where all problem means are equal, or there is one problem, t says nothing; Wilson's interval
  with the same mean and n stands in. It is too wide rather than too narrow, because values in
  [0, 1] with mean p have a variance of at most p (1 - p).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What n problems say of a policy; NaN throughout where n is 0."""

    mean: float
    standard_error: float
    """Sample deviation of the problem means over sqrt(n); NaN for one problem."""

    low: float
    high: float
    """Ends of the 95 % interval."""

    problems: int
    """n: problems with at least one verdict."""

    method: Literal["wilson", "t"]


def estimate(per_problem: Sequence[float], samples: int) -> Estimate:
    """The estimate from one value in [0, 1] a problem; NaN for a problem without a verdict."""
    judged = [value for value in per_problem if not math.isnan(value)]
    n = len(judged)
    if n == 0:
        nan = math.nan
        return Estimate(
            mean=nan, standard_error=nan, low=nan, high=nan, problems=0, method="wilson"
        )
    mean = math.fsum(judged) / n
    error = standard_error(judged)
    method: Literal["wilson", "t"] = "t" if samples > 1 and error > 0 else "wilson"
    if method == "wilson":
        low, high = wilson(mean, n)
    else:
        margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * error
        low, high = max(0.0, mean - margin), min(1.0, mean + margin)
    return Estimate(mean=mean, standard_error=error, low=low, high=high, problems=n, method=method)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of `values`; NaN for fewer than two."""
    n = len(values)
    if n < 2:
        return math.nan
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of `share` in n (Wilson 1927, JASA 22)."""
    z = float(stats.norm.ppf((1 + CONFIDENCE) / 2))
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
