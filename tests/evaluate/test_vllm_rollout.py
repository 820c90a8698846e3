"""The rollout bench of vLLM writes what vLLM reads, and counts what it draws."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from peft import PeftConfig
from safetensors.torch import load_file
from transformers import AutoConfig

from qerl.evaluate import vllm_rollout
from qerl.evaluate.vllm_rollout import VllmRolloutBench, measure


class FakeLLM:
    def __init__(self, model: str, **options: Any) -> None:
        assert options["load_format"] == "dummy"
        assert options["max_lora_rank"] == 8

    def generate(
        self, asked: list[Any], sampling: Any, *, lora_request: Any, use_tqdm: bool
    ) -> list[Any]:
        assert Path(lora_request.path, "adapter_model.safetensors").is_file()
        assert len({tuple(one["prompt_token_ids"]) for one in asked}) == len(asked) // 2
        drawn = SimpleNamespace(token_ids=list(range(sampling.max_tokens)))
        return [SimpleNamespace(outputs=[drawn]) for _ in asked]


@pytest.fixture
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, lora, request = ModuleType("vllm"), ModuleType("vllm.lora"), ModuleType("request")
    fake.LLM = FakeLLM  # type: ignore[attr-defined]
    fake.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    request.LoRARequest = (  # type: ignore[attr-defined]
        lambda name, number, path: SimpleNamespace(name=name, number=number, path=path)
    )
    for name, module in (("vllm", fake), ("vllm.lora", lora), ("vllm.lora.request", request)):
        monkeypatch.setitem(sys.modules, name, module)


def bench(tmp_path: Path) -> VllmRolloutBench:
    return VllmRolloutBench(
        geometries=("3b",), batches=(4,), group=2, rank=8, prompt=6, new_tokens=5, layers=1,
        folder=str(tmp_path),
    )  # fmt: skip


@pytest.mark.usefixtures("_vllm")
@pytest.mark.parametrize("name", ["nvfp4", "bf16"])
def test_config_adapter_and_rows_are_what_both_sides_expect(tmp_path: Path, name: str) -> None:
    model, adapter = bench(tmp_path)._write("3b", name)
    config = AutoConfig.from_pretrained(model)
    assert (config.hidden_size, config.num_hidden_layers) == (2048, 1)
    packed = json.loads((model / "config.json").read_text()).get("quantization_config")
    assert (packed is None) == (name == "bf16")
    assert PeftConfig.from_pretrained(str(adapter)).r == 8
    assert len(load_file(adapter / "adapter_model.safetensors")) == 14
    (row,) = measure(model, adapter, vllm_rollout.asdict(bench(tmp_path)))
    assert row["batch"] == 4
    assert row["tok_per_s"] > 0
