"""QLoRA rollouts as most people run them, beside ours: same geometry, lengths, GPU and process.

QLoRA: transformers' `generate` over bitsandbytes NF4 linears with double quantisation, adapters by
peft, sdpa attention (arXiv:2305.14314). Ours: the native engine over NVFP4. Random weights on both
sides, completions run to their cap, prefill included.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from qerl.model.random_source import geometry_spec
from qerl.model.spec import LINEARS, ModelSpec
from qerl.quant.nvfp4 import NVFP4
from qerl.rollout.bench import random_policy, random_prompts
from qerl.rollout.native import NativeEngine
from qerl.types import Prompts, Sampling


@dataclass(frozen=True, kw_only=True)
class QloraBench:
    """One row a geometry and batch, with the ratio of the two."""

    geometries: Sequence[str] = ("7b", "14b")
    batches: Sequence[int] = (8, 64)

    group: int = 8
    """Completions of a prompt."""

    rank: int = 32
    prompt: int = 256

    new_tokens: int = 128
    """Tokens of a completion. QLoRA takes some 0.16 s for each of them."""

    layers: int | None = None
    """Decoder layers; None takes all of the geometry."""

    device: str = "cuda"

    def run(self, rows: list[dict[str, Any]]) -> None:
        """Append one row a measurement to `rows`."""
        for geometry in self.geometries:
            spec = geometry_spec(geometry, self.layers)
            found: list[dict[str, Any]] = [
                {"section": "qlora", "geometry": geometry, "batch": batch} for batch in self.batches
            ]
            model = qlora_model(spec, self.rank, self.device)
            for row in found:
                row["qlora_tok_per_s"] = self._qlora(model, spec, row["batch"])
            del model
            self._empty()
            policy = random_policy(spec, NVFP4(), self.rank, device=self.device)
            for row in found:
                row["qerl_tok_per_s"] = self._ours(policy, row["batch"])
                row["ratio"] = round(row["qerl_tok_per_s"] / row["qlora_tok_per_s"], 2)
            del policy
            self._empty()
            rows += found

    def _qlora(self, model: Any, spec: ModelSpec, batch: int) -> float:
        prompts = self._prompts(spec, batch)
        ids = torch.tensor(prompts.tokens, device=self.device).repeat_interleave(self.group, 0)
        self._generate(model, ids, 4)
        seconds = self._timed(lambda: self._generate(model, ids, self.new_tokens))
        return round(batch * self.new_tokens / seconds, 1)

    @torch.no_grad()
    def _generate(self, model: Any, ids: Tensor, new_tokens: int) -> None:
        drawing = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        length = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        settings = GenerationConfig.from_dict(drawing | length | {"pad_token_id": 0})
        drawn = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )
        assert drawn.shape[1] == ids.shape[1] + new_tokens, "a completion ended before its cap"

    def _ours(self, policy: Any, batch: int) -> float:
        engine = NativeEngine(policy, max_sequences=batch, kv_budget_gib=40.0, graphs=None)
        prompts = self._prompts(policy.spec, batch)
        sampling = Sampling(group_size=self.group, max_new_tokens=self.new_tokens, ignore_eos=True)
        seconds = 0.0
        for step in range(2):  # the first compiles and captures
            seconds = self._timed(
                lambda step=step: engine.generate(prompts, sampling, seed=0, rollout_step=step)
            )
        engine.release()
        return round(batch * self.new_tokens / seconds, 1)

    def _prompts(self, spec: ModelSpec, batch: int) -> Prompts:
        return random_prompts(batch // self.group, self.prompt, spec.vocab_size)

    def _timed(self, call: Any) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def _empty(self) -> None:
        if self.device == "cuda":
            torch.cuda.empty_cache()


def qlora_model(spec: ModelSpec, rank: int, device: str) -> Any:
    """A transformers model of random weights whose linears are NF4, with peft adapters that act."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    auto: Any = AutoModelForCausalLM
    with torch.device(device):
        model = auto.from_config(spec.to_hf_config(), dtype=dtype, attn_implementation="sdpa")
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in LINEARS:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], _nf4(module, dtype, device))
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=list(LINEARS), init_lora_weights=False
    )
    return get_peft_model(model, config).eval()


def _nf4(linear: nn.Linear, dtype: torch.dtype, device: str) -> nn.Module:
    bnb: Any = import_module("bitsandbytes.nn")
    packed: nn.Module = bnb.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=dtype,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    packed.weight = bnb.Params4bit(
        linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
    )
    packed.bias = linear.bias
    return packed.to(device)
