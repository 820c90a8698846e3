"""Whether a sampler and the policy are one distribution: log-probabilities of the same tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.model.policy import Policy
from qerl.types import Packed, Rollouts, Segment


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
