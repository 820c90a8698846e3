"""The toy: one answer, short questions, nothing shared between its splits."""

import pytest

from qerl.data.toy import TinySums


def test_every_sum_makes_the_total() -> None:
    for split in ("train", "held_out"):
        loaded = TinySums(total=7, split=split).load()  # type: ignore[arg-type]
        for problem in loaded.problems:
            assert eval(problem.question.rstrip("=")) == 7
            assert problem.gold == "7"


def test_splits_are_disjoint_and_whole() -> None:
    train = {p.question for p in TinySums(total=7, split="train").load().problems}
    held_out = {p.question for p in TinySums(total=7, split="held_out").load().problems}
    assert (len(train), len(held_out)) == (35, 9)
    assert train.isdisjoint(held_out)


def test_answer_of_two_characters_is_refused() -> None:
    with pytest.raises(ValueError, match="total=10: 0 to 9"):
        TinySums(total=10)
