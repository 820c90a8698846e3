"""A fault of a checkpoint is one line with file and tensor, and nothing is published."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.convert.convert import convert
from qerl.convert.method import Rtn
from qerl.model.source import Folder
from qerl.quant.bf16 import BF16
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4

Jobs = Callable[..., Any]
UP = "model.layers.2.mlp.up_proj.weight"  # in two.safetensors


def edit(file: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors: dict[str, torch.Tensor | None] = {**load_file(file), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, file)


def with_value(shape: tuple[int, ...], value: float) -> torch.Tensor:
    tensor = torch.ones(shape, dtype=torch.bfloat16)
    tensor[1, 5] = value
    return tensor


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(128, 60, dtype=torch.bfloat16), r"is \[128, 60\], the config says \[128, 64\]"),
        (torch.ones(128, 64, dtype=torch.int8), r"is torch\.int8, weights are float32.*original"),
        (torch.ones(128, 64, dtype=torch.float8_e4m3fn), r"is torch\.float8_e4m3fn, weights are"),
        (with_value((128, 64), float("nan")), r"is nan at \[1, 5\]; bring the file again"),
        (with_value((128, 64), float("-inf")), r"is -inf at \[1, 5\]; bring the file again"),
    ],
)
def test_a_wrong_tensor_is_one_line_with_file_and_name(
    job: Jobs, checkpoint: Path, tmp_path: Path, tensor: torch.Tensor, words: str
) -> None:
    edit(checkpoint / "two.safetensors", {UP: tensor})
    with pytest.raises(ValueError, match=rf"two\.safetensors: {UP} {words}") as error:
        convert(job())
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["model.layers.2.input_layernorm.weight", "model.norm.weight", "lm_head.weight"]
)
def test_nan_in_a_tensor_that_stays_dense_is_found_too(
    job: Jobs, checkpoint: Path, name: str
) -> None:
    file = checkpoint / "two.safetensors"
    tensor = load_file(file)[name]
    tensor.view(-1)[3] = torch.nan
    edit(file, {name: tensor})
    with pytest.raises(ValueError, match=rf"two\.safetensors: {name} is nan at \[(0, )?3\]"):
        convert(job())


def test_faults_that_headers_show_are_found_before_the_first_weight(
    job: Jobs, checkpoint: Path
) -> None:
    edit(checkpoint / "two.safetensors", {UP: torch.ones(128, 60)})
    stages: list[Any] = []
    with pytest.raises(ValueError, match=UP):
        convert(job(), stages.append)
    assert not stages


def test_a_width_that_no_block_divides_is_one_line(job: Jobs, checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"intermediate_size": 120}))
    for file in ("one.safetensors", "two.safetensors"):
        tensors = load_file(checkpoint / file)
        for name, tensor in tensors.items():
            if "mlp.down" in name:
                tensors[name] = tensor[:, :120].clone()
            elif "mlp" in name:
                tensors[name] = tensor[:120].clone()
        save_file(tensors, checkpoint / file)
    words = r"one\.safetensors: model\.layers\.0\.mlp\.down_proj\.weight: K=120: nvfp4 needs a mul"
    with pytest.raises(ValueError, match=words):
        convert(job())


def test_a_missing_tensor_is_named(job: Jobs, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][UP]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"small: the checkpoint has no tensor {UP} \(1 in all\)"):
        convert(job())


def test_a_tensor_without_a_place_is_named(job: Jobs, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["visual.patch"] = "two.safetensors"
    path.write_text(json.dumps(index))
    edit(checkpoint / "two.safetensors", {"visual.patch": torch.ones(2)})
    with pytest.raises(ValueError, match=r"1 tensors have no place.*visual\.patch in .*two\.safe"):
        convert(job())


def test_a_truncated_and_a_missing_shard_and_a_pickle_are_one_line(
    job: Jobs, checkpoint: Path
) -> None:
    shard = checkpoint / "two.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"two\.safetensors: \d+ bytes, its header says .*cut"):
        convert(job())
    shard.unlink()
    with pytest.raises(ValueError, match=r"1 shards missing, first two\.safetensors"):
        convert(job())
    (checkpoint / "model.safetensors.index.json").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle"):
        convert(job())


def test_a_missing_config_and_a_missing_tokenizer_are_one_line(job: Jobs, checkpoint: Path) -> None:
    for path in checkpoint.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"checkpoint: no tokenizer \(tokenizer\.json or .*copy"):
        convert(job())
    (checkpoint / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config\.json"):
        convert(job(source=Folder(checkpoint)))


@pytest.mark.parametrize("format", [NF4(), BF16()], ids=str)
def test_a_format_that_the_folder_cannot_hold_is_refused(job: Jobs, format: Any) -> None:
    with pytest.raises(ValueError, match=rf"quant={format.name}: compressed-tensors packs nvfp4"):
        job(format=format)


def test_a_method_that_changes_a_dtype_is_refused(job: Jobs) -> None:
    class Widening(Rtn):
        def quantize(self, layer: Any, format: Any, inputs: Any = None) -> Any:
            made = super().quantize(layer, format)
            norm = made.others["input_layernorm.weight"]
            made.others["input_layernorm.weight"] = norm.float()  # type: ignore[index]
            return made

    with pytest.raises(ValueError, match=r"layers\.0\.input_layernorm\.weight: the method made"):
        convert(job(method=Widening()))


@pytest.mark.parametrize("format", [NVFP4(), MXFP4()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_float_dtypes_convert_and_dense_tensors_keep_theirs(
    job: Jobs, checkpoint: Path, format: Any, dtype: torch.dtype
) -> None:
    for file in checkpoint.glob("*.safetensors"):
        save_file({name: t.to(dtype) for name, t in load_file(file).items()}, file)
    folder = convert(job(format=format, shard_bytes=10**9)).folder
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype == dtype
    assert tensors["model.layers.0.self_attn.q_proj.bias"].dtype == dtype
    assert tensors["model.layers.0.self_attn.q_proj.weight_packed"].dtype == torch.uint8
