"""The table of completions and the page of samples."""

import json
import logging
from pathlib import Path

import pytest

from qerl.record.completions import (
    COLUMNS,
    CompletionTable,
    completion_rows,
    pick_samples,
    samples_page,
    shorten,
)


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["rollout_step"] for line in path.read_text().splitlines()]


def test_a_row_says_what_was_asked_answered_and_judged(step) -> None:
    rows = completion_rows(step(7), max_rows=10, max_chars=1000)
    assert [tuple(row) for row in rows] == [COLUMNS] * 4
    assert rows[1] == {
        "rollout_step": 7,
        "prompt": "toy/0",
        "sample": 1,
        "question": "2+3?",
        "completion": "text 1 of step 7<|end|>",
        "gold": "5",
        "answer": "56",
        "verdict": "wrong",
        "reason": "56 != 55",
        "reward": 0.0,
        "components": {"accuracy": 0.0},
        "length_tokens": 2,
        "truncated": False,
    }
    assert (rows[2]["verdict"], rows[2]["reward"], rows[2]["prompt"]) == (
        "abstained",
        None,
        "toy/1",
    )
    assert rows[3]["truncated"] is True


def test_rows_and_texts_are_bounded(step) -> None:
    rows = completion_rows(step(0), max_rows=3, max_chars=8)
    assert len(rows) == 3
    assert len(shorten("x" * 100, 10)) < 45
    assert shorten("abcdefghij", 4) == "ab [… 6 characters …] ij"
    assert shorten("abcd", 4) == "abcd"


def test_a_resumed_run_drops_the_rows_it_does_again(step, tmp_path) -> None:
    table = CompletionTable(tmp_path / "completions.jsonl")
    table.begin(None)
    for k in range(4):
        table.append(completion_rows(step(k), 1, 100))
    again = CompletionTable(tmp_path / "completions.jsonl")
    again.begin(keep_before=2)
    assert _steps(again.path) == [0, 1]
    again.append(completion_rows(step(2), 1, 100))
    assert _steps(again.path) == [0, 1, 2]


def test_a_new_run_sets_the_table_of_another_aside(step, tmp_path) -> None:
    for k in (5, 6, 7):
        table = CompletionTable(tmp_path / "completions.jsonl")
        table.begin(None)
        table.append(completion_rows(step(k), 1, 100))
    assert _steps(tmp_path / "completions.jsonl") == [7]
    assert _steps(tmp_path / "completions-earlier.jsonl") == [5]
    assert _steps(tmp_path / "completions-earlier-2.jsonl") == [6]


def test_a_full_disk_ends_the_table_and_not_the_run(step, tmp_path, monkeypatch, caplog) -> None:
    table = CompletionTable(tmp_path / "completions.jsonl")
    table.append(completion_rows(step(0), 1, 100))

    def full(path: Path, text: str) -> None:
        raise OSError(28, "completions.jsonl is not written (No space left on device)")

    monkeypatch.setattr("qerl.record.completions.append", full)
    with caplog.at_level(logging.WARNING):
        table.append(completion_rows(step(1), 1, 100))
        table.append(completion_rows(step(2), 1, 100))
    assert [r.message for r in caplog.records] == [
        "the run goes on without its table of completions: "
        "completions.jsonl is not written (No space left on device)"
    ]
    assert _steps(table.path) == [0]


def test_the_table_stops_at_its_bound(step, tmp_path, caplog) -> None:
    table = CompletionTable(tmp_path / "completions.jsonl", max_bytes=700)
    with caplog.at_level(logging.WARNING):
        for k in range(9):
            table.append(completion_rows(step(k), 1, 100))
    assert table.path.stat().st_size <= 700
    assert _steps(table.path) == [0, 1]
    assert len(caplog.records) == 1


def test_samples_differ_before_they_repeat(step) -> None:
    rows = completion_rows(step(0), 4, 100)
    many = [rows[1]] * 5 + rows
    verdicts = {row["verdict"] for row in pick_samples(many, 4)}
    assert verdicts == {"correct", "wrong", "abstained"}
    assert any(row["truncated"] for row in pick_samples(many, 4))
    assert len(pick_samples(many, 7)) == 7
    assert pick_samples([], 4) == []


def test_a_page_shows_text_that_holds_fences_of_its_own(step) -> None:
    row = completion_rows(step(0), 1, 100)[0] | {"completion": "```python\n1\n````"}
    page = samples_page("toy, seed 0", [row])
    assert page.startswith("# toy, seed 0\n")
    assert "`````text\n```python\n1\n````\n`````" in page
    assert "**correct** (5 = 5) · reward 1.0 · answer `5` · gold `5` · 3 tokens" in page


def test_a_line_of_another_kind_is_named(tmp_path) -> None:
    (tmp_path / "completions.jsonl").write_text("hello\n")
    with pytest.raises(ValueError, match="not a row of this table: 'hello"):
        CompletionTable(tmp_path / "completions.jsonl").begin(keep_before=1)
