"""Tokens per second of whole rollouts, on random weights in the true geometry of a model.

Weights, adapters and prompts are random and the completions run to their cap, so a number is the
engine's and nothing else's: prefill, decode steps, draws and the host's part, capture included.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qerl.kernels.bench import precompile
from qerl.kernels.tiles import plan_for
from qerl.kernels.timing import shapes
from qerl.model.linear import LoRAConfig
from qerl.model.load import load_policy
from qerl.model.policy import Policy
from qerl.model.random_source import RandomSource, geometry_spec
from qerl.model.spec import ModelSpec
from qerl.quant.bf16 import BF16
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format
from qerl.rollout.native import NativeEngine
from qerl.types import Prompts, Sampling

_FORMATS: dict[str, Format] = {"nvfp4": NVFP4(), "bf16": BF16()}


def random_policy(spec: ModelSpec, format: Format, rank: int) -> Policy:
    """A policy on the GPU with random weights and adapters that do something."""
    lora = LoRAConfig(rank=rank, alpha=2 * rank) if rank else None
    source = RandomSource(spec, "cuda")
    policy = load_policy(source, format, lora, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for adapter in policy.adapters().values():
            adapter.lora_b.normal_(std=0.01)
    return policy


def random_prompts(count: int, tokens: int, vocabulary: int) -> Prompts:
    """`count` prompts without a common beginning."""
    ids: list[list[int]] = torch.randint(1, vocabulary, (count, tokens)).tolist()
    return Prompts(
        ids=tuple(f"bench/{i}" for i in range(count)),
        questions=("",) * count,
        tokens=tuple(map(tuple, ids)),
        golds=("",) * count,
    )


@dataclass(frozen=True, kw_only=True)
class RolloutBench:
    """Whole rollouts of B sequences, each after a prompt of its own."""

    geometries: Sequence[str] = ("7b",)
    """Keys of `timing.GEOMETRIES`."""

    formats: Sequence[str] = ("nvfp4", "bf16")

    batches: Sequence[int] = (8, 32, 64, 128, 256)
    """Sequences that run together."""

    group: int = 1
    """Completions of a prompt; divides every batch."""

    rank: int = 32
    """LoRA rank on all linears; 0 for none."""

    prompt: int = 256
    """Tokens of a prompt."""

    new_tokens: int = 512
    """Tokens of a completion."""

    kv_budget_gib: float = 40.0

    def run(self, rows: list[dict[str, Any]]) -> None:
        """Append one row a measurement to `rows`; raises where graphs and eager steps differ."""
        if "nvfp4" in self.formats:
            linears = [s for geometry in self.geometries for s in shapes(geometry).values()]
            precompile(plan_for("NVIDIA H200", s, b) for s in linears for b in self.batches)
        rows.append(self._check())
        for geometry in self.geometries:
            for name in self.formats:
                self._format(geometry, name, rows)
                torch.cuda.empty_cache()

    def _format(self, geometry: str, name: str, rows: list[dict[str, Any]]) -> None:
        started = time.perf_counter()
        policy = random_policy(geometry_spec(geometry), _FORMATS[name], self.rank)
        torch.cuda.synchronize()
        load_s = time.perf_counter() - started
        for batch in self.batches:
            torch.cuda.reset_peak_memory_stats()
            row = {"section": "rollout", "geometry": geometry, "format": name, "batch": batch}
            row |= {"rank": self.rank, "group": self.group, "load_s": round(load_s, 2)}
            rows.append(row | self._measure(policy, batch))

    def _measure(self, policy: Policy, batch: int) -> dict[str, float]:
        """Calls of 8 tokens (compiles, captures), of 1 (prefill alone) and of all of them."""
        engine = NativeEngine(
            policy, max_sequences=batch, kv_budget_gib=self.kv_budget_gib, graphs=True
        )
        count = batch // self.group
        prompts = random_prompts(count, self.prompt, policy.spec.vocab_size)
        seconds = []
        for step, cap in enumerate((8, 1, self.new_tokens)):
            sampling = Sampling(group_size=self.group, max_new_tokens=cap, ignore_eos=True)
            engine.generate(prompts, sampling, seed=0, rollout_step=step)
            assert engine.stats is not None
            seconds.append(engine.stats.seconds)
        first, prefill, whole = seconds
        peak = torch.cuda.max_memory_allocated() / 2**30
        engine.release()
        return {
            "tok_per_s": round(batch * self.new_tokens / whole, 1),
            "seconds": round(whole, 3),
            "prefill_s": round(prefill, 3),
            "step_ms": round(1e3 * (whole - prefill) / (self.new_tokens - 1), 3),
            "first_call_s": round(first, 2),
            "peak_gib": round(peak, 2),
        }

    def _check(self) -> dict[str, Any]:
        """Greedy completions by graphs and by eager steps on two layers of 3B."""
        policy = random_policy(geometry_spec("3b", layers=2), _FORMATS["nvfp4"], 32)
        prompts = random_prompts(16, 40, policy.spec.vocab_size)
        sampling = Sampling(group_size=1, max_new_tokens=64, temperature=0.0, ignore_eos=True)
        graphs, eager = (
            NativeEngine(policy, max_sequences=16, graphs=how).generate(
                prompts, sampling, seed=0, rollout_step=0
            )
            for how in (True, False)
        )
        same = graphs.completions == eager.completions  # [B, C]
        before = same.cumprod(1).bool()  # tokens up to the first that differs
        gap = (graphs.sampler_logprobs - eager.sampler_logprobs)[before].abs()
        equal, apart = _mean(before.float()), _mean(gap)
        row = {"section": "check", "equal_tokens": equal, "logprob_gap_nats": apart}
        # bf16 rounds activations at 2^-9; a near tie may go either way.
        if not equal > 0.5 or not apart < 0.02:
            raise ValueError(f"graphs and eager steps disagree: {row}; no time counts")
        return row


def _mean(x: Tensor) -> float:
    return float(x.mean())
