"""Records: what they refuse, what they keep, and that no file is ever replaced or half written."""

import copy
import errno
import json
import math
import os
from pathlib import Path

import pytest

from qerl.record.schema import Commit, Curve, encode, find, from_document, load


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "training"}, r"record.kind='training': must be one of 'run', 'eval', 'bench'"),
        ({"status": "done"}, r"record.status='done': must be one of 'completed'"),
        ({"seed": "0"}, r"record.seed='0': must be a whole number"),
        ({"seed": True}, r"record.seed=True: must be a whole number"),
        ({"started": "yesterday"}, r"record.started='yesterday': must be an ISO time in UTC"),
        ({"started": "2025-01-31T09:30:00+01:00"}, r"record.started=.*must be an ISO time in UTC"),
        ({"ended": "2024-01-31T09:30:00+00:00"}, r"record.ended=2024.*not before 2025"),
        ({"summary": {"a": "fast"}}, r"record.summary.a='fast': must be a number"),
        ({"summary": {"a": float("nan")}}, r"record.summary.a=nan: must be finite in JSON"),
        ({"config": {"x": {"y": object()}}}, r"record.config.x.y=<object"),
        ({"commit": {"sha": "ab"}}, r"record.commit.dirty is missing"),
        ({"name": "../escape"}, r"record.name='../escape': words of letters"),
        ({"name": ""}, r"record.name=''"),
        ({"colour": "red"}, r"record.colour: no such field; known: schema, kind"),
        (
            {"curves": {"r": {"steps": [0, 1], "values": [1.0]}}},
            r"record.curves.r: 1 values for 2 steps",
        ),
        (
            {"curves": {"r": {"steps": [1, 1], "values": [1, 2]}}},
            r"record.curves.r: step 1 after step 1",
        ),
        (
            {"curves": {"r": {"steps": [0], "values": ["x"]}}},
            r"record.curves.r.values\[0\]='x': must be a number",
        ),
        ({"samples": ["text"]}, r"record.samples\[0\]='text': must be an object"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(make_record, change, message) -> None:
    document = make_record().document() | change
    with pytest.raises(ValueError, match=message):
        from_document(document)


def test_a_missing_field_is_named(make_record) -> None:
    document = make_record().document()
    del document["device"]
    with pytest.raises(ValueError, match=r"record\.device is missing"):
        from_document(document)


def test_a_record_comes_back_as_it_was_written(make_record, tmp_path) -> None:
    record = make_record()
    path = record.write(tmp_path)
    assert path == tmp_path / "gsm8k_3b_nvfp4" / "seed0-abcdef0.json"
    read = load(path)
    assert read == record
    assert read.path == path


def test_numbers_without_a_value_survive_json(make_record, tmp_path) -> None:
    values = (float("nan"), float("inf"), float("-inf"))
    record = make_record(
        summary={"a": float("nan"), "b": float("inf")},
        curves={"x": Curve(steps=(0, 1, 2), values=values)},
    )
    path = record.write(tmp_path)
    document = json.loads(path.read_text())
    assert document["curves"]["x"]["values"] == [None, "inf", "-inf"]
    assert document["summary"] == {"a": None, "b": "inf"}
    read = load(path)
    assert math.isnan(read.curves["x"].values[0])
    assert read.curves["x"].values[1:] == values[1:]
    assert read.summary["b"] == math.inf


def test_the_same_record_is_the_same_bytes_whatever_the_order_of_its_keys(make_record) -> None:
    document = make_record(summary={"b": 1.0, "a": 2.0}).document()
    turned = dict(reversed(copy.deepcopy(document).items()))
    assert encode(turned) == encode(document)


def test_a_curve_is_one_line(make_record) -> None:
    text = encode(make_record().document())
    assert '"values": [0.1, 0.2, 0.5]' in text
    assert json.loads(text) == make_record().document()


def test_half_a_character_does_not_stop_a_record(make_record, tmp_path) -> None:
    record = make_record(samples=({"completion": "cut \udc80"},))
    assert load(record.write(tmp_path)).samples == record.samples


def test_no_record_is_ever_replaced(make_record, tmp_path) -> None:
    first = make_record().write(tmp_path)
    before = first.read_bytes()
    second = make_record(summary={"train/reward": 0.9}).write(tmp_path)
    third = make_record(summary={"train/reward": 0.7}).write(tmp_path)
    assert [p.name for p in (first, second, third)] == [
        "seed0-abcdef0.json",
        "seed0-abcdef0-2.json",
        "seed0-abcdef0-3.json",
    ]
    assert first.read_bytes() == before
    assert load(second).summary == {"train/reward": 0.9}


def test_writing_the_same_record_again_makes_no_second_file(make_record, tmp_path) -> None:
    assert make_record().write(tmp_path) == make_record().write(tmp_path)
    assert len(list(tmp_path.rglob("*.json"))) == 1


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"status": "interrupted"}, "seed0-abcdef0-interrupted.json"),
        ({"commit": Commit(sha="abcdef0123", dirty=True)}, "seed0-abcdef0-dirty.json"),
        ({"commit": None, "seed": 7}, "seed7-nogit.json"),
    ],
)
def test_the_file_name_tells_what_a_table_must_know(make_record, changes, name) -> None:
    assert make_record(**changes).file.name == name


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_full_disk_is_one_line_and_leaves_every_file_as_it_stood(
    make_record, tmp_path, monkeypatch, call
) -> None:
    first = make_record().write(tmp_path)
    before = first.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="is not written") as caught:
        make_record(summary={}).write(tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert "No space left on device" in str(caught.value)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert first.read_bytes() == before
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [first.name]


def test_a_file_system_without_hard_links_still_replaces_nothing(
    make_record, tmp_path, monkeypatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    first = make_record().write(tmp_path)
    second = make_record(seed=0, summary={}).write(tmp_path)
    assert second.name == "seed0-abcdef0-2.json"
    assert load(first).summary == {"train/reward": 0.5}


def test_find_selects_by_dotted_fields_lists_and_kind(make_record, tmp_path) -> None:
    for seed in range(3):
        make_record(seed=seed).write(tmp_path / "runs")
    make_record(kind="eval", config={"quant": {"name": "nf4"}}, seed=5).write(tmp_path / "evals")
    assert [r.seed for r in find(tmp_path, {"seed": [0, 2]})] == [0, 2]
    assert [r.seed for r in find(tmp_path, {"config.quant.name": "nf4"})] == [5]
    assert [r.seed for r in find(tmp_path, kind="eval")] == [5]
    assert [r.seed for r in find(tmp_path, {"commit.dirty": False}, kind="run")] == [0, 1, 2]
    assert find(tmp_path, {"config.quant.nmae": "nf4"}) == []
    assert find(tmp_path / "nowhere") == []


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x\.json"):
        find(tmp_path)
