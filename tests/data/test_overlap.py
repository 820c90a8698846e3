"""Overlap with benchmarks: shared runs of words, equal questions, and mere boilerplate."""

from collections.abc import Callable
from pathlib import Path

import pytest

from qerl.data.hub import HubProblems
from qerl.data.overlap import Overlap

BENCHMARK = (
    "Janet sells sixteen duck eggs each day at the farmers market for two dollars per fresh egg. "
    "How much does she make?"
)
PARAPHRASE = (
    "At dawn, Janet SELLS sixteen duck eggs, each day, at the farmers' market: for two dollars! "
    "What does she earn in a week?"
)
OTHER = (
    "Tom sells sixteen hen eggs each week at the village shop for one dollar. What does he make?"
)


def test_paraphrase_that_shares_thirteen_words_is_found(load_questions: Callable) -> None:
    train = load_questions(OTHER, PARAPHRASE).problems
    found = Overlap().find(train, [load_questions(BENCHMARK, name="bench/test")])
    assert found == {"bench/test": ("mine/train/1",)}


def test_twelve_shared_words_are_not_enough(load_questions: Callable) -> None:
    words = [f"word{n}" for n in range(12)]
    bench = load_questions(" ".join([*words, "alpha", "beta"]), name="bench/test")
    train = load_questions(" ".join(["gamma", *words, "delta"])).problems
    assert Overlap().find(train, [bench]) == {}
    assert Overlap(words=12).find(train, [bench]) == {"bench/test": ("mine/train/0",)}


def test_question_of_exactly_thirteen_words_inside_a_longer_one_is_found(
    load_questions: Callable,
) -> None:
    words = " ".join(f"word{n}" for n in range(13))
    train = load_questions(f"first {words}", f"{words} last").problems
    found = Overlap().find(train, [load_questions(words, name="bench/test")])
    assert found == {"bench/test": ("mine/train/0", "mine/train/1")}


def test_short_questions_are_compared_whole_and_with_their_signs(load_questions: Callable) -> None:
    bench = load_questions("What is  2 + 3 ?", name="bench/test")
    train = load_questions("what is 2 + 3 ?", "What is 2 * 3 ?", "What is 2 + 3 + 4 ?").problems
    assert Overlap().find(train, [bench]) == {"bench/test": ("mine/train/0",)}
    assert Overlap(words=None).find(train, [bench]) == {"bench/test": ("mine/train/0",)}


def test_turn_of_phrase_of_many_questions_is_boilerplate(load_questions: Callable) -> None:
    phrase = "where m and n are relatively prime positive integers find the value of m plus n"
    bench = load_questions(f"A coin falls, {phrase}", name="bench/test")
    many = load_questions(*(f"Case {n}, {phrase}" for n in range(11))).problems
    assert Overlap(common=10).find(many, [bench]) == {}
    assert len(Overlap(common=10).find(many[:10], [bench])["bench/test"]) == 10


def test_problem_is_listed_once_under_the_first_benchmark(load_questions: Callable) -> None:
    first = load_questions(BENCHMARK, name="first/test")
    second = load_questions(BENCHMARK, OTHER, name="second/test")
    train = load_questions(OTHER, BENCHMARK).problems
    assert Overlap().find(train, [first, second]) == {
        "first/test": ("mine/train/1",),
        "second/test": ("mine/train/0",),
    }


@pytest.mark.parametrize("settings", [{"words": 1}, {"common": 0}])
def test_settings_without_meaning_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        Overlap(**settings)


def test_overlap_of_the_real_sets_is_as_documented(data_dir: Path) -> None:
    def problems(name: str, split: str) -> HubProblems:
        return HubProblems(name=name, split=split, hub_id="-", path=str(data_dir))

    train = problems("gsm8k", "train").load().problems
    found = Overlap().find(train, [problems("gsm8k", "test").load()])
    assert len(found["gsm8k/test"]) == 4
    stories = problems("svamp", "train").load().problems
    assert Overlap(words=None).find(stories, [problems("svamp", "test").load()]) == {}
    assert len(Overlap().find(stories, [problems("svamp", "test").load()])["svamp/test"]) == 161
