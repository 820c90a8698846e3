"""The learning rate is a pure function of the step."""

from itertools import pairwise

import pytest

from qerl.training.schedule import LearningRate


def test_warm_up_rises_to_the_peak_and_cosine_falls_towards_zero() -> None:
    rate = LearningRate(peak=1.0, total_steps=100, warmup_share=0.1, decay="cosine")
    rates = [rate.at(step) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[10] == 1.0 == max(rates)
    assert rates[55] == pytest.approx(0.5)
    assert 0 < rates[99] < 0.001
    assert all(low < high for low, high in pairwise(rates[:11]))


def test_constant_stays_at_the_peak() -> None:
    rate = LearningRate(peak=3e-4, total_steps=5, warmup_share=0.0, decay="constant")
    assert {rate.at(step) for step in range(5)} == {3e-4}


@pytest.mark.parametrize("bad", [{"peak": 0.0}, {"warmup_share": 1.0}, {"decay": "linear"}])
def test_settings_without_meaning_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        LearningRate(**{"peak": 1.0, "total_steps": 10, **bad})  # type: ignore[arg-type]
