"""Exports against the libraries that own their formats, and against the policy they come from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import decompress_module
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from qerl.build.export import export
from qerl.convert import export as room
from qerl.model import compressed
from qerl.model.adapter_io import load_peft, read_peft, save_peft
from qerl.model.attention import ForestAttend
from qerl.model.linear import LoRAConfig
from qerl.model.load import load_policy
from qerl.model.policy import Policy
from qerl.model.source import Folder
from qerl.quant.bf16 import BF16
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format
from qerl.types import Segment

CONF = Path(__file__).parent.parent.parent / "conf"
TOKENS = torch.arange(3, 30)
TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")
NVFP4_EXACT = "{_target_: qerl.quant.nvfp4.NVFP4, power_of_two_scale: true}"


@pytest.fixture
def run(checkpoint: Path, tmp_path: Path) -> Callable[..., tuple[Path, Policy]]:
    """`run(quant, format)`: a run folder with a trained adapter, and the policy that it left."""

    def make(
        quant: str, format: Format, scale: float = 0.02, folder: Path = checkpoint
    ) -> tuple[Path, Policy]:
        lora = LoRAConfig(rank=4, alpha=8, targets=TARGETS)
        policy = load_policy(Folder(folder, "small"), format, lora)
        for adapter in policy.adapters().values():
            torch.nn.init.normal_(adapter.lora_b, std=scale)
        target = tmp_path / "run"
        save_peft(policy, target / "adapter", "small")
        source = {"_target_": "qerl.model.source.HuggingFace", "id": "small", "path": str(folder)}
        config = {"model": {"name": "small", "source": source}, "quant": OmegaConf.create(quant)}
        OmegaConf.save(OmegaConf.create(config), target / "config.yaml")
        return target, policy

    return make


def told(**settings: Any) -> str:
    """What an export says."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        plain = {"trainer": "cpu", "shard_gb": 0.0001}
        overrides = [f"{key}={value}" for key, value in (plain | settings).items()]
        return export(compose("export", overrides))


@torch.no_grad()
def logits(policy: Policy) -> Tensor:
    attend = ForestAttend([Segment(start=0, length=len(TOKENS), parent=None)])
    return policy.decoder.logits(policy.decoder(TOKENS, torch.arange(len(TOKENS)), attend))


def close(model: PreTrainedModel, policy: Policy, bound: float = 1e-4) -> bool:
    with torch.no_grad():
        wanted = model(TOKENS[None]).logits[0]
    return bool((logits(policy) - wanted).abs().max() <= bound * wanted.abs().max())


def in_transformers(folder: Path) -> PreTrainedModel:
    """The folder as transformers loads it, its linears unpacked, computing in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            decompress_module(module)
    for hook in list(model._forward_pre_hooks):
        model._forward_pre_hooks.pop(hook)
    return torch.nn.Module.float(model)


@pytest.mark.parametrize(
    ("quant", "format"),
    [
        ("{_target_: qerl.quant.nvfp4.NVFP4}", NVFP4()),
        ("{_target_: qerl.quant.nvfp4.NVFP4, method: mse}", NVFP4(method="mse")),
        ("{_target_: qerl.quant.mxfp4.MXFP4}", MXFP4()),
    ],
)
def test_the_base_has_the_bytes_that_were_trained_on(
    quant: str, format: Format, run: Callable[..., Any], tmp_path: Path
) -> None:
    folder, policy = run(quant, format)
    assert "G weights" in told(run=folder, what="base", out=tmp_path / "base")
    again = load_policy(Folder(tmp_path / "base"), format, None)
    assert again.base_hash() == policy.base_hash()


def test_base_and_adapter_are_the_policy_in_transformers_and_peft(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    folder, policy = run(NVFP4_EXACT, NVFP4(power_of_two_scale=True))
    told(run=folder, what="base", out=tmp_path / "base")
    told(run=folder, what="adapter", out=tmp_path / "adapter")
    base = in_transformers(tmp_path / "base")
    with policy.reference():
        assert close(base, policy)
    assert not close(base, policy)
    del base.hf_quantizer, base.config.quantization_config  # unpacked: plain linears
    base.is_quantized = False
    assert close(PeftModel.from_pretrained(base, tmp_path / "adapter"), policy)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "small"


def test_merged_weights_are_the_sum_rounded_once(run: Callable[..., Any], tmp_path: Path) -> None:
    folder, policy = run("{_target_: qerl.quant.nvfp4.NVFP4}", NVFP4())
    text = told(run=folder, what="merged", out=tmp_path / "merged")
    assert "merging rounds to bf16" in text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not hasattr(model.config, "quantization_config")
    assert model.config.dtype == torch.float32
    adapters = policy.adapters()
    moved = 0
    for name, linear in policy.linears().items():
        layer, _, short = name.rpartition(".")
        block = "mlp" if short in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        got = model.get_submodule(f"model.{layer}.{block}.{short}").weight
        wanted = linear.packed.dequantize(torch.float32)
        if name in adapters:
            adapter = adapters[name]
            wanted = wanted + adapter.scale * (adapter.lora_b @ adapter.lora_a)
            moved += 1
        assert torch.equal(got, wanted.bfloat16().float()), name
    assert moved == 3 * len(TARGETS)
    assert close(model, policy, bound=2e-2)  # 2^-9 of each weight
    assert close(model, load_policy(Folder(tmp_path / "merged"), BF16(), None))


def test_what_rounding_takes_from_the_update_is_measured(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    shares = {}
    for scale in (1e-6, 1.0):
        folder, _ = run("{_target_: qerl.quant.nvfp4.NVFP4}", NVFP4(), scale)
        told(run=folder, what="merged", out=tmp_path / f"merged{scale}")
        report = json.loads((tmp_path / f"merged{scale}" / "quantization_report.json").read_text())
        rows = report["rows"]
        assert len(rows) == 3 * len(TARGETS)
        shares[scale] = room.lost(rows)
    assert shares[1e-6][0] > 10  # noise: the update is far below a step of bf16
    assert shares[1e-6][1] > 0.9  # all but those at zero, where every step is small
    assert shares[1.0][0] < 0.01
    assert shares[1.0][1] < 0.01


def test_an_adapter_of_zeros_merges_into_the_base(run: Callable[..., Any], tmp_path: Path) -> None:
    folder, policy = run("{_target_: qerl.quant.nvfp4.NVFP4}", NVFP4(), 0.0)
    assert "the adapter is zero" in told(run=folder, what="merged", out=tmp_path / "merged")
    merged = load_policy(Folder(tmp_path / "merged"), BF16(), None).linears()
    for name, linear in policy.linears().items():
        wanted = linear.packed.dequantize(torch.bfloat16)
        assert torch.equal(merged[name].packed.dequantize(torch.bfloat16), wanted)


@pytest.fixture
def packed(checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint packed by others: scales of their own, some linears dense."""
    folder = tmp_path / "packed"
    folder.mkdir()
    source, tensors = Folder(checkpoint), {}
    weights = source.weights()
    for name in weights.names():
        if "_proj.weight" not in name or "layers.1.mlp" in name:
            tensors[name] = weights.get(name)
            continue
        for inner, tensor in compressed.stored(NVFP4().quantize(weights.get(name))).items():
            tensors[name.removesuffix("weight") + inner] = tensor
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = ["Qwen2ForCausalLM"]
    config["quantization_config"] = compressed.quantization_config(
        NVFP4(), ["lm_head", "re:.*layers.1.mlp.*"]
    )
    (folder / "config.json").write_text(json.dumps(config))
    source.tokenizer().save_pretrained(folder)
    return folder


def test_a_run_on_a_packed_folder_exports_too(
    run: Callable[..., Any], packed: Path, tmp_path: Path
) -> None:
    folder, policy = run("{_target_: qerl.quant.nvfp4.NVFP4}", NVFP4(), folder=packed)
    assert "as compressed-tensors has them" in told(run=folder, what="base", out=tmp_path / "base")
    mine, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / "base", packed))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[n].view(torch.uint8), theirs[n].view(torch.uint8)) for n in mine)
    told(run=folder, what="merged", out=tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert close(model, policy, bound=2e-2)
    told(run=folder, what="adapter", out=tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(packed)


def test_a_merge_that_was_stopped_leaves_nothing_and_goes_on(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = run("{_target_: qerl.quant.nvfp4.NVFP4}", NVFP4())
    told(run=folder, what="merged", out=tmp_path / "whole")
    merge = room.Merge.quantize

    def stop(self: Any, layer: Any, *rest: Any) -> Any:
        if layer.index == 1:
            raise KeyboardInterrupt
        return merge(self, layer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(room.Merge, "quantize", stop)
        with pytest.raises(KeyboardInterrupt):
            told(run=folder, what="merged", out=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    told(run=folder, what="merged", out=tmp_path / "merged")
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert names == {path.name for path in (tmp_path / "merged").iterdir()}
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "merged" / name).read_bytes()


def test_what_cannot_be_exported_is_one_line(
    run: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    folder, _ = run("{_target_: qerl.quant.bf16.BF16}", BF16())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"run": folder, "what": "all", "out": "x"}, "what=all: one of"),
        ({"run": folder}, "out=null"),
        ({"out": "x"}, "run=null"),
        ({"run": tmp_path, "out": "x"}, "no config.yaml"),
        ({"run": folder, "out": "x", "adapter": tmp_path}, "no adapter_config.json"),
        ({"run": folder, "what": "base", "out": tmp_path / "x"}, "quant=bf16"),
        ({"run": folder, "what": "adapter", "out": tmp_path}, "exists"),
        ({"run": folder, "out": tmp_path}, "exists"),
    ]
    for settings, words in cases:
        with pytest.raises(ValueError, match=words) as raised:
            told(**settings)
        assert "\n" not in str(raised.value)
    assert not list(tmp_path.glob("*.partial"))


def test_an_adapter_of_another_model_is_refused_by_matrix(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    folder, _ = run("{_target_: qerl.quant.bf16.BF16}", BF16())
    file = folder / "adapter" / "adapter_model.safetensors"
    matrices = load_file(file)
    name = next(n for n in matrices if "layers.1.self_attn.q_proj.lora_A" in n)
    for wrong, words in ((torch.zeros(4, 8), r"\(4, 8\)"), (matrices[name] / 0, "NaN")):
        save_file(matrices | {name: wrong}, file, metadata={"format": "pt"})
        for what in ("adapter", "merged"):
            with pytest.raises(ValueError, match=rf"layers.1.q_proj.lora_a.* {words}"):
                told(run=folder, what=what, out=tmp_path / "x")


def test_a_saved_adapter_is_read_and_written_as_it_is(
    run: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    folder, policy = run("{_target_: qerl.quant.nvfp4.NVFP4}", NVFP4())
    told(run=folder, what="adapter", out=tmp_path / "adapter")
    lora, matrices = read_peft(tmp_path / "adapter")
    assert set(lora.targets) == set(TARGETS)
    assert all(torch.equal(m, policy.adapter_state()[n]) for n, m in matrices.items())
    other = load_policy(Folder(checkpoint), NVFP4(), LoRAConfig(rank=4, alpha=8, targets=TARGETS))
    load_peft(other, tmp_path / "adapter")
    assert torch.equal(logits(other), logits(policy))
