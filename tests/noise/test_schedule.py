import math
from itertools import pairwise
from typing import Any

import pytest

from qerl.noise.schedule import Schedule


def schedule(**fields: Any) -> Schedule:
    defaults = {"sigma_start": 1e-2, "sigma_end": 1e-4, "stages": 10, "total_steps": 600}
    return Schedule(**{**defaults, **fields})


def test_ten_exponential_stages_match_the_published_values() -> None:
    stages = [schedule().sigma(60 * stage) for stage in range(10)]
    golden = [0, 1e-2, 5.62e-3, 3.16e-3, 1.78e-3, 1e-3, 5.62e-4, 3.16e-4, 1.78e-4, 1e-4]
    assert stages == pytest.approx(golden, rel=2e-3)


def test_six_hundred_steps_form_ten_stages_of_sixty() -> None:
    stages = [schedule().stage(step) for step in range(600)]
    assert stages == sorted(stages)
    assert [stages.count(stage) for stage in range(10)] == [60] * 10
    assert schedule().sigma(59) == 0.0
    assert schedule().sigma(60) == 1e-2


def test_the_paper_s_algorithm_has_the_same_stages_where_steps_divide_evenly() -> None:
    # Algorithm 1: steps are counted from 1, k = floor((step - 1) / floor(M / K))
    for step in range(1, 601):
        assert schedule().stage(step - 1) == (step - 1) // (600 // 10)


@pytest.mark.parametrize("total", [7, 100, 203, 600, 1000])
def test_the_released_code_has_the_same_sigma_one_step_earlier(total: int) -> None:
    # Released: a counter from 1, interval floor(step / (total / K)), trend of K - 1 values
    trend = [1e-2 * (1e-4 / 1e-2) ** (i / 8) for i in range(9)]
    for counter in range(1, total + 1):
        interval = math.floor(counter * 10 / total)
        released = 0.0 if interval == 0 else trend[min(interval, 9) - 1]
        assert schedule(total_steps=total).sigma(counter) == pytest.approx(released, rel=1e-12)


@pytest.mark.parametrize("total", [10, 11, 97, 599, 601])
def test_stages_differ_by_at_most_one_step(total: int) -> None:
    stages = [schedule(total_steps=total).stage(step) for step in range(total)]
    counts = [stages.count(stage) for stage in range(10)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("kind", ["exponential", "linear", "cosine", "logarithmic"])
@pytest.mark.parametrize("stages", [3, 4, 10])
def test_the_first_noisy_stage_is_the_start_and_the_last_the_end_to_the_bit(
    kind: str, stages: int
) -> None:
    made = schedule(kind=kind, stages=stages, sigma_start=0.03, sigma_end=0.0007)
    assert made.sigma(0) == 0.0
    assert made.stage_sigma(1) == 0.03
    assert made.sigma(599) == 0.0007


@pytest.mark.parametrize("kind", ["exponential", "linear", "cosine", "logarithmic"])
def test_noise_never_grows_after_the_clean_stage(kind: str) -> None:
    sigmas = [schedule(kind=kind).sigma(step) for step in range(60, 600)]
    assert all(late <= early for early, late in pairwise(sigmas))
    assert len(set(sigmas)) == 9


def test_the_decays_meet_halfway_values_computed_by_hand() -> None:
    half = {"stages": 4, "sigma_start": 1.0, "sigma_end": 0.01}  # t = 1/2 in stage 2
    assert schedule(kind="exponential", **half).stage_sigma(2) == pytest.approx(0.1)
    assert schedule(kind="linear", **half).stage_sigma(2) == pytest.approx(0.505)
    assert schedule(kind="cosine", **half).stage_sigma(2) == pytest.approx(0.505)
    expected = 1 - 0.99 * math.log10(5.5)
    assert schedule(kind="logarithmic", **half).stage_sigma(2) == pytest.approx(expected)


def test_the_cosine_is_flat_at_both_ends_and_the_logarithm_steep_at_the_start() -> None:
    values = {
        kind: [schedule(kind=kind).stage_sigma(stage) for stage in range(1, 10)]
        for kind in ("linear", "cosine", "logarithmic")
    }
    assert values["cosine"][1] > values["linear"][1] > values["logarithmic"][1]
    assert values["cosine"][7] < values["linear"][7]


def test_a_constant_schedule_is_clean_in_stage_zero_only() -> None:
    made = schedule(kind="constant", stages=2)
    assert made.sigma(299) == 0.0
    assert made.sigma(300) == made.sigma(599) == 1e-2


def test_steps_beyond_the_run_stay_in_the_last_stage() -> None:
    assert schedule().sigma(10_000) == 1e-4


def test_a_run_shorter_than_its_stages_still_ends_near_the_end() -> None:
    made = schedule(total_steps=4)
    assert [made.stage(step) for step in range(4)] == [0, 2, 5, 7]


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="counted from 0"):
        schedule().sigma(-1)


@pytest.mark.parametrize(
    "fields",
    [
        {"stages": 2},
        {"stages": 1, "kind": "constant"},
        {"sigma_start": 0.0},
        {"sigma_start": -1e-2},
        {"sigma_start": math.nan},
        {"sigma_end": 0.0},
        {"sigma_end": -1e-4, "kind": "linear"},
        {"sigma_start": 1e-4, "sigma_end": 1e-2},
        {"total_steps": 0},
    ],
)
def test_an_impossible_schedule_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="="):
        schedule(**fields)


def test_two_stages_are_refused_with_the_reason_and_not_divided_by_zero() -> None:
    with pytest.raises(ValueError, match="stages=2: exponential needs at least 3"):
        schedule(stages=2)


@pytest.mark.parametrize("kind", ["linear", "cosine", "logarithmic"])
def test_all_but_the_exponential_may_end_at_zero(kind: str) -> None:
    assert schedule(kind=kind, sigma_end=0.0).sigma(599) == 0.0
