"""Curves while they grow."""

import math

from qerl.record.curves import CurveBook, named_errors


def test_a_step_done_again_replaces_its_value() -> None:
    book = CurveBook()
    for k, value in [(0, 1.0), (1, 2.0), (1, 5.0)]:
        book.add(k, {"train/reward": value})
    assert book.curves["train/reward"].steps == (0, 1)
    assert book.curves["train/reward"].values == (1.0, 5.0)


def test_the_summary_takes_the_last_steps_the_largest_memory_and_the_last_evaluation() -> None:
    book = CurveBook()
    for k in range(4):
        book.add(k, {"train/reward": float(k), "memory/peak_gib": 4.0 - k})
    book.add(4, {"train/reward": float("nan")})
    book.add(0, {"held_out/mean_at_k": 0.2})
    book.add(5, {"held_out/mean_at_k": 0.6})
    book.add(0, {"train/never": float("nan")})
    found = book.summary(window=2)
    assert found["train/reward"] == 2.5
    assert found["memory/peak_gib"] == 4.0
    assert found["held_out/mean_at_k"] == 0.6
    assert math.isnan(found["train/never"])


def test_state_brings_every_point_back() -> None:
    book, copy = CurveBook(), CurveBook()
    book.add(3, {"a": 1 / 3, "b": 2.0})
    copy.load(book.state())
    assert copy.curves == book.curves
    assert copy.curves["a"].values == (0.3333333,)


def test_a_standard_error_is_named_after_its_mean() -> None:
    assert named_errors({"mean_at_k": 0.5, "standard_error": 0.1}) == {
        "mean_at_k": 0.5,
        "mean_at_k_stderr": 0.1,
    }
