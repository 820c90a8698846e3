"""A small checkpoint on disk, and a job that converts it into several shards."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qerl.convert.job import Job
from qerl.convert.method import Rtn
from qerl.model import toy
from qerl.model.source import Folder, Toy
from qerl.quant.nvfp4 import NVFP4

Jobs = Callable[..., Job]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A Hugging Face folder of a toy with three layers, in two shards."""
    source = Toy(layers=3, hidden_size=64, mlp_size=128, heads=2, kv_heads=1, tied=False)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    source.config().save_pretrained(folder)
    source.tokenizer().save_pretrained(folder)
    tensors = toy.random_weights(source.spec, 0)
    names = list(tensors)
    halves = {"one": names[: len(names) // 2], "two": names[len(names) // 2 :]}
    weight_map = {}
    for shard, own in halves.items():
        file = f"{shard}.safetensors"
        save_file({name: tensors[name] for name in own}, folder / file)
        weight_map |= dict.fromkeys(own, file)
    text = '{"weight_map": ' + str(weight_map).replace("'", '"') + "}"
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


@pytest.fixture
def job(checkpoint: Path, tmp_path: Path) -> Jobs:
    """`job(...)`: converts the checkpoint into `out`, a layer a shard unless told otherwise."""

    def make(**changes: Any) -> Job:
        plain: dict[str, Any] = {
            "source": Folder(checkpoint, "small"),
            "format": NVFP4(),
            "method": Rtn(),
            "out": tmp_path / "out",
            "shard_bytes": 20_000,
        }
        return Job(**(plain | changes))

    return make


@pytest.fixture
def digest() -> Callable[[Path], dict[str, str]]:
    """`digest(folder)`: SHA-256 of each of its files."""

    def of(folder: Path) -> dict[str, str]:
        return {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
        }

    return of


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Children that are forked here would wait for OpenMP threads that they do not have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
