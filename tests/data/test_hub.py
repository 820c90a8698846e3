"""Problems from local files and from the hub, and the errors of both."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from qerl.data import known
from qerl.data.hub import Fields, HubProblems
from qerl.data.known import Known

ROWS = [
    {"question": "What is 1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"},
    {"question": "What is 600 + 434?", "answer": "It is 1,034.\n#### 1,034"},
    {"question": "What is 2 + 2?", "answer": "#### 4"},
]
GSM8K_FIELDS = Fields(question=["question"], answer={"answer": "after_hashes"})


def gsm8k(path: Path | str | None, **settings: Any) -> HubProblems:
    wanted: dict[str, Any] = {"hub_id": "openai/gsm8k", "hub_config": "main"}
    wanted |= {"fields": GSM8K_FIELDS, "path": None if path is None else str(path)}
    return HubProblems(name="gsm8k", **(wanted | settings))


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(file)


def test_rows_become_problems_with_stable_ids_and_bare_golds(write_rows: Callable) -> None:
    loaded = gsm8k(write_rows("mine.jsonl", ROWS)).load()
    assert [p.id for p in loaded.problems] == ["gsm8k/train/0", "gsm8k/train/1", "gsm8k/train/2"]
    assert [p.gold for p in loaded.problems] == ["2", "1034", "4"]
    assert loaded.problems[0].question == "What is 1 + 1?"
    assert loaded.rows == 3


@pytest.mark.parametrize("name", ["gsm8k/train.jsonl", "train.jsonl", "gsm8k/main/train.jsonl"])
def test_split_is_found_below_a_folder(write_rows: Callable, tmp_path: Path, name: str) -> None:
    write_rows(name, ROWS)
    assert len(gsm8k(tmp_path).load().problems) == 3


@pytest.mark.parametrize(
    "name", ["train.parquet", "main/train-00000-of-00001.parquet", "data/train-0.parquet"]
)
def test_parquet_and_the_layout_of_a_hub_clone_are_read(tmp_path: Path, name: str) -> None:
    write_parquet(tmp_path / name, ROWS)
    assert [p.gold for p in gsm8k(tmp_path).load().problems] == ["2", "1034", "4"]


def test_shards_are_read_in_order(tmp_path: Path) -> None:
    write_parquet(tmp_path / "main/train-00001-of-00002.parquet", ROWS[2:])
    write_parquet(tmp_path / "main/train-00000-of-00002.parquet", ROWS[:2])
    assert [p.gold for p in gsm8k(tmp_path).load().problems] == ["2", "1034", "4"]


def test_tilde_is_expanded(
    write_rows: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows("sets/gsm8k/train.jsonl", ROWS)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(gsm8k("~/sets").load().problems) == 3


def test_file_of_another_split_is_never_served(write_rows: Callable, tmp_path: Path) -> None:
    train = write_rows("train.jsonl", ROWS)
    with pytest.raises(ValueError, match="gsm8k/test: nothing there fits"):
        gsm8k(train, split="test").load()
    write_rows("test.jsonl", ROWS[:1])
    assert len(gsm8k(train, split="test").load().problems) == 1


def test_folder_of_another_known_set_is_never_served(write_rows: Callable, tmp_path: Path) -> None:
    write_rows("gsm8k/test.jsonl", ROWS)
    source = HubProblems(
        name="math500", split="test", hub_id="-", path=str(tmp_path / "gsm8k"), fields=GSM8K_FIELDS
    )
    with pytest.raises(ValueError, match="math500/test: nothing there fits"):
        source.load()


def test_missing_file_says_what_where_and_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder") as caught:
        gsm8k(tmp_path / "nowhere").load()
    message = str(caught.value)
    assert message.startswith("gsm8k/train: there is no such file or folder at")
    assert str(tmp_path / "nowhere") in message
    assert "gsm8k/train.jsonl" in message
    assert "set data.path" in message
    assert "\n" not in message


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"train\.csv: a \.jsonl or \.parquet file"):
        gsm8k(tmp_path / "train.csv").load()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question": "What is', "not valid JSON"),
        ("[1, 2]", "a JSON list"),
        ("\xff", "not valid JSON"),
    ],
)
def test_malformed_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "mine.jsonl"
    good = '{"question": "What is 1 + 1?", "answer": "2"}'
    file.write_bytes(f"{good}\n\n{good}\n{line}\n".encode("latin-1"))
    with pytest.raises(ValueError, match=rf"mine\.jsonl:4: {reason}"):
        gsm8k(file).load()


def test_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_text("nothing of the kind")
    with pytest.raises(ValueError, match=r"train\.parquet: not a readable parquet file"):
        gsm8k(tmp_path / "train.parquet").load()


def test_line_separators_inside_text_do_not_split_a_row(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "a\u2028b", "answer": "1"}\r\n', encoding="utf-8-sig")
    assert gsm8k(file).load().problems[0].question == "a\u2028b"


@pytest.mark.parametrize("missing", ["question", "answer"])
def test_missing_field_is_named_with_its_line(write_rows: Callable, missing: str) -> None:
    row = {key: text for key, text in ROWS[1].items() if key != missing}
    file = write_rows("mine.jsonl", [ROWS[0], row])
    with pytest.raises(
        ValueError, match=rf"mine\.jsonl:2: no {missing}; looked for '{missing}', the row has"
    ):
        gsm8k(file).load()


def test_unreadable_gold_is_left_out_and_reported(write_rows: Callable) -> None:
    broken = {"question": "What is 3 + 3?", "answer": "She has six."}
    loaded = gsm8k(write_rows("mine.jsonl", [ROWS[0], broken, ROWS[2]])).load()
    assert [p.id for p in loaded.problems] == ["gsm8k/train/0", "gsm8k/train/2"]
    assert len(loaded.unreadable_golds) == 1
    assert "mine.jsonl:2" in loaded.unreadable_golds[0]


def test_first_present_field_counts_and_parts_are_joined(write_rows: Callable) -> None:
    rows = [
        {"Body": "Ann has 2 pens. ", "Question": "How many?", "Answer": 2.0},
        {"question": "How many?", "Body": "unused", "Question": "unused", "Answer": "1,003.0"},
    ]
    fields = Fields(
        question=["question", "Body+Question"], answer={"answer": "as_is", "Answer": "number"}
    )
    loaded = gsm8k(write_rows("mine.jsonl", rows), fields=fields).load()
    assert [p.question for p in loaded.problems] == ["Ann has 2 pens. How many?", "How many?"]
    assert [p.gold for p in loaded.problems] == ["2", "1003"]


def test_unknown_reading_is_refused() -> None:
    with pytest.raises(ValueError, match="'answer' read as 'guess': one of as_is"):
        Fields(answer={"answer": "guess"})  # type: ignore[dict-item]


def test_levels_and_limit_select_without_renumbering(write_rows: Callable) -> None:
    rows = [
        {"question": f"q{n}", "answer": "1", "level": f"Level {n}"} for n in [1, 2, 3, "?", 4, 5]
    ]
    loaded = gsm8k(write_rows("mine.jsonl", rows), levels=[3, 4, 5], limit=2).load()
    assert [p.id for p in loaded.problems] == ["gsm8k/train/2", "gsm8k/train/4"]
    assert (loaded.rows, loaded.other_levels, loaded.beyond_limit) == (6, 3, 1)


def test_levels_of_rows_without_level_are_refused(write_rows: Callable) -> None:
    with pytest.raises(ValueError, match=r"mine\.jsonl:1: levels \[3\] are asked for"):
        gsm8k(write_rows("mine.jsonl", ROWS), levels=[3]).load()


def test_datasets_reads_local_json_lines_offline(
    write_rows: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    write_rows("gsm8k/train.jsonl", ROWS)
    write_rows("gsm8k/test.jsonl", ROWS[:1])
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = gsm8k(None, hub_id=str(tmp_path / "gsm8k"), hub_config=None)
    assert [p.gold for p in source.load().problems] == ["2", "1034", "4"]


def test_hub_is_asked_for_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*place: Any, **settings: Any) -> list[dict[str, str]]:
        asked.append((place, settings))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    loaded = gsm8k(None, split="test", hub_split="validation", revision="abc").load()
    assert asked == [(("openai/gsm8k", "main"), {"split": "validation", "revision": "abc"})]
    assert loaded.problems[0].id == "gsm8k/test/0"
    assert loaded.origin == "openai/gsm8k (main, validation)"
    assert loaded.warnings == ("3 rows where 1,319 are published",)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach 'openai/gsm8k'\non the Hub"),
        datasets.exceptions.DatasetNotFoundError("gated"),
        datasets.exceptions.DatasetGenerationError("broken"),
        ValueError("BuilderConfig 'main' not found"),
    ],
)
def test_unreachable_hub_says_what_and_what_to_set(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="from the hub") as caught:
        gsm8k(None).load()
    message = str(caught.value)
    assert message.startswith("gsm8k/train: cannot load openai/gsm8k (main, train) from the hub")
    assert type(error).__name__ in message
    assert "set data.path to a folder with gsm8k/train.jsonl" in message
    assert "\n" not in message


def test_altered_copy_of_a_known_set_is_reported(write_rows: Callable) -> None:
    loaded = gsm8k(write_rows("gsm8k/train.jsonl", ROWS)).load()
    assert loaded.checksum == "differs"
    assert loaded.warnings[0] == "3 rows where 7,473 are published"
    assert "sha256 differs" in loaded.warnings[1]


def test_recorded_copy_is_verified(write_rows: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    from hashlib import sha256

    file = write_rows("gsm8k/train.jsonl", ROWS)
    recorded = {("gsm8k", "train"): Known((3,), sha256(file.read_bytes()).hexdigest())}
    monkeypatch.setattr(known, "KNOWN", recorded)
    loaded = gsm8k(file).load()
    assert (loaded.checksum, loaded.warnings) == ("verified", ())


@pytest.mark.parametrize(("name", "split"), list(known.KNOWN))
def test_whole_local_sets_are_the_recorded_ones(data_dir: Path, name: str, split: str) -> None:
    loaded = HubProblems(name=name, split=split, hub_id="-", path=str(data_dir)).load()
    assert (loaded.checksum, loaded.warnings) == ("verified", ())
    assert loaded.rows in known.KNOWN[(name, split)].rows
    assert len(loaded.problems) == loaded.rows
