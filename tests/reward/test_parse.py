"""What counts as the answer of a completion."""

import time

import pytest

from qerl.reward.parse import extract


def test_the_form_that_ends_last_wins_whatever_its_kind() -> None:
    assert extract("<answer>1</answer> \\boxed{2}\n#### 3\nAnswer: 4").answer == "4"
    assert extract("Answer: 4\n#### 3\n\\boxed{2} <answer>1</answer>").answer == "1"


def test_the_end_of_a_form_is_an_offset_of_the_completion() -> None:
    text = r"<think>a</think> It is \boxed{\frac{1}{2}}. Bye."
    found = extract(text)
    assert text[: found.end].endswith(r"\boxed{\frac{1}{2}}")
    assert found.form == "box"


def test_a_box_inside_the_winner_is_its_content() -> None:
    found = extract(r"<answer>The answer is \boxed{42}.</answer>")
    assert (found.answer, found.form) == ("42", "tag")


@pytest.mark.parametrize(
    "text",
    ["", "42", "The answer is 42.", r"\boxed{42", "<answer>42", "#### Step 2", r"\boxed{}", "\x00"],
)
def test_where_no_form_is_complete_there_is_no_answer(text: str) -> None:
    assert extract(text) is None


def test_only_what_follows_the_last_think_end_counts() -> None:
    assert extract(r"\boxed{1}</think> so \boxed{2}").answer == "2"
    assert extract(r"<think>\boxed{1}</think> so I do not know") is None


def test_an_unclosed_think_block_counts_the_same_with_and_without_its_tag() -> None:
    assert extract(r"<think>\boxed{1}").answer == extract(r"\boxed{1}").answer == "1"


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 10_000 + "1" + "}" * 10_000,
        "{" * 100_000,
        r"\boxed " * 14_000,
        r"\boxed    a " * 9_000,
        r"\boxed{1" * 12_000,
        "<answer>" * 12_000,
        "<answer>1</answer>" * 5_000,
        "####" * 25_000,
        "#### 1\n" * 14_000,
        " " * 100_000 + "answer:",
        "*" * 100_000 + "answer: 1",
        "\\" * 100_000,
        "<think>" * 14_000 + "</think>" * 5,
        "\n" * 100_000,
    ],
    ids=lambda text: repr(text[:14]),
)
def test_a_hundred_thousand_characters_take_linear_time(text: str) -> None:
    started = time.process_time()
    extract(text)
    assert time.process_time() - started < 0.5  # 5 to 40 ms where it was written
