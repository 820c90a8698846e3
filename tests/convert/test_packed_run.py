"""A folder of packed weights from the command line's point of view: train on it, export from it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file

from qerl import build
from qerl.build.config import checkpoint_identity
from qerl.build.export import export
from qerl.build.parts import check_memory
from qerl.convert.convert import convert
from qerl.convert.method import Rtn
from qerl.convert.methods import Mse
from qerl.model.load import load_policy
from qerl.model.packing import linear_bytes, read_packing
from qerl.model.plan import memory_plan
from qerl.model.source import Folder, HuggingFace
from qerl.quant.nvfp4 import NVFP4

Compose = Callable[..., DictConfig]
RUN = (
    "model=qwen2.5-7b",
    "model.lora.rank=4",
    "data=toy",
    "trainer=cpu",
    "logger=none",
    "record_dir=null",
    "trainer.max_steps=1",
    "trainer.evaluation.problems=0",
    "algorithm.prompts_per_step=2",
    "algorithm.group_size=2",
    "data.max_new_tokens=4",
)


@pytest.fixture
def packed(job: Callable[..., Any], tmp_path: Path) -> Path:
    convert(job(out=tmp_path / "packed", method=Rtn()))
    return tmp_path / "packed"


def test_a_packed_folder_trains_without_conversion_and_exports(
    composed: Compose, packed: Path, tmp_path: Path
) -> None:
    outcome = build.train(composed(*RUN, f"model.source.path={packed}", "quant=nvfp4"))
    assert "completed" in outcome.text
    (run,) = Path("out").glob("*/seed*")
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(packed)
    record = json.loads((run / "record.json").read_text())
    assert record["config"]["quant"]["method"] == "rtn"
    settings = (f"run={run}", "what=base", f"out={tmp_path / 'base'}", "trainer=cpu")
    export(composed(*settings, config="export"))
    again = load_policy(Folder(tmp_path / "base"), NVFP4(), None)
    assert again.base_hash() == load_policy(Folder(packed), NVFP4(), None).base_hash()
    # Other weights in the same place are another base.
    shard = sorted(packed.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    save_file({n: torch.zeros_like(t) for n, t in tensors.items()}, shard, {"format": "pt"})
    with pytest.raises(ValueError, match="trained on other weights"):
        export(composed(*settings[:2], f"out={tmp_path / 'other'}", config="export"))


@pytest.mark.parametrize(
    ("quant", "words"),
    [
        (("quant=mxfp4",), "quant=mxfp4: .* holds nvfp4 of compressed-tensors.* set quant=nvfp4"),
        (("quant=bf16",), "set quant=nvfp4"),
        (("quant=nvfp4", "quant.method=mse"), "packed by rtn; set quant.method=rtn"),
        (("quant=nvfp4", "quant.power_of_two_scale=true"), "set quant.power_of_two_scale=false"),
    ],
)
def test_another_quant_than_the_folders_is_one_line(
    composed: Compose, packed: Path, quant: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        build.train(composed(*RUN, f"model.source.path={packed}", *quant))
    assert "\n" not in str(raised.value)


def test_a_folder_made_otherwise_wants_its_own_settings(
    composed: Compose, job: Callable[..., Any], tmp_path: Path
) -> None:
    convert(job(out=tmp_path / "mse", method=Mse()))
    place = f"model.source.path={tmp_path / 'mse'}"
    with pytest.raises(ValueError, match=r"set quant\.method=mse"):
        build.train(composed(*RUN, place, "quant=nvfp4"))
    assert "completed" in build.train(composed(*RUN, place, "quant.method=mse")).text
    convert(job(out=tmp_path / "exact", format=NVFP4(power_of_two_scale=True)))
    with pytest.raises(ValueError, match=r"packed with true; set quant\.power_of_two_scale=true"):
        build.train(composed(*RUN, f"model.source.path={tmp_path / 'exact'}", "quant=nvfp4"))


def test_the_plan_counts_linears_that_are_left_dense(packed: Path) -> None:
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["ignore"] += ["re:.*layers.1.mlp.*"]
    (packed / "config.json").write_text(json.dumps(config))
    source = HuggingFace("some/model", path=str(packed))
    packing, geometry = read_packing(source.config()), source.geometry()
    counted = linear_bytes(geometry, packing, NVFP4())
    all_packed = memory_plan(geometry, NVFP4(), None).linears
    shapes = geometry.linear_shapes()
    dense = sum(N * K for name, (N, K) in shapes.items() if name in ("gate_proj", "up_proj"))
    dense += shapes["down_proj"][0] * shapes["down_proj"][1]
    extra = dense * (2 - 4.5 / 8)
    assert counted == pytest.approx(all_packed + extra, rel=2e-3)
    assert memory_plan(geometry, NVFP4(), None, linear_bytes=counted).linears == counted


def test_a_run_is_of_the_weights_in_its_folder(
    composed: Compose, packed: Path, checkpoint: Path
) -> None:
    def of(path: Path) -> dict[str, str]:
        return checkpoint_identity(composed(*RUN, f"model.source.path={path}"))

    assert of(packed) == of(packed)
    assert of(packed) != of(checkpoint)
    assert checkpoint_identity(composed("model=toy")) == {}


def test_memory_is_refused_with_models_and_not_with_formats_that_the_folder_has_not(
    composed: Compose, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qerl.build.parts.psutil.virtual_memory", lambda: Memory())
    cfg = composed(*RUN, f"model.source.path={packed}")
    with pytest.raises(ValueError, match="the model needs") as raised:
        check_memory(cfg, HuggingFace("some/model", path=str(packed)), None)
    assert "quant=" not in str(raised.value)


class Memory:
    available = 1
