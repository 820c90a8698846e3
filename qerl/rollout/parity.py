"""Whether a sampler and the policy are one distribution: log-probabilities of the same tokens.

An engine that holds copies (of adapters, of weights) can fall out of step with the policy and still
write good English. Two checks see it: a few tokens without noise after every hand-over of adapters,
and, before the first, a disturbance of each kind of adapter in turn that the sampler has to follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.model.linear import LoRALinear
from qerl.model.policy import Policy
from qerl.rollout.engine import Engine
from qerl.types import Packed, Prompts, Rollouts, Sampling, Segment


@torch.no_grad()
def completion_logprobs(
    policy: Policy, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> Float[Tensor, " n"]:
    """The policy's log-probability of every token of a completion, fp32 nats on the CPU.

    The sequence goes through the policy alone and whole, without anything a sampler kept.
    """
    tokens = torch.tensor([*prompt, *completion])  # [S]
    size, own = len(tokens), len(completion)
    packed = Packed(
        tokens=tokens,
        positions=torch.arange(size),
        segments=(Segment(start=0, length=size, parent=None),),
        predictors=torch.arange(size - own - 1, size - 1),
        targets=tokens[size - own :],
        sequence=torch.zeros(own, dtype=torch.int64),
        offset=torch.arange(own),
    )
    return policy.score(packed.to(policy.decoder.device), temperature)[0].cpu()


def policy_logprobs(
    policy: Policy, rollouts: Rollouts, temperature: float = 1.0
) -> Float[Tensor, " N"]:
    """The policy's log-probability of every drawn token, nats, row after row."""
    prompts, group = rollouts.prompts.tokens, rollouts.group_size
    rows = range(len(rollouts.lengths))
    return torch.cat(
        [
            completion_logprobs(policy, prompts[r // group], rollouts.completion(r), temperature)
            for r in rows
        ]
    )


@dataclass(frozen=True, slots=True)
class Gap:
    """Differences |log mu - log pi| over the drawn tokens, nats."""

    mean: float
    max: float

    @staticmethod
    def between(found: Float[Tensor, " N"], want: Float[Tensor, " N"]) -> "Gap":
        """The gap of two lists of log-probabilities."""
        apart = (found - want).abs()
        return Gap(float(apart.mean()), float(apart.max()))


def sampler_logprobs(rollouts: Rollouts) -> Float[Tensor, " N"]:
    """The sampler's log-probability of every drawn token, in the order of `policy_logprobs`."""
    rows = range(len(rollouts.lengths))
    return torch.cat([rollouts.sampler_logprobs[r, : int(rollouts.lengths[r])] for r in rows])


def gap(policy: Policy, rollouts: Rollouts, temperature: float = 1.0) -> Gap:
    """How far the sampler's log-probabilities are from the policy's."""
    return Gap.between(sampler_logprobs(rollouts), policy_logprobs(policy, rollouts, temperature))


class SamplerIsNotPolicyError(RuntimeError):
    """Sampler and trainer disagree on tokens on which they must agree."""

    @classmethod
    def of(
        cls, engine: str, nats: float, bound: float, rollout_step: int, what: str = ""
    ) -> "SamplerIsNotPolicyError":
        """The error for a mean difference of `nats`; `what` was done to the policy before."""
        return cls(
            f"rollout step {rollout_step}{what}: log-probabilities of the {engine} engine and of "
            f"the trainer differ by {nats:.4g} nats on average, the bound is {bound}; completions "
            "do not come from the policy that learns (adapters not applied, other weights), or "
            "raise trainer.max_mismatch_nats"
        )


@dataclass(frozen=True, kw_only=True)
class ParityProbe:
    """Draws a few tokens and compares the sampler's log-probabilities with the policy's."""

    bound_nats: float
    """Largest mean |log mu - log pi| of a probe."""

    prompts: int = 1
    """Prompts of a probe."""

    tokens: int = 8
    """Tokens of a completion."""

    def check(
        self, policy: Policy, engine: Engine, prompts: Prompts, *, rollout_step: int, what: str = ""
    ) -> Gap:
        """The gap after a `sync`, with no noise on the engine's norms.

        Args:
            policy: that learns.
            engine: that samples; it keeps no state of the probe but its `stats`.
            prompts: of which the first few are completed.
            rollout_step: for the message and the draw.
            what: was done to the policy before, for the message.

        Raises:
            SamplerIsNotPolicyError: the mean difference is above the bound or not a number.
        """
        found = gap(policy, self._draw(engine, prompts, rollout_step))
        if found.mean <= self.bound_nats:
            return found
        raise SamplerIsNotPolicyError.of(
            engine.name, found.mean, self.bound_nats, rollout_step, what
        )

    def check_targets(
        self, policy: Policy, engine: Engine, prompts: Prompts, *, rollout_step: int
    ) -> dict[str, Gap]:
        """The gap with each kind of adapter (q_proj, ..) disturbed in turn, by its name.

        A disturbance moves the policy by several bounds, so that a sampler which does not follow is
        seen. Afterwards the adapters have the same bits as before, and the engine has them.

        Raises:
            SamplerIsNotPolicyError: the sampler does not follow a disturbance.
        """
        found = {}
        engine.sync()
        for name, adapters in _by_target(policy).items():
            kept = [adapter.lora_b.detach().clone() for adapter in adapters]
            try:
                size = self._disturb(policy, engine, prompts, adapters, rollout_step)
                what = f", {name} adapters disturbed by {size:.2g}"
                found[name] = self.check(
                    policy, engine, prompts, rollout_step=rollout_step, what=what
                )
            finally:
                for adapter, b in zip(adapters, kept, strict=True):
                    adapter.lora_b.data.copy_(b)
                engine.sync()
        return found

    def _draw(self, engine: Engine, prompts: Prompts, rollout_step: int) -> Rollouts:
        few = prompts.take(list(range(min(self.prompts, len(prompts)))))
        sampling = Sampling(group_size=1, max_new_tokens=self.tokens)
        return engine.generate(few, sampling, seed=0, rollout_step=rollout_step)

    def _disturb(
        self,
        policy: Policy,
        engine: Engine,
        prompts: Prompts,
        adapters: Sequence[LoRALinear],
        rollout_step: int,
    ) -> float:
        """Add noise to the adapters' B until the policy has moved by several bounds; its size."""
        drawn = self._draw(engine, prompts, rollout_step)
        before = policy_logprobs(policy, drawn)
        generator = torch.Generator().manual_seed(0)
        size = 0.02
        for _ in range(8):
            for adapter in adapters:
                noise = torch.randn(adapter.lora_b.shape, generator=generator)
                adapter.lora_b.data.add_(noise.to(adapter.lora_b), alpha=size / adapter.scale)
            moved = Gap.between(policy_logprobs(policy, drawn), before)
            if moved.mean > 4 * self.bound_nats:
                break
            size *= 2
        engine.sync()
        return size


def _by_target(policy: Policy) -> dict[str, list[LoRALinear]]:
    found: dict[str, list[LoRALinear]] = {}
    for full_name, adapter in policy.adapters().items():
        found.setdefault(full_name.rpartition(".")[2], []).append(adapter)
    return found
