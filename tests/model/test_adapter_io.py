import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config

from qerl.model.adapter_io import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    load_peft,
    read_lora,
    read_peft,
    save_peft,
)
from qerl.model.attention import ForestAttend
from qerl.model.linear import LoRAConfig
from qerl.model.load import load_policy
from qerl.model.policy import Policy
from qerl.model.source import Toy
from qerl.quant.bf16 import BF16
from qerl.types import Segment

TOKENS = torch.arange(3, 43)


def logits(policy: Policy) -> Tensor:
    attend = ForestAttend([Segment(start=0, length=len(TOKENS), parent=None)])
    with torch.no_grad():
        hidden = policy.decoder(TOKENS, torch.arange(len(TOKENS)), attend)
        return policy.decoder.logits(hidden)


def make_policy(**settings: Any) -> Policy:
    policy = load_policy(Toy(), BF16(), LoRAConfig(**({"rank": 4, "alpha": 8} | settings)))
    for adapter in policy.adapters().values():
        adapter.lora_b.data.normal_(std=0.1)
    return policy


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], None], ids=["two", "all"])
def test_our_adapter_computes_the_same_in_peft(
    targets: list[str] | None,
    hf_model: Callable[..., PreTrainedModel],
    source_of: Callable[..., Any],
    tmp_path: Path,
) -> None:
    model = hf_model(Qwen3Config, head_dim=32)
    chosen = {} if targets is None else {"targets": targets}
    policy = load_policy(source_of(model), BF16(), LoRAConfig(rank=4, alpha=12, **chosen))
    for adapter in policy.adapters().values():
        adapter.lora_b.data.normal_(std=0.1)
    save_peft(policy, tmp_path / "adapter", "tiny/model")
    with torch.no_grad():
        base = model(TOKENS[None]).logits[0]
        wanted = PeftModel.from_pretrained(model, tmp_path / "adapter")(TOKENS[None]).logits[0]
    assert (logits(policy) - wanted).abs().max() < 1e-4
    assert (base - wanted).abs().max() > 0.05


def test_an_adapter_made_by_peft_computes_the_same_here(
    hf_model: Callable[..., PreTrainedModel], source_of: Callable[..., Any], tmp_path: Path
) -> None:
    model = hf_model(Qwen3Config, head_dim=32)
    policy = load_policy(source_of(model), BF16(), LoRAConfig(rank=8, alpha=16))
    base = logits(policy)
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=list(policy.lora.targets),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    peft = get_peft_model(model, config).eval()
    peft.save_pretrained(tmp_path)
    load_peft(policy, tmp_path)
    with torch.no_grad():
        wanted = peft(TOKENS[None]).logits[0]
    assert (logits(policy) - wanted).abs().max() < 1e-4
    assert (base - wanted).abs().max() > 0.05


def test_the_files_are_those_of_peft(tmp_path: Path) -> None:
    policy = make_policy()
    save_peft(policy, tmp_path / "ours", "Qwen/base")
    written = {path.name for path in (tmp_path / "ours").iterdir()}
    assert written == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "Qwen/base"
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    tensors = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 2
    a = tensors["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"]
    assert torch.equal(a, policy.adapter_state()["layers.1.up_proj.lora_a"])


def test_a_saved_adapter_comes_back_and_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    first, second = make_policy(), make_policy()
    folder = tmp_path / "adapter"
    save_peft(first, folder, "toy")
    save_peft(second, folder, "toy")
    back = make_policy()
    load_peft(back, folder)
    assert torch.equal(logits(back), logits(second))
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]  # nothing unfinished is left


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": 8}, "r=8, the policy has 4"),
        ({"lora_alpha": 4}, "lora_alpha=4, the policy has 8"),
        ({"use_dora": True}, "use_dora=True"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias=all"),
        ({"peft_type": "IA3"}, "peft_type=IA3"),
    ],
)
def test_an_adapter_that_computes_something_else_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save_peft(make_policy(), tmp_path, "toy")
    edit(tmp_path, **changes)
    policy = make_policy()
    before = policy.adapter_state()
    with pytest.raises(ValueError, match=words):
        load_peft(policy, tmp_path)
    assert all(torch.equal(m, before[name]) for name, m in policy.adapter_state().items())


def test_an_adapter_for_other_targets_is_refused(tmp_path: Path) -> None:
    save_peft(make_policy(targets=["q_proj"]), tmp_path, "toy")
    with pytest.raises(ValueError, match=r"24 missing"):
        load_peft(make_policy(), tmp_path)
    save_peft(make_policy(), tmp_path, "toy")
    with pytest.raises(ValueError, match=r"24 unknown"):
        load_peft(make_policy(targets=["q_proj"]), tmp_path)


def test_a_policy_without_adapters_neither_saves_nor_loads(tmp_path: Path) -> None:
    bare = load_policy(Toy(), BF16(), None)
    with pytest.raises(ValueError, match="nothing to save"):
        save_peft(bare, tmp_path / "a", "toy")
    save_peft(make_policy(), tmp_path / "b", "toy")
    with pytest.raises(ValueError, match="no adapters"):
        load_peft(bare, tmp_path / "b")


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no adapter_config.json"):
        load_peft(make_policy(), tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "no JSON object"),
        ("{}", "no r, lora_alpha, target_modules"),
        ('{"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}', "target_modules=all-linear"),
    ],
)
def test_settings_that_cannot_be_read_are_refused_with_their_file(
    tmp_path: Path, config: str, words: str
) -> None:
    (tmp_path / CONFIG_FILE).write_text(config)
    save_file({}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ValueError, match=rf"{CONFIG_FILE}: {words}"):
        read_lora(tmp_path)


def test_matrices_that_are_cut_off_are_refused_with_their_file(tmp_path: Path) -> None:
    save_peft(load_policy(Toy(), BF16(), LoRAConfig(rank=4, alpha=8)), tmp_path, "toy")
    file = tmp_path / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{WEIGHTS_FILE}: .*; bring the file again"):
        read_peft(tmp_path)
