"""Our folders against the libraries that own the format: bytes, files, logits."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from qerl.convert.convert import convert
from qerl.convert.method import GROUPS
from qerl.convert.methods import METHODS
from qerl.model.attention import ForestAttend
from qerl.model.linear import frozen
from qerl.model.load import load_policy
from qerl.model.random_source import RandomSource
from qerl.model.source import Folder, Toy
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nvfp4 import NVFP4
from qerl.types import Segment

pytest.importorskip("compressed_tensors", reason="the library that owns the format")

from compressed_tensors.compressors import MXFP4PackedCompressor, NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

Jobs = Callable[..., Any]


def stored(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def original(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in stored(folder).items()}


def their_nvfp4(members: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Linears that share an input take the smallest of their global scales."""
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    g = torch.stack([generate_gparam(w.amin(), w.amax()) for w in members.values()]).amin(0)
    for name, weight in members.items():
        blocks = weight.unflatten(1, (-1, 16))
        scale, _ = calculate_qparams(
            blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=g
        )
        state = {"weight": weight, "weight_scale": scale, "weight_global_scale": g}
        for inner, tensor in NVFP4PackedCompressor.compress(state, scheme).items():
            yield f"{name}.{inner}", tensor


def their_mxfp4(members: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    for name, weight in members.items():
        blocks = weight.unflatten(1, (-1, 32))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
        state = {"weight": weight, "weight_scale": scale}
        for inner, tensor in MXFP4PackedCompressor.compress(state, scheme).items():
            yield f"{name}.{inner}", tensor


@pytest.mark.parametrize(
    ("format", "theirs"), [(NVFP4(), their_nvfp4), (MXFP4(), their_mxfp4)], ids=["nvfp4", "mxfp4"]
)
def test_every_stored_byte_is_that_of_compressed_tensors(
    job: Jobs, checkpoint: Path, format: Any, theirs: Any
) -> None:
    dense = original(checkpoint)
    wanted: dict[str, Tensor] = {}
    for layer in range(3):
        for group in GROUPS.values():
            names = [f"model.layers.{layer}.{linear}" for linear in group]
            wanted |= dict(theirs({name: dense.pop(f"{name}.weight") for name in names}))
    wanted |= {name: tensor.bfloat16() for name, tensor in dense.items()}
    ours = stored(convert(job(format=format)).folder)
    assert ours.keys() == wanted.keys()
    assert sum("weight_packed" in name for name in ours) == 21
    for name, tensor in wanted.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].shape == tensor.shape, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_shard_is_the_file_that_safetensors_writes(job: Jobs) -> None:
    folder = convert(job()).folder
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 5
    for file in files:
        assert file.read_bytes() == save(load_file(file), {"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {n: f.name for f in files for n in load_file(f)}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored(folder).values())


def theirs_in_fp32(folder: Path, tokens: Tensor) -> Any:
    """The model as transformers reads the folder, its bf16 weights computed with in fp32."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert loaded.generation_config.eos_token_id in (2, [2])
    loaded(tokens[None])  # unpacks the linears
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {name: tensor.float() for name, tensor in loaded.state_dict().items()}
    missing = plain.load_state_dict(weights, strict=False).missing_keys
    assert missing == []
    return plain


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize(
    ("format", "bound"),
    [
        (NVFP4(power_of_two_scale=True), 2e-5),  # weights are exact in bf16: rounding of sums only
        (MXFP4(), 2e-5),
        (NVFP4(), 5e-3),  # they divide by g, we multiply by 1/g: some weights round to a neighbour
    ],
    ids=["nvfp4 exact", "mxfp4", "nvfp4"],
)
@torch.no_grad()
def test_transformers_loads_the_folder_and_its_logits_are_ours(
    tmp_path: Path, job: Jobs, family: Any, format: Any, bound: float
) -> None:
    source = Toy(family=family, tied=family == "llama")
    folder = convert(job(source=source, format=format)).folder
    tokens = torch.tensor(source.tokenizer()("What is 12 + 30?").input_ids)
    wanted = theirs_in_fp32(folder, tokens)(tokens[None]).logits[0]
    policy = load_policy(source, format, None)
    for linear in policy.linears().values():  # as they have them: rounded to bf16
        frozen(linear).shadow = linear.packed.dequantize(torch.bfloat16).float()
    attend = ForestAttend([Segment(start=0, length=len(tokens), parent=None)])
    got = policy.decoder.logits(policy.decoder(tokens, torch.arange(len(tokens)), attend))
    assert float(wanted.std()) > 0.5
    assert float((got - wanted).abs().max()) < bound


def test_tokenizer_and_generation_config_are_those_of_the_source(
    job: Jobs, checkpoint: Path
) -> None:
    sampling = {"temperature": 0.7, "top_p": 0.8, "do_sample": True, "eos_token_id": [2]}
    (checkpoint / "generation_config.json").write_text(json.dumps(sampling))
    folder = convert(job()).folder
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (checkpoint / name).read_bytes()
    assert GenerationConfig.from_pretrained(folder).temperature == 0.7
    config = json.loads((folder / "config.json").read_text())
    plain = json.loads((checkpoint / "config.json").read_text())
    assert {key: config[key] for key in plain} == plain


def test_a_source_in_memory_gets_its_files_written(tmp_path: Path, job: Jobs) -> None:
    toy = Toy()
    for source in (toy, RandomSource(toy.spec, "cpu")):
        folder = convert(job(source=source, out=tmp_path / source.name)).folder
        assert (
            AutoTokenizer.from_pretrained(folder)("1+1").input_ids
            == toy.tokenizer()("1+1")["input_ids"]
        )
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [2]
        assert Folder(folder).generation_eos_ids() == (2,)
        config = AutoConfig.from_pretrained(folder)
        assert config.architectures == ["Qwen2ForCausalLM"]


def test_the_report_has_a_line_a_linear(job: Jobs) -> None:
    done = convert(job())
    assert [row["layer"] for row in done.rows] == [0] * 7 + [1] * 7 + [2] * 7
    for row in done.rows:
        assert 18 < row["sqnr_db"] < 23
    report = json.loads((done.folder / "quantization_report.json").read_text())
    assert report["rows"] == done.rows
    assert (report["model"], report["format"], report["method"]) == ("small", "nvfp4", "rtn")
    worst = min(row["sqnr_db"] for row in done.rows)
    assert report["summary"]["sqnr_worst_db"] == pytest.approx(worst)
    assert convert(job()).rows == done.rows


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("format", [NVFP4(), MXFP4()], ids=["nvfp4", "mxfp4"])
def test_a_gpu_writes_the_bytes_that_a_cpu_writes(
    tmp_path: Path, job: Jobs, digest: Callable[[Path], dict[str, str]], format: Any, method: str
) -> None:
    digests = []
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        settings = {"format": format, "method": METHODS[method], "device": torch.device(device)}
        digests.append(digest(convert(job(out=out, **settings)).folder))
    # The report holds sums whose order is the device's.
    for each in digests:
        for name in ("quantization_report.json", "checksums.json"):
            del each[name]
    assert digests[0] == digests[1]
