"""The conformance corpus: completion, reference, what the verdict must be."""

import json
from pathlib import Path

import pytest

from qerl.reward.equality import compare, judge
from qerl.reward.pool import VerifierPool

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.jsonl"))


def rows(path: Path) -> list[dict[str, str | bool]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_every_verdict_of_the_corpus_is_right(path: Path) -> None:
    wrong = []
    for row in rows(path):
        verdict = judge(row["completion"], row["gold"])
        if verdict.correct is not row["want"]:
            wrong.append((row["note"], row["completion"][-80:], row["gold"], verdict))
    assert not wrong


def test_the_pool_gives_the_verdicts_of_the_corpus_in_order(pool: VerifierPool) -> None:
    listed = [row for path in CORPUS for row in rows(path)]
    verdicts = pool.verify([row["completion"] for row in listed], [row["gold"] for row in listed])
    got = [(row["note"], verdict.correct) for row, verdict in zip(listed, verdicts, strict=True)]
    assert got == [(row["note"], row["want"]) for row in listed]


def test_every_verdict_has_a_reason() -> None:
    for path in CORPUS:
        for row in rows(path):
            verdict = judge(row["completion"], row["gold"])
            assert verdict.reason
            assert len(verdict.reason) < 200
            assert verdict.reason.isprintable()


def test_the_corpus_covers_what_it_claims() -> None:
    listed = [row for path in CORPUS for row in rows(path)]
    assert len(listed) >= 600
    assert 0.3 < sum(bool(row["want"]) for row in listed) / len(listed) < 0.7


@pytest.mark.parametrize(
    ("gold", "answer", "reason"),
    [
        ("55", "56", "56 != 55 (number or expression)"),
        ("55", "55", "identical"),
        ("1/2", "0.5", "0.5 = 1/2 (number or expression)"),
        ("(1,2)", "[1,2]", "[1,2] != (1,2) (tuple or interval)"),
        ("42", "9^{9^{9}}", "9^{9^{9}}: more digits than an answer has"),
        ("42", "1" * 2001, "an answer of 2001 characters, above 2000"),
    ],
)
def test_reasons_can_be_read(gold: str, answer: str, reason: str) -> None:
    assert compare(gold, answer)[1] == reason


def test_no_answer_is_wrong_and_says_so() -> None:
    assert judge("I do not know.", "42") == (False, "no answer", None)


def test_an_empty_reference_is_abstained_from() -> None:
    assert judge(r"\boxed{42}", " ").correct is None


@pytest.mark.parametrize(
    ("gold", "other"),
    [
        ("x=3", "3"),
        ("2,-2", r"\{2,-2\}"),
        ("3:5", r"\frac35"),
        (r"50\%", "50"),
        ("[0,3)", r"0\le x<3"),
    ],
)
def test_forms_of_one_answer_are_equal_in_both_directions(gold: str, other: str) -> None:
    assert compare(gold, other)[0]
    assert compare(other, gold)[0]


def test_digits_in_another_base_are_given_by_the_reference_alone() -> None:
    assert compare("1011_2", "1011")[0]
    assert not compare("1011_2", "11")[0]
