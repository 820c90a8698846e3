"""Conversations become sequences of tokens: the same ones for the same seed."""

import json
from pathlib import Path

import pytest

from qerl.data.arithmetic import Arithmetic
from qerl.data.hub import HubProblems
from qerl.data.prompt import PromptBuilder
from qerl.data.texts import ProblemTexts, RowTexts, TextSource, _ordered, token_sequences
from qerl.model.toy import build_tokenizer


def rows(folder: Path, lines: list[dict[str, object]]) -> HubProblems:
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return HubProblems(name="set", hub_id="nobody/set", path=str(file))


@pytest.fixture
def texts(tmp_path: Path) -> RowTexts:
    lines = [
        {"question": f"{i}+{i}?", "answer": str(2 * i), "solution": f"so {i}"} for i in range(9)
    ]
    return RowTexts(rows=rows(tmp_path, lines))


def test_a_row_is_the_question_and_its_worked_answer(texts: RowTexts) -> None:
    first = next(texts.conversations())
    assert first == [
        {"role": "user", "content": "0+0?"},
        {"role": "assistant", "content": "so 0"},  # not the bare answer
    ]


def test_sequences_are_the_rendered_conversations_end_to_end(texts: RowTexts) -> None:
    tokenizer = build_tokenizer()
    tokens = token_sequences(texts, tokenizer, sequences=2, length=30, seed=None)
    assert tokens.shape == (2, 30)
    text = tokenizer.decode(tokens.flatten())
    assert text.startswith(
        "<|im_start|>user\n0+0?<|im_end|>\n<|im_start|>assistant\nso 0<|im_end|>\n"
    )


def test_the_seed_fixes_the_order_of_the_conversations(texts: RowTexts) -> None:
    def draw(seed: int | None) -> list[int]:
        found = token_sequences(texts, build_tokenizer(), sequences=3, length=40, seed=seed)
        return found.flatten().tolist()

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(1) != draw(None)


def test_too_little_text_says_how_much_there_is(texts: RowTexts) -> None:
    with pytest.raises(ValueError, match=r"only \d+ tokens; take \d+ sequences, or more text"):
        token_sequences(texts, build_tokenizer(), sequences=100, length=64, seed=0)
    with pytest.raises(ValueError, match="at least 1 of at least 1"):
        token_sequences(texts, build_tokenizer(), sequences=0, length=64, seed=0)


def test_turns_are_read_as_openthoughts_stores_them(tmp_path: Path) -> None:
    turns = [{"from": "user", "value": "Why?"}, {"from": "assistant", "value": "Because."}]
    source = RowTexts(
        rows=rows(tmp_path, [{"system": "Think.", "conversations": turns}]),
        turns="conversations",
        system="system",
    )
    assert [turn["role"] for turn in next(source.conversations())] == [
        "system",
        "user",
        "assistant",
    ]
    turns[0]["from"] = "tool"
    source = RowTexts(rows=rows(tmp_path, [{"conversations": turns}]), turns="conversations")
    with pytest.raises(ValueError, match=r"train\.jsonl:1: a turn of 'tool'"):
        list(source.conversations())


def test_a_row_without_text_is_named(tmp_path: Path) -> None:
    source = RowTexts(rows=rows(tmp_path, [{"question": "Why?", "reply": "Because."}]))
    with pytest.raises(ValueError, match=r"train\.jsonl:1: no text in solution or answer"):
        list(source.conversations())


def test_problems_of_any_source_will_do() -> None:
    source: TextSource = ProblemTexts(
        problems=Arithmetic(task="chain_sum", size=4, seed=1), prompt=PromptBuilder(system="Add.")
    )
    messages = list(source.conversations())
    assert len(messages) == 4
    assert [turn["role"] for turn in messages[0]] == ["system", "user", "assistant"]
    assert source.checksum() is None


def test_the_checksum_is_that_of_the_file(texts: RowTexts) -> None:
    before = texts.checksum()
    assert before is not None
    file = Path(str(texts.rows.path))
    file.write_text(file.read_text() + "\n")
    assert texts.checksum() != before


def test_the_order_does_not_depend_on_how_much_is_held(
    texts: RowTexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [turns[0]["content"] for turns in _ordered(texts, 5)]
    monkeypatch.setattr("qerl.data.texts._HELD", 2)
    assert [turns[0]["content"] for turns in _ordered(texts, 5)] == whole
    assert sorted(whole) == sorted(turns[0]["content"] for turns in texts.conversations())
    assert len(set(whole)) > 2
