"""Every reference of the data sets equals itself, and GSM8K's numbers equal nothing else."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from qerl.reward.equality import compare, judge

SETS = (
    *("gsm8k/test", "gsm8k/train", "math/train", "math500/test", "aime24/test", "aime25/test"),
    *("amc23/test", "svamp/train", "svamp/test", "aqua/test", "aqua/dev"),
)


def golds(folder: Path, name: str) -> list[str]:
    return [json.loads(line)["answer"] for line in (folder / f"{name}.jsonl").open()]


@pytest.mark.parametrize("name", SETS)
def test_every_reference_equals_itself_in_a_box(data_dir: Path, name: str) -> None:
    failed = []
    for gold in golds(data_dir, name):
        # The second form differs by a mark that nobody sees, so that the comparison is a real one.
        for answer in (gold, "\\,{" + gold + "}"):
            if not judge(rf"We get $\boxed{{{answer}}}$.", gold).correct:
                failed.append((gold, answer))
    assert not failed


def spellings(gold: str) -> Iterator[str]:
    """Ten ways to state a whole number."""
    digits = gold.removeprefix("-")
    sign = "-" * (gold != digits)
    commas = f"{int(gold):,}"
    yield from (
        rf"\boxed{{{gold}}}",
        rf"\boxed{{{commas}}}",
        rf"\boxed{{{commas.replace(',', '{,}')}}}",
        rf"\boxed{{{gold}.00}}",
        rf"$\boxed{{{sign}\${digits}}}$",
        rf"\boxed{{{gold} \text{{ dollars}}}}",
        rf"\boxed{{{gold} apples}}",
        rf"\boxed{{x = {gold}}}",
        f"That is\n#### {commas}",
        f"<answer>{gold}.</answer>",
        f"Therefore\n**Answer:** ${sign}{digits}",
        rf"\boxed{{\frac{{{int(gold) * 3}}}{{3}}}}",
    )


def others(gold: str) -> Iterator[str]:
    """Numbers that are not the reference."""
    number = int(gold)
    yield from (rf"\boxed{{{number + 1}}}", f"#### {number - 1}", f"<answer>{number + 10}</answer>")
    if number:
        yield from (
            rf"\boxed{{{-number}}}",
            rf"\boxed{{\frac{{{number}}}{{10}}}}",
            f"#### {number}0",
        )
        yield rf"\boxed{{{number / 10:.1f}}}"


def check_numbers(listed: list[str]) -> None:
    failed = []
    for gold in listed:
        failed += [
            (gold, text) for text in spellings(gold) if judge(text, gold).correct is not True
        ]
        failed += [(gold, text) for text in others(gold) if judge(text, gold).correct is not False]
        failed += [(gold, "named")] * bool(judge(f"The number {gold} appears.", gold).correct)
    assert not failed


def whole_numbers(folder: Path) -> list[str]:
    listed = golds(folder, "gsm8k/test") + golds(folder, "gsm8k/train")
    return [gold for gold in listed if gold.lstrip("-").isdecimal()]


def test_gsm8k_numbers_are_accepted_in_every_spelling_and_nothing_else_is(data_dir: Path) -> None:
    check_numbers(whole_numbers(data_dir)[::20])


@pytest.mark.slow
def test_all_gsm8k_numbers_are_accepted_in_every_spelling(data_dir: Path) -> None:
    listed = whole_numbers(data_dir)
    assert len(listed) > 8700
    check_numbers(listed)


def test_no_reference_of_math_equals_its_neighbour(data_dir: Path) -> None:
    listed = golds(data_dir, "math500/test")
    pairs = [(a, b) for a, b in pairwise(listed) if compare(a, b)[0]]
    # Neighbours that happen to state the same number.
    assert pairs == [("5", "x=5"), ("7", "7"), ("3", "3")]
