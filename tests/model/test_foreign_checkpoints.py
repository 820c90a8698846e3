"""Checkpoints that other libraries quantised, written by these libraries in the test."""

import importlib.util
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bitsandbytes.functional import QuantState, dequantize_4bit
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.base import decompress_module
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
)

from qerl.model import modelopt, toy
from qerl.model.attention import ForestAttend
from qerl.model.linear import LoRAConfig
from qerl.model.load import load_policy
from qerl.model.packing import read_packing
from qerl.model.policy import Policy
from qerl.model.source import HuggingFace
from qerl.quant.bf16 import BF16
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format
from qerl.types import Segment

MODELOPT = Path(__file__).with_name("write_modelopt.py")
TOKENS = torch.arange(3, 40)
DENSE = ("layers.0.k_proj", "layers.1.gate_proj", "layers.1.up_proj", "layers.1.down_proj")
"""Linears that the checkpoints of this file leave dense."""

HAS_MODELOPT = importlib.util.find_spec("modelopt") is not None

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def write_compressed(
    model: PreTrainedModel, folder: Path, preset: str, *, power_of_two: bool = False
) -> None:
    """Quantise as llm-compressor does, but every linear under its own scale, and save."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    ignore = ["lm_head", "re:.*layers.1.mlp.*", "model.layers.0.self_attn.k_proj"]
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignore)
    )
    for module in model.modules():
        if not hasattr(module, "quantization_scheme"):
            continue
        weight = module.weight.detach()
        blocks = weight.unflatten(1, (-1, scheme.weights.group_size))
        g = None
        if hasattr(module, "weight_global_scale"):
            g = generate_gparam(weight.min(), weight.max())
            if power_of_two:
                g = torch.exp2(g.log2().floor())
            module.weight_global_scale.data.copy_(g)
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, g)
        module.weight_scale.data.copy_(scale)
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data.fill_(100.0)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def write_bnb(model: PreTrainedModel, folder: Path, *, double_quant: bool) -> None:
    model.save_pretrained(folder / "dense")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["lm_head", "model.layers.1.mlp", "model.layers.0.self_attn.k_proj"],
    )
    quantized = AutoModelForCausalLM.from_pretrained(
        folder / "dense", quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    quantized.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, hf_model: Callable[..., PreTrainedModel]
) -> dict[str, Path]:
    """A folder of each kind."""
    root = tmp_path_factory.mktemp("foreign")
    made: dict[str, Path] = {}
    for index, kind in enumerate(KINDS):
        family = LlamaConfig if index % 2 else Qwen2Config
        model, folder = hf_model(family, tie_word_embeddings=False), root / kind
        if kind == "modelopt":
            if not HAS_MODELOPT:
                continue
            model.save_pretrained(folder / "dense")
            subprocess.run([sys.executable, str(MODELOPT), folder / "dense", folder], check=True)
        elif kind.startswith("bnb"):
            write_bnb(model, folder, double_quant=kind == "bnb-double")
        else:
            preset = {"ct-mxfp4": "MXFP4A16", "ct-w4a4": "NVFP4"}.get(kind, "NVFP4A16")
            write_compressed(model, folder, preset, power_of_two=kind == "ct-nvfp4-exact")
        toy.build_tokenizer().save_pretrained(folder)
        made[kind] = folder
    return made


KINDS: dict[str, Format] = {
    "ct-nvfp4": NVFP4(),
    "ct-nvfp4-exact": NVFP4(power_of_two_scale=True),
    "ct-w4a4": NVFP4(),
    "ct-mxfp4": MXFP4(),
    "modelopt": NVFP4(),
    "bnb": NF4(double_quant=False),
    "bnb-double": NF4(double_quant=True),
}


def has(folders: dict[str, Path], kind: str) -> Path:
    if kind not in folders:
        pytest.skip("pip install nvidia-modelopt")
    return folders[kind]


def load(folder: Path, format: Format, lora: LoRAConfig | None = None) -> Policy:
    return load_policy(HuggingFace("some/model", path=str(folder)), format, lora)


def logits(policy: Policy) -> Tensor:
    attend = ForestAttend([Segment(start=0, length=len(TOKENS), parent=None)])
    with torch.no_grad():
        hidden = policy.decoder(TOKENS, torch.arange(len(TOKENS)), attend)
        return policy.decoder.logits(hidden)


def full_name(name: str) -> str:
    """Of a linear of the policy, in the checkpoint."""
    layer, linear = name.rsplit(".", 1)
    block = "mlp" if linear in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"model.{layer}.{block}.{linear}"


def reference(folder: Path, kind: str) -> PreTrainedModel:
    """The folder in transformers, in fp32; the library unpacks weights to bf16 where it does."""
    if kind == "modelopt":
        return unpacked_by_modelopt(folder)
    if kind.startswith("bnb"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.train()  # in evaluation it packs weights once more, for a product in bf16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            decompress_module(module)
            module.quantization_enabled = False  # activations as they are
    for hook in list(model._forward_pre_hooks):
        model._forward_pre_hooks.pop(hook)
    return torch.nn.Module.float(model)  # transformers' own refuses quantised models


def unpacked_by_modelopt(folder: Path) -> PreTrainedModel:
    """transformers has no loader of this format: its own library's arithmetic, saved beside."""
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(load_file(folder / "unpacked" / "model.safetensors"))
    return model


def own_weight(folder: Path, kind: str, model: PreTrainedModel, name: str) -> Tensor:
    """The weight of a linear as the library that owns the format unpacks it."""
    module = model.get_submodule(full_name(name))
    if not kind.startswith("bnb") or name in DENSE:
        return module.weight.detach()
    state = module.weight.quant_state
    assert isinstance(state, QuantState)
    return dequantize_4bit(module.weight, state)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_what_the_owning_library_unpacks(kind: str, folders: dict[str, Path]) -> None:
    policy, model = load(has(folders, kind), KINDS[kind]), reference(folders[kind], kind)
    for name, linear in policy.linears().items():
        theirs = own_weight(folders[kind], kind, model, name)
        ours = linear.packed.dequantize(torch.float32)
        if kind.startswith("ct") and name not in DENSE:  # this library unpacks to bf16
            ours = ours.bfloat16().float()
        if kind in ("ct-nvfp4", "ct-w4a4") and name not in DENSE:
            # It divides by g where 1 / g multiplies here: rarely, both sides of a tie in bf16.
            assert (ours - theirs).abs().max() <= theirs.abs().max() * 2**-8
            assert (ours != theirs).float().mean() < 2e-3
        else:
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, folders: dict[str, Path]) -> None:
    got = logits(load(has(folders, kind), KINDS[kind]))
    with torch.no_grad():
        wanted = reference(folders[kind], kind)(TOKENS[None]).logits[0]
    # Weights that are not exact in bf16 are rounded there and not here.
    bound = 2e-2 if kind in ("ct-nvfp4", "ct-w4a4") else 1e-4
    assert (got - wanted).abs().max() <= bound * wanted.abs().max()
    assert wanted.std() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_linears_that_the_checkpoint_leaves_dense_are_held_in_bf16(
    kind: str, folders: dict[str, Path]
) -> None:
    policy = load(has(folders, kind), KINDS[kind], LoRAConfig(rank=2, alpha=2))
    held = {name for name, linear in policy.linears().items() if linear.packed.format == BF16()}
    assert held == set(DENSE)
    packed = {linear.packed.format.name for linear in policy.linears().values()} - {"bf16"}
    assert packed == {KINDS[kind].name}
    assert KINDS[kind].bits_per_weight < policy.linear_bits_per_weight() < 16


@pytest.mark.parametrize("kind", ["ct-nvfp4", "modelopt"])
def test_every_linear_keeps_its_own_tensor_scale(kind: str, folders: dict[str, Path]) -> None:
    tensors = load_file(has(folders, kind) / "model.safetensors")
    linears = load(folders[kind], NVFP4()).linears()
    q, v = (linears[f"layers.0.{n}_proj"].packed.tensors["tensor_scale"] for n in "qv")
    if kind == "ct-nvfp4":
        assert q != v
        stored = tensors["model.layers.0.self_attn.q_proj.weight_global_scale"]
        assert q == 1.0 / stored
    else:
        assert q == tensors["model.layers.0.self_attn.q_proj.weight_scale_2"]


def test_activation_scales_are_left_aside_with_the_reason(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        load(folders["ct-w4a4"], NVFP4())
    assert "10 tensors left aside: scales of activations" in caplog.text


def edited(folder: Path, target: Path, changes: dict[str, Tensor | None], **config: Any) -> Path:
    """A copy of a folder with tensors changed or left out, and entries of its quantisation."""
    target.mkdir()
    tensors = load_file(folder / "model.safetensors") | changes
    save_file(
        {name: t for name, t in tensors.items() if t is not None}, target / "model.safetensors"
    )
    for path in folder.glob("*.json"):
        (target / path.name).write_text(path.read_text())
    raw = json.loads((target / "config.json").read_text())
    raw["quantization_config"] |= config
    (target / "config.json").write_text(json.dumps(raw))
    return target


Q = "model.layers.0.self_attn.q_proj"
NAN, NEGATIVE = (torch.full((64, 4), v).to(torch.float8_e4m3fn) for v in (float("nan"), -1.0))
NO_POWER = torch.full((64, 2), 255, dtype=torch.uint8)
NO_JSON = torch.zeros(8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("ct-nvfp4", {f"{Q}.weight_scale": None}, f"no tensor {Q}.weight_scale"),
        ("ct-nvfp4", {f"{Q}.weight_packed": torch.zeros(64, 16, dtype=torch.uint8)}, "(64, 16)"),
        ("ct-nvfp4", {f"{Q}.weight_packed": torch.zeros(64, 32)}, "torch.float32"),
        ("ct-nvfp4", {f"{Q}.weight_scale": NAN}, "NaN"),
        ("ct-nvfp4", {f"{Q}.weight_scale": NEGATIVE}, "negative"),
        ("ct-mxfp4", {f"{Q}.weight_scale": NO_POWER}, "block_scale"),
        ("modelopt", {f"{Q}.weight_scale_2": torch.ones(2)}, "weight_scale_2"),
        ("modelopt", {f"{Q}.pre_quant_scale": torch.ones(64)}, "pre_quant_scale"),
        ("bnb", {f"{Q}.weight.quant_map": torch.zeros(16)}, "quant_map"),
        ("bnb", {f"{Q}.weight": torch.zeros(64, 1, dtype=torch.uint8)}, "64 bytes"),
        ("bnb", {f"{Q}.weight.quant_state.bitsandbytes__nf4": torch.zeros(8)}, "quant_state"),
        ("bnb", {f"{Q}.weight.quant_state.bitsandbytes__nf4": NO_JSON}, "quant_state"),
        ("bnb", {f"{Q}.weight.absmax": torch.full((64,), float("nan"))}, "absmax holds NaN"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_refused_with_file_and_name(
    kind: str,
    changes: dict[str, Tensor | None],
    words: str,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    folder = edited(has(folders, kind), tmp_path / "model", changes)
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        load(folder, KINDS[kind])
    message = str(raised.value)
    assert Q in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("kind", "format", "words"),
    [
        ("ct-nvfp4", MXFP4(), "quant=mxfp4: some/model holds nvfp4.*set quant=nvfp4"),
        ("ct-mxfp4", NVFP4(), "set quant=mxfp4"),
        ("modelopt", BF16(), "quant=bf16: .* of modelopt.*set quant=nvfp4"),
        ("bnb", NVFP4(), "set quant=nf4"),
        ("bnb", NF4(), "absmax in fp32; set quant.double_quant=false"),
        ("bnb-double", NF4(double_quant=False), "set quant.double_quant=true"),
        ("ct-nvfp4", NVFP4(power_of_two_scale=True), "set quant.power_of_two_scale=false"),
    ],
)
def test_another_format_than_the_checkpoints_is_refused_with_the_override_that_works(
    kind: str, format: Format, words: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(ValueError, match=words):
        load(has(folders, kind), format)


@pytest.mark.parametrize(
    ("kind", "config", "words"),
    [
        ("ct-nvfp4", {"ignore": ["lm_head"]}, "is stored dense, but the config"),
        ("ct-nvfp4", {"ignore": ["re:.*"]}, "is stored packed, but the config"),
        ("ct-nvfp4", {"format": "float-quantized", "config_groups": {}}, "weights in none"),
        ("ct-nvfp4", {"quantization_status": "frozen"}, "quantization_status=frozen"),
        ("ct-nvfp4", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ("ct-nvfp4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ("ct-nvfp4", {"quant_method": "awq"}, "quant_method=awq"),
        ("bnb", {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type=fp4"),
        ("bnb", {"load_in_4bit": False, "_load_in_4bit": False}, "without load_in_4bit"),
        ("bnb", {"llm_int8_skip_modules": ["lm_head"]}, "is stored dense"),
        ("bnb", {"llm_int8_skip_modules": 3}, "of bitsandbytes is not as its library"),
        ("ct-nvfp4", {"config_groups": ["group_0"]}, "of compressed-tensors is not as its library"),
        ("ct-nvfp4", {"config_groups": {"group_0": 4}}, "not as its library.*config.json again"),
        ("ct-nvfp4", {"config_groups": {"group_0": {"weights": {}, "targets": 1}}}, "in none"),
        ("ct-nvfp4", {"ignore": 5}, "not as its library writes it"),
        ("ct-nvfp4", {"ignore": [5]}, r"ignore=\[5\]: a list of names is read"),
        ("ct-nvfp4", {"ignore": "lm_head"}, "ignore='lm_head': a list of names is read"),
        ("ct-nvfp4", {"ignore": ["re:("]}, r"not as its library writes it \(.*missing \)"),
        ("bnb", {"llm_int8_skip_modules": ["("]}, r"not as its library writes it \(.*missing \)"),
        ("ct-nvfp4", {"sparsity_config": "dense"}, "not as its library writes it"),
    ],
)
def test_configs_that_are_not_read_are_refused(
    kind: str, config: dict[str, Any], words: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = edited(folders[kind], tmp_path / "model", {}, **config)
    with pytest.raises(ValueError, match=words):
        load(folder, KINDS[kind])


def test_configs_of_older_releases_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    raw = json.loads((folders["ct-nvfp4"] / "config.json").read_text())["quantization_config"]
    (group,) = raw["config_groups"].values()
    older = {key: value for key, value in group["weights"].items() if "dtype" not in key}
    older |= {"actorder": None, "observer": "minmax", "observer_kwargs": {}}
    changes = {
        "config_groups": {"group_0": {"weights": older, "targets": ["Linear"]}},
        "sparsity_config": {"format": "dense"},
        "transform_config": None,
    }
    folder = edited(folders["ct-nvfp4"], tmp_path / "model", {}, **changes)
    assert load(folder, NVFP4()).base_hash() == load(folders["ct-nvfp4"], NVFP4()).base_hash()


def test_modelopts_own_file_alone_is_enough_and_its_wildcards_count(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = edited(has(folders, "modelopt"), tmp_path / "model", {})
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    own = json.loads((folder / "hf_quant_config.json").read_text())
    own["quantization"]["exclude_modules"] = ["lm_head", "*layers.1.mlp*", "*0.self_attn.k_proj"]
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    assert load(folder, NVFP4()).base_hash() == load(folders["modelopt"], NVFP4()).base_hash()
    own["quantization"]["quant_algo"] = "FP8"
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    with pytest.raises(ValueError, match="quant_algo=FP8"):
        load(folder, NVFP4())


def test_codes_that_are_stored_as_numbers_of_another_dtype_are_the_same_bytes(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """bnb_4bit_quant_storage, which FSDP wants to be that of the other weights."""
    codes = load_file(folders["bnb"] / "model.safetensors")[f"{Q}.weight"]
    changes = {f"{Q}.weight": codes.flatten().view(torch.bfloat16)[:, None]}
    folder = edited(folders["bnb"], tmp_path / "model", changes, bnb_4bit_quant_storage="bfloat16")
    format = KINDS["bnb"]
    assert load(folder, format).base_hash() == load(folders["bnb"], format).base_hash()


def test_a_packed_head_is_held_dense(folders: dict[str, Path], tmp_path: Path) -> None:
    head = load_file(folders["ct-mxfp4"] / "model.safetensors")["lm_head.weight"]
    packed = MXFP4().quantize(head)
    changes = {
        "lm_head.weight": None,
        "lm_head.weight_packed": packed.tensors["codes"],
        "lm_head.weight_scale": packed.tensors["block_scale"],
    }
    folder = edited(folders["ct-mxfp4"], tmp_path / "model", changes)
    policy = load(folder, MXFP4())
    assert torch.equal(policy.decoder.head, packed.dequantize(torch.float32))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"quantization": null}'])
def test_a_config_of_modelopt_that_cannot_be_read_is_refused_with_its_name(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "hf_quant_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: no quantization.*bring the file"):
        modelopt.config_of(tmp_path)


def test_settings_of_modelopt_of_other_types_name_both_files_that_may_hold_them() -> None:
    config = transformers.PretrainedConfig(
        quantization_config={
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "exclude_modules": "a",
        }
    )
    with pytest.raises(ValueError, match=r"config\.json again, or hf_quant_config\.json"):
        read_packing(config)


def test_a_lone_name_is_no_list_of_its_letters() -> None:
    """Else no module would match, and what is dense would be read as packed."""
    with pytest.raises(TypeError, match="exclude_modules='lm_head': a list of names is read"):
        modelopt.read_config({"quant_algo": "NVFP4", "exclude_modules": "lm_head"})
