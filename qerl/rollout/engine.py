"""What every engine that draws completions promises, and the counts it keeps of a rollout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from qerl.model.layers import RMSNorm
from qerl.model.policy import Policy
from qerl.types import Prompts, Rollouts, Sampling

Progress = Callable[[int, int], None]
"""Called with (finished sequences, all sequences) whenever a sequence finishes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """What one `generate` did and what it cost."""

    sequences: int
    """Completions drawn, B."""

    tokens: int
    """Completion tokens drawn, end-of-sequence tokens included."""

    seconds: float
    """Wall time of the whole call, prefill included."""

    prompt_tokens: int
    """Prompt tokens of all B sequences: what a batch without sharing would prefill."""

    prefill_tokens: int
    """Prompt tokens that went through the model."""

    occupancy: float
    """Mean share of the engine's rows that held a live sequence, over its decode steps."""

    peak_pages: int = 0
    """Most key/value pages held at once; 0 for an engine without pages."""

    peak_kv_bytes: int = 0
    """Bytes of those pages."""

    @property
    def tok_per_s(self) -> float:
        """Completion tokens per second of wall time."""
        return self.tokens / max(self.seconds, 1e-9)

    def metrics(self) -> dict[str, float]:
        """The counts under the names that logs and tables use."""
        return {
            "rollout/tokens": float(self.tokens),
            "rollout/seconds": self.seconds,
            "rollout/tok_per_s": self.tok_per_s,
            "rollout/prefill_tokens": float(self.prefill_tokens),
            "rollout/prefill_shared": 1 - self.prefill_tokens / max(self.prompt_tokens, 1),
            "rollout/occupancy": self.occupancy,
            "rollout/peak_kv_gib": self.peak_kv_bytes / 2**30,
        }


class Engine(Protocol):
    """Draws completions from the policy with the adapters of the last `sync`, noise as it is.

    An engine keeps nothing between calls that depends on weights: adapters and noise change from
    one rollout to the next, so no key or value outlives the `generate` that computed it.
    """

    name: str

    stats: RolloutStats | None
    """Of the last `generate`; None before the first."""

    @property
    def copies(self) -> bool:
        """Whether it samples from copies of adapters or weights, which can fall out of step."""
        ...

    @property
    def norms(self) -> Sequence[RMSNorm]:
        """The norms whose weights carry the noise while sampling: 2L of them."""
        ...

    def sync(self) -> None:
        """Take over the policy's adapters.

        Raises:
            RuntimeError: a `generate` is in flight.
        """
        ...

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        *,
        seed: int,
        rollout_step: int,
        sigma: float = 0.0,
        progress: Progress | None = None,
    ) -> Rollouts:
        """Draw `sampling.group_size` completions of every prompt.

        Args:
            prompts: P prompts, at least one, each of at least one token.
            sampling: how to draw.
            seed: of the run.
            rollout_step: how many rollouts the run drew before; with `seed` it fixes the draw, so
                a resumed run draws what the uninterrupted one would have.
            sigma: standard deviation of the noise the norms carry, for the record only: the
                caller holds the noise scope open.
            progress: told of finished sequences.

        Returns:
            B = P * G completions, prompt-major, in the order of `prompts`.

        Raises:
            ValueError: a prompt and its completion exceed the context or the memory.
            RuntimeError: the adapters are off, or another `generate` is in flight.
            FloatingPointError: a drawn token has no finite log-probability.
        """
        ...

    def release(self) -> None:
        """Give back the memory that is needed only while generating."""
        ...


def check_idle(busy: bool) -> None:
    """Raise while a `generate` is in flight."""
    if busy:
        raise RuntimeError(
            "a rollout is in flight: its sequences would change policy or lose memory half-way"
        )


def check_request(policy: Policy, prompts: Prompts, max_new_tokens: int, max_context: int) -> None:
    """Raise for a call that no order of work could serve, or that would sample another policy."""
    if not all(adapter.enabled for adapter in policy.adapters().values()):
        raise RuntimeError("generate inside policy.reference(): rollouts come from the policy")
    if not len(prompts):
        raise ValueError("0 prompts: a rollout needs at least 1")
    for prompt_id, tokens in zip(prompts.ids, prompts.tokens, strict=True):
        if not tokens:
            raise ValueError(f"prompt {prompt_id} has no tokens: the model has nothing to continue")
        if len(tokens) + max_new_tokens > max_context:
            raise ValueError(
                f"prompt {prompt_id}: {len(tokens)} tokens + max_new_tokens={max_new_tokens} "
                f"exceed the context of {max_context}; drop the prompt, or lower max_new_tokens"
            )
