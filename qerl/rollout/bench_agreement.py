"""How far three ways to the same tokens agree on a real model: native engine, `hf` engine, policy.

For each format, on SmolLM2-135M with adapters that act:

- greedy completions of the native engine against those of transformers' `generate`. Where they
  part, the margin by which the policy in fp32 prefers one of the two tokens tells whether it is a
  tie;
- the same seeds drawn one sequence at a time and all together: a sample is not its batch's;
- log-probabilities of sampled tokens against the policy's forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qerl.data.prompt import PromptBuilder
from qerl.model.linear import LoRAConfig
from qerl.model.load import load_policy
from qerl.model.policy import Policy
from qerl.model.source import SmolLM2Gguf, Source, Toy
from qerl.quant.bf16 import BF16
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format
from qerl.rollout.hf import HfEngine
from qerl.rollout.native import NativeEngine
from qerl.rollout.parity import completion_logprobs, gap
from qerl.types import Prompts, Rollouts, Sampling

_FORMATS: dict[str, Callable[[], Format]] = {
    "nvfp4": NVFP4, "mxfp4": MXFP4, "nf4": NF4, "bf16": BF16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fork:
    """Where two completions of one prompt part."""

    prompt: str
    place: int
    """Index of the first token that differs."""

    margin_nats: float
    """log p(first) - log p(second) in fp32: near 0 is a tie that rounding decides."""


@dataclass(frozen=True, kw_only=True)
class AgreementBench:
    """One row a format."""

    formats: Sequence[str] = ("nvfp4", "mxfp4", "nf4", "bf16")

    prompts: int = 32
    tokens: int = 64
    """Of a completion; an end-of-sequence token does not end it."""

    tie_nats: float = 0.05
    """A fork is a tie up to this margin. bf16 moves a log-probability by a few hundredths."""

    model: str = "smollm2-135m"
    """``smollm2-135m``, or ``toy`` for tests."""

    device: str = "cuda"

    def run(self, rows: list[dict[str, Any]]) -> None:
        """Append one row a format; raises where engines part without a tie."""
        for name in self.formats:
            rows.append(self._measure(name))
            if rows[-1]["forks"] > rows[-1]["ties"]:
                raise ValueError(f"engines part where no tie is: {rows[-1]}; see its fork_list")

    def _measure(self, name: str) -> dict[str, Any]:
        policy, exact = self._policy(name), self._policy(name, exact=True)
        prompts = self._prompts(self._source())
        greedy = Sampling(
            group_size=1, max_new_tokens=self.tokens, temperature=0.0, ignore_eos=True
        )
        native = self._engine(policy, self.prompts)
        ours = native.generate(prompts, greedy, seed=0, rollout_step=0)
        theirs = HfEngine(policy, max_sequences=self.prompts).generate(
            prompts, greedy, seed=0, rollout_step=0
        )
        found = forks(exact, ours, theirs)
        drawing = Sampling(group_size=2, max_new_tokens=self.tokens, ignore_eos=True)
        many = self._engine(policy, 2 * self.prompts)
        together = many.generate(prompts, drawing, seed=0, rollout_step=0)
        alone = self._engine(policy, 1).generate(
            prompts.take([0, 1]), drawing, seed=0, rollout_step=0
        )
        split = forks(exact, alone, _first(together, 2))
        apart = gap(policy, together)
        both = found + split
        return {
            "section": "agreement",
            "format": name,
            "graphs": native._graphs is not None,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "greedy_equal": self.prompts - len(found),
            "drawn_alone_equal": 4 - len(split),
            "forks": len(both),
            "ties": sum(abs(fork.margin_nats) <= self.tie_nats for fork in both),
            "policy_mean_nats": round(apart.mean, 6),
            "policy_max_nats": round(apart.max, 6),
            "fork_list": [f"{f.prompt} @{f.place}: {f.margin_nats:+.4f}" for f in both],
        }

    def _source(self) -> Source:
        return SmolLM2Gguf() if self.model == "smollm2-135m" else Toy()

    def _policy(self, name: str, exact: bool = False) -> Policy:
        bf16 = self.device == "cuda" and not exact
        policy = load_policy(
            self._source(),
            _FORMATS[name](),
            LoRAConfig(rank=16, alpha=32),
            device=self.device,
            dtype=torch.bfloat16 if bf16 else torch.float32,
            shadow=True,
        )
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for adapter in policy.adapters().values():
                noise = torch.randn(adapter.lora_b.shape, generator=generator)
                adapter.lora_b.copy_(noise * 0.003)
        return policy

    def _engine(self, policy: Policy, rows: int) -> NativeEngine:
        return NativeEngine(policy, max_sequences=rows, graphs=None)

    def _prompts(self, source: Source) -> Prompts:
        questions = [f"What is {13 + 7 * i} + {91 - 2 * i}?" for i in range(self.prompts)]
        builder = PromptBuilder(form="chat" if self.model != "toy" else "plain")
        return Prompts(
            ids=tuple(f"sum/{i}" for i in range(self.prompts)),
            questions=tuple(questions),
            tokens=tuple(builder.encode(questions, source.tokenizer())),
            golds=("",) * self.prompts,
        )


def forks(exact: Policy, first: Rollouts, second: Rollouts) -> list[Fork]:
    """Where completions of the same rows part, and how much `exact` prefers the first's token."""
    found = []
    for row in range(len(first.lengths)):
        a, b = first.completion(row), second.completion(row)
        places = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
        if places:
            place = places[0]
            prompt = first.prompts.tokens[row // first.group_size]
            before = [*prompt, *a[:place]]
            mine, other = (completion_logprobs(exact, before, [t[place]]) for t in (a, b))
            name = first.prompts.ids[row // first.group_size]
            found.append(Fork(name, place, float(mine[0] - other[0])))
    return found


def _first(rollouts: Rollouts, prompts: int) -> Rollouts:
    """The rows of the first `prompts` prompts."""
    rows = prompts * rollouts.group_size
    return Rollouts(
        prompts=rollouts.prompts.take(list(range(prompts))),
        group_size=rollouts.group_size,
        completions=rollouts.completions[:rows],
        lengths=rollouts.lengths[:rows],
        sampler_logprobs=rollouts.sampler_logprobs[:rows],
        truncated=rollouts.truncated[:rows],
        rollout_step=rollouts.rollout_step,
        sigma=rollouts.sigma,
    )
