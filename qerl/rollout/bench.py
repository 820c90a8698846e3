"""Tokens per second of whole rollouts, on random weights in the true geometry of a model.

Weights, adapters and prompts are random and the completions run to their cap, so a number is the
engine's and nothing else's: prefill, decode steps, draws and the host's part, capture included.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qerl.kernels.bench import precompile
from qerl.kernels.tiles import plan_for
from qerl.kernels.timing import shapes
from qerl.model.linear import LoRAConfig
from qerl.model.load import load_policy
from qerl.model.policy import Policy
from qerl.model.random_source import RandomSource, geometry_spec
from qerl.model.spec import ModelSpec
from qerl.quant.bf16 import BF16
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format
from qerl.rollout.native import NativeEngine
from qerl.rollout.parity import Gap, policy_logprobs, sampler_logprobs
from qerl.rollout.roofline import floor_tok_per_s
from qerl.types import Prompts, Sampling

_FORMATS: dict[str, Format] = {"nvfp4": NVFP4(), "mxfp4": MXFP4(), "bf16": BF16()}


def random_policy(
    spec: ModelSpec,
    format: Format,
    rank: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> Policy:
    """A policy with random weights and adapters that act; the same each time."""
    lora = LoRAConfig(rank=rank, alpha=2 * rank) if rank else None
    source = RandomSource(spec, device)
    policy = load_policy(source, format, lora, device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for adapter in policy.adapters().values():
            adapter.lora_b.normal_(std=0.01, generator=generator)
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
    """Whole rollouts of B sequences, in groups that share a prompt."""

    geometries: Sequence[str] = ("7b",)
    """Keys of `timing.GEOMETRIES`."""

    formats: Sequence[str] = ("nvfp4", "bf16")

    batches: Sequence[int] = (8, 32, 64, 128, 256)
    """Sequences that run together."""

    group: int = 8
    """Completions of a prompt; divides every batch."""

    rank: int = 32
    """LoRA rank on all linears; 0 for none."""

    prompt: int = 256
    """Tokens of a prompt."""

    new_tokens: int = 512
    """Tokens of a completion."""

    kv_budget_gib: float = 40.0

    def run(self, rows: list[dict[str, Any]]) -> None:
        """Append one row a measurement to `rows`; raises where the captured steps are wrong."""
        if {"nvfp4", "mxfp4"} & set(self.formats):
            linears = [s for geometry in self.geometries for s in shapes(geometry).values()]
            plans = [plan_for("NVIDIA H200", s, b) for s in linears for b in self.batches]
            precompile(plans, self.rank)
        rows += [self._check(name) for name in self.formats]
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
            sizes = {"group": self.group, "prompt": self.prompt, "rank": self.rank}
            bits = _FORMATS[name].bits_per_weight
            floor = floor_tok_per_s(policy.spec, bits, rows=batch, new=self.new_tokens, **sizes)
            rows.append(row | self._measure(policy, batch) | {"floor_tok_per_s": round(floor)})

    def _measure(self, policy: Policy, batch: int) -> dict[str, float]:
        """Calls of 8 tokens (compiles), of all (captures), of 1 (prefill alone), of all again."""
        engine = NativeEngine(
            policy, max_sequences=batch, kv_budget_gib=self.kv_budget_gib, graphs=True
        )
        count = batch // self.group
        prompts = random_prompts(count, self.prompt, policy.spec.vocab_size)
        seconds = []
        for step, cap in enumerate((8, self.new_tokens, 1, self.new_tokens)):
            sampling = Sampling(group_size=self.group, max_new_tokens=cap, ignore_eos=True)
            engine.generate(prompts, sampling, seed=0, rollout_step=step)
            assert engine.stats is not None
            seconds.append(engine.stats.seconds)
        first, capturing, prefill, whole = seconds
        peak = torch.cuda.max_memory_allocated() / 2**30
        engine.release()
        return {
            "tok_per_s": round(batch * self.new_tokens / whole, 1),
            "seconds": round(whole, 3),
            "prefill_s": round(prefill, 3),
            "step_ms": round(1e3 * (whole - prefill) / (self.new_tokens - 1), 3),
            "first_call_s": round(first, 2),
            "capture_s": round(capturing - whole, 2),
            "peak_gib": round(peak, 2),
        }

    def _check(self, name: str) -> dict[str, Any]:
        """Captured steps and the policy's own bf16 forward, both against the policy in fp32.

        Two random layers of 3B. The rounding of activations to bf16 moves log-probabilities of
        such a model by some hundredths of a nat; captured steps must not be further from the truth
        than the forward that the trainer runs.
        """
        spec, format = geometry_spec("3b", layers=2), _FORMATS[name]
        policy, exact = (
            random_policy(spec, format, self.rank, dtype)
            for dtype in (torch.bfloat16, torch.float32)
        )
        prompts = random_prompts(8, 40, spec.vocab_size)
        sampling = Sampling(group_size=2, max_new_tokens=64, ignore_eos=True)
        engine = NativeEngine(policy, max_sequences=16, graphs=True)
        drawn = engine.generate(prompts, sampling, seed=0, rollout_step=0)
        truth = policy_logprobs(exact, drawn)
        own = Gap.between(sampler_logprobs(drawn), truth)
        trainer = Gap.between(policy_logprobs(policy, drawn), truth)
        row = {"section": "check", "format": name, "tokens": len(truth)}
        row |= {"graph_mean_nats": own.mean, "graph_max_nats": own.max}
        row |= {"policy_mean_nats": trainer.mean, "policy_max_nats": trainer.max}
        if not own.mean < 1.25 * trainer.mean or not own.max < 2 * trainer.max:
            raise ValueError(f"captured steps are further from fp32 than the policy: {row}")
        return row
