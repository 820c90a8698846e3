"""Rollouts by vLLM on the lengths of `bench=rollout`, in the same geometry, with random weights.

vLLM fills the weights itself (``load_format=dummy``), compiles and captures; NVFP4 goes through its
kernel for 4-bit weights (Marlin on Hopper), adapters through its LoRA path. Each format has a
process of its own, so that nothing of one is left when the next begins.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qerl.model import compressed
from qerl.model.adapter_io import write_peft
from qerl.model.linear import LoRAConfig
from qerl.model.random_source import geometry_spec
from qerl.model.spec import ModelSpec
from qerl.quant.bf16 import BF16
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format

_FORMATS: dict[str, Format] = {"nvfp4": NVFP4(), "mxfp4": MXFP4(), "bf16": BF16()}


@dataclass(frozen=True, kw_only=True)
class VllmRolloutBench:
    """One row a format and batch, named as `bench=rollout` names its own."""

    geometries: Sequence[str] = ("7b",)
    formats: Sequence[str] = ("nvfp4", "bf16")
    batches: Sequence[int] = (8, 32, 64, 128)

    group: int = 8
    """Completions of a prompt; vLLM caches the prompt's keys and values."""

    rank: int = 32
    prompt: int = 256
    new_tokens: int = 512

    layers: int | None = None
    """Decoder layers; None takes all of the geometry."""

    folder: str = "out/bench/vllm_rollout"
    """Where config and adapter are written; they stay there."""

    memory_share: float = 0.9
    """Of the GPU, for vLLM."""

    def run(self, rows: list[dict[str, Any]]) -> None:
        """Append one row a measurement to `rows`."""
        context = multiprocessing.get_context("spawn")
        for geometry in self.geometries:
            for name in self.formats:
                model, adapter = self._write(geometry, name)
                with ProcessPoolExecutor(1, mp_context=context) as pool:
                    found = pool.submit(measure, model, adapter, asdict(self)).result()
                row = {"section": "rollout", "engine": "vllm", "geometry": geometry}
                rows += [row | {"format": name, "rank": self.rank} | more for more in found]

    def _write(self, geometry: str, name: str) -> tuple[Path, Path]:
        """Folders with the config of the model, and with an adapter of random A and zero B."""
        spec = geometry_spec(geometry, self.layers)
        model = Path(self.folder) / f"{geometry}-{name}"
        model.mkdir(parents=True, exist_ok=True)
        spec.to_hf_config().save_pretrained(model)
        if name != "bf16":
            path = model / "config.json"
            packed = compressed.quantization_config(_FORMATS[name], ["lm_head"])
            settings = json.loads(path.read_text()) | {"quantization_config": packed}
            path.write_text(json.dumps(settings, indent=1))
        adapter = Path(self.folder) / f"{geometry}-adapter"
        write_adapter(spec, self.rank, adapter)
        return model, adapter


def write_adapter(spec: ModelSpec, rank: int, folder: Path) -> None:
    """An adapter on all linears in the format of peft."""
    state = {}
    for layer in range(spec.layers):
        for name, (n, k) in spec.linear_shapes().items():
            state[f"layers.{layer}.{name}.lora_a"] = torch.randn(rank, k) * 0.01
            state[f"layers.{layer}.{name}.lora_b"] = torch.zeros(n, rank)
    write_peft(LoRAConfig(rank=rank, alpha=2 * rank), state, folder, "random")


def measure(model: Path, adapter: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Tokens per second of each batch, in a process of its own."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # errors come with their cause
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    try:
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest
    except ImportError as error:
        raise ValueError(f"vllm is not installed ({error}): pip install qerl[vllm]") from None
    started = time.perf_counter()
    engine = LLM(
        str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        gpu_memory_utilization=settings["memory_share"],
        max_num_seqs=max(settings["batches"]),
        enable_prefix_caching=True,
        enable_lora=True,
        max_lora_rank=settings["rank"],
        max_loras=1,
    )
    start_s = time.perf_counter() - started
    lora = LoRARequest("bench", 1, str(adapter))
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]

    def seconds(batch: int, new_tokens: int, seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        count, length = batch // settings["group"], settings["prompt"]
        ids = torch.randint(10, vocabulary - 10, (count, length), generator=generator).tolist()
        asked = [{"prompt_token_ids": ids[i // settings["group"]]} for i in range(batch)]
        sampling = SamplingParams(
            temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        begun = time.perf_counter()
        answers = engine.generate(asked, sampling, lora_request=lora, use_tqdm=False)
        taken = time.perf_counter() - begun
        assert all(len(answer.outputs[0].token_ids) == new_tokens for answer in answers)
        return taken

    rows = []
    new = settings["new_tokens"]
    for batch in settings["batches"]:
        seconds(batch, 8, 1)
        whole, prefill = seconds(batch, new, 2), seconds(batch, 1, 3)
        rows.append(
            {
                "batch": batch,
                "group": settings["group"],
                "tok_per_s": round(batch * new / whole, 1),
                "seconds": round(whole, 3),
                "prefill_s": round(prefill, 3),
                "step_ms": round(1e3 * (whole - prefill) / (new - 1), 3),
                "start_s": round(start_s, 1),
            }
        )
    return rows
