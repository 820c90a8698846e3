"""Checkpoints, in memory or in safetensors files, checked against the bytes that are there.

A file is ``u64 n, n bytes of JSON, data``; the JSON names every tensor with its dtype, its shape
and the bytes of data it takes. Source: safetensors, format description. Headers are read when a
folder is opened, so that a file that is missing, cut off or no safetensors is refused before hours
of work; tensors are read one at a time.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
CHECKSUMS = "checksums.json"
"""Lists every file of a folder that this package wrote, with its bytes and SHA-256."""

UNFINISHED = ".partial"
"""Ending of the folder in which a conversion works until it is whole."""

DTYPES: Mapping[str, torch.dtype] = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in a header, in the order in which safetensors puts tensors into a file."""

_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16  # of a file's data, for its fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor of a checkpoint, unread."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    place: str
    """Where it lies, for messages: a file's name."""


class DictWeights:
    """A checkpoint in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Sequence[str]:
        """Every tensor of the checkpoint."""
        return list(self._tensors)

    def get(self, name: str) -> Tensor:
        """One tensor."""
        return self._tensors[name]

    def entry(self, name: str) -> Entry:
        """What a tensor is."""
        tensor = self._tensors[name]
        return Entry(shape=tuple(tensor.shape), dtype=tensor.dtype, place="memory")

    def fingerprint(self) -> str:
        """SHA-256 of every tensor."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self._tensors.items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(raw(tensor))
        return digest.hexdigest()


class SafetensorsWeights:
    """A folder with ``model.safetensors``, or with shards and their index. Memory-mapped."""

    def __init__(self, folder: Path) -> None:
        """Read the index and every header.

        Raises:
            ValueError: naming the file that is missing, cut off, no safetensors, or without a
                tensor that the index puts there.
        """
        self._folder = folder
        check_finished(folder)
        shards = _shards(folder)
        self._headers = {name: _header(folder / name) for name in sorted(set(shards.values()))}
        for name, shard in shards.items():
            if name not in self._headers[shard]:
                raise ValueError(
                    f"{folder / shard}: no tensor {name}, which the index puts there; "
                    "bring the folder again"
                )
        self._shard = shards

    def names(self) -> Sequence[str]:
        """Every tensor of the checkpoint."""
        return list(self._shard)

    def entry(self, name: str) -> Entry:
        """What a tensor is, without reading it."""
        shard = self._shard[name]
        stored = self._headers[shard][name]
        if stored["dtype"] not in DTYPES:
            known = ", ".join(DTYPES)
            place = self._folder / shard
            raise ValueError(f"{place}: {name} has dtype {stored['dtype']}; known are {known}")
        return Entry(
            shape=tuple(stored["shape"]),
            dtype=DTYPES[stored["dtype"]],
            place=str(self._folder / shard),
        )

    def get(self, name: str) -> Tensor:
        """One tensor; only its pages are read from disk."""
        with safe_open(self._folder / self._shard[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def fingerprint(self) -> str:
        """SHA-256 of all headers and of samples of the data, the same wherever the folder lies."""
        digest = hashlib.sha256()
        for name in self._headers:
            path = self._folder / name
            size = path.stat().st_size
            digest.update(f"{name} {size}\n".encode())
            digest.update(json.dumps(self._headers[name], sort_keys=True).encode())
            with path.open("rb") as file:
                for sample in range(_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()


def check_finished(folder: Path) -> None:
    """Refuse a folder that is being written, or that is not what its checksums say.

    A folder whose config does not name the checksums is somebody else's and passes.

    Raises:
        ValueError: for a folder below one that ends in ``.partial``, and for files that are
            missing or of another size than listed.
    """
    unfinished = [part for part in folder.absolute().parts if part.endswith(UNFINISHED)]
    if unfinished:
        raise ValueError(
            f"{folder}: {unfinished[0]} is the work of an unfinished scripts/quantize.py; give its "
            "command again to finish it"
        )
    config, listed = folder / "config.json", folder / CHECKSUMS
    if not config.is_file():
        return
    said = json_object(config)
    if said is None:
        raise ValueError(f"{config}: no JSON object; bring the file again")
    if said.get("checksums") != CHECKSUMS:
        return
    if not listed.is_file():
        raise ValueError(
            f"{folder}: {CHECKSUMS} is missing, so whether it is whole is not known; copy the "
            "folder again"
        )
    files = (json_object(listed) or {}).get("files")
    if not isinstance(files, dict) or not all(
        isinstance(facts, dict) and "bytes" in facts for facts in files.values()
    ):
        raise ValueError(f"{listed}: no list of files with their bytes; copy the folder again")
    for name, facts in files.items():
        path = folder / name
        there = path.stat().st_size if path.is_file() else None
        if there != facts["bytes"]:
            raise ValueError(
                f"{path}: {'missing' if there is None else f'{there} bytes'}, {CHECKSUMS} says "
                f"{facts['bytes']} bytes; copy the folder again"
            )


def json_object(path: Path) -> dict[str, Any] | None:
    """What a JSON file holds; None where that is no JSON object."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # neither JSON nor text
        return None
    return held if isinstance(held, dict) else None


def module_names(settings: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The list of names under the first of these keys that has one; none where none has.

    Raises:
        TypeError: for anything else than a list of names. A lone name would read as a list of
            its letters, which no module has.
    """
    for key in keys:
        names = settings.get(key)
        if names and not (isinstance(names, list) and all(isinstance(n, str) for n in names)):
            raise TypeError(f"{key}={names!r}: a list of names is read")
        if names:
            return tuple(names)
    return ()


def _shards(folder: Path) -> dict[str, str]:
    """File of every tensor."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        shards: dict[str, str] | None = (json_object(index) or {}).get("weight_map")
        if not (
            shards
            and isinstance(shards, dict)
            and all(isinstance(name, str) for name in shards.values())
        ):
            raise ValueError(f"{index}: no weight_map from tensors to files; bring the file again")
        absent = sorted({name for name in shards.values() if not (folder / name).is_file()})
        if absent:
            raise ValueError(
                f"{folder}: {len(absent)} shards missing, first {absent[0]}; complete the download"
            )
        return shards
    if single.is_file():
        return dict.fromkeys(_header(single), SINGLE)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder / pickles[0]} is a pickle, which can run any code when it is read, and there "
            "is no model.safetensors beside it; take a safetensors export of the model "
            "(transformers: model.save_pretrained)"
        )
    raise ValueError(
        f"{folder}: no model.safetensors and no index of shards; "
        "model.source.path needs a complete Hugging Face folder in safetensors format"
    )


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a file by name, with the file's length checked against them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if 8 + length <= size else b""
    cut = f"{path}: {size} bytes, {{}}; cut off or damaged, bring the file again"
    if len(text) < length or size < 8:
        raise ValueError(cut.format(f"its header alone takes {8 + length}"))
    try:
        header: dict[str, dict[str, Any]] = json.loads(text)
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(cut.format("and no header of safetensors in front")) from None
    if 8 + length + end != size:
        ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items()}
        lost = sorted((last, name) for name, last in ends.items() if last > size)
        first = f", of which {len(lost)} tensors are cut, first {lost[0][1]}" if lost else ""
        raise ValueError(cut.format(f"its header says {8 + length + end}{first}"))
    return header


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row by row."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data
