"""Safetensors folders: every damage is one line that names file and tensor."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qerl.model.shards import CHECKSUMS, DictWeights, SafetensorsWeights

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_entries_are_what_the_tensors_are(folder: Path) -> None:
    for weights in (SafetensorsWeights(folder), DictWeights(TENSORS)):
        assert sorted(weights.names()) == ["a", "b"]
        for name, tensor in TENSORS.items():
            entry = weights.entry(name)
            assert (entry.shape, entry.dtype) == (tuple(tensor.shape), tensor.dtype)
            assert torch.equal(weights.get(name), tensor)


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (-1, r"two\.safetensors.*1 tensors are cut, first b.*bring the file again"),
        (30, r"two\.safetensors: 30 bytes, its header alone takes"),
        (3, r"two\.safetensors: 3 bytes"),
        (0, r"two\.safetensors: 0 bytes"),
    ],
)
def test_a_truncated_shard_is_refused_with_its_name(folder: Path, keep: int, words: str) -> None:
    path = folder / "two.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=words):
        SafetensorsWeights(folder)


def test_bytes_after_the_end_are_refused(folder: Path) -> None:
    path = folder / "two.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=r"two\.safetensors.*header says"):
        SafetensorsWeights(folder)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 7}}'],
)
def test_an_index_without_a_map_of_tensors_is_refused_with_its_name(
    folder: Path, text: str
) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json: no weight_map.*bring the file again"):
        SafetensorsWeights(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": {"one.safetensors": {}}}'])
def test_checksums_that_cannot_be_read_are_refused_with_their_name(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(json.dumps({"checksums": CHECKSUMS}))
    (folder / CHECKSUMS).write_text(text)
    with pytest.raises(ValueError, match=rf"{CHECKSUMS}: .*copy the folder again"):
        SafetensorsWeights(folder)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_config_that_cannot_be_read_is_refused_with_its_name(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: no JSON object; bring the file again"):
        SafetensorsWeights(folder)


def test_a_file_of_another_kind_is_refused(folder: Path) -> None:
    (folder / "two.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(ValueError, match=r"two\.safetensors.*no header of safetensors"):
        SafetensorsWeights(folder)
    (folder / "two.safetensors").write_text("<!doctype html> moved to another place")
    with pytest.raises(ValueError, match=r"two\.safetensors"):
        SafetensorsWeights(folder)


def test_a_missing_shard_is_refused_with_its_name(folder: Path) -> None:
    (folder / "two.safetensors").unlink()
    with pytest.raises(ValueError, match=r"1 shards missing, first two\.safetensors"):
        SafetensorsWeights(folder)


def test_a_tensor_that_its_shard_lacks_is_refused_with_both_names(folder: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "c": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"two\.safetensors: no tensor c"):
        SafetensorsWeights(folder)


def test_a_pickle_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle.*safetensors export"):
        SafetensorsWeights(tmp_path)


def test_a_folder_at_work_is_refused(folder: Path, tmp_path: Path) -> None:
    inner = tmp_path / "x.partial" / "model"
    inner.mkdir(parents=True)
    for path in folder.glob("*.*"):
        if path.is_file():
            path.rename(inner / path.name)
    with pytest.raises(ValueError, match=r"x\.partial is the work of an unfinished"):
        SafetensorsWeights(inner)


def test_checksums_that_disagree_or_lack_are_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"checksums": CHECKSUMS}))
    with pytest.raises(ValueError, match=rf"{CHECKSUMS} is missing"):
        SafetensorsWeights(folder)
    sizes = {path.name: {"bytes": path.stat().st_size} for path in folder.glob("*.safetensors")}
    (folder / CHECKSUMS).write_text(json.dumps({"files": sizes}))
    SafetensorsWeights(folder)
    sizes["two.safetensors"]["bytes"] += 1
    (folder / CHECKSUMS).write_text(json.dumps({"files": sizes}))
    with pytest.raises(ValueError, match=rf"two\.safetensors.*{CHECKSUMS} says"):
        SafetensorsWeights(folder)
    sizes["three.safetensors"] = {"bytes": 7}
    (folder / CHECKSUMS).write_text(json.dumps({"files": sizes}))
    (folder / "two.safetensors").write_bytes((folder / "two.safetensors").read_bytes() + b"\0")
    with pytest.raises(ValueError, match=r"three\.safetensors: missing"):
        SafetensorsWeights(folder)


def test_the_fingerprint_follows_content_and_not_place(folder: Path, tmp_path: Path) -> None:
    first = SafetensorsWeights(folder).fingerprint()
    other = tmp_path / "elsewhere"
    other.mkdir()
    for path in folder.glob("*.*"):
        if path.is_file():
            path.rename(other / path.name)
    assert SafetensorsWeights(other).fingerprint() == first
    save_file({"b": 2 * TENSORS["b"]}, other / "two.safetensors")
    assert SafetensorsWeights(other).fingerprint() != first
    changed = TENSORS | {"b": 2 * TENSORS["b"]}
    assert DictWeights(TENSORS).fingerprint() != DictWeights(changed).fingerprint()


def test_checksums_of_others_are_not_read(folder: Path) -> None:
    (folder / CHECKSUMS).write_text("[]")
    SafetensorsWeights(folder)
    (folder / "config.json").write_text("{}")
    SafetensorsWeights(folder)
