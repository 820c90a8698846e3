"""Carriers between the rooms, and the legend of shape letters.

Data moves forward through the rooms in these objects and in nothing else::

    data        rollout         reward       algorithm        training
    Prompts ──▸ Rollouts ─────▸ Scored ────▸ Experience ────▸ metrics
    [P]         [B, C]          [P, G]       [B, C] → [N]     scalars

Letters, here and in every room:

=====  ==========================================================================
P      prompts of a rollout step
G      completions per prompt (the group); B = P * G sequences, prompt-major
C      tokens of the longest completion of a step; shorter ones are right-padded
S      tokens of one packed micro-batch, end to end, no padding
N      completion tokens of one packed micro-batch: the ones that are learned from
V, D   vocabulary, hidden width
H, Hk  query heads, key/value heads;  Dh  width of a head;  F  width of the MLP;  L  layers
R      LoRA rank
=====  ==========================================================================

A completion is always the token ids that the sampler chose. Text is made from ids for rewards
and tables; no id is ever made from text again. Which tokens count follows from lengths, never
from comparing ids with a padding id (padding and end-of-sequence share an id in many models).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Finish = Literal["eos", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """P prompts with the answers that verify them. Ragged, on the host."""

    ids: tuple[str, ...]
    """Stable identity of each prompt, for example ``gsm8k/train/17``; seeds derive from it."""

    questions: tuple[str, ...]
    """The bare question, for tables and overlap checks."""

    tokens: tuple[tuple[int, ...], ...]
    """Token ids after the chat template, generation prompt included. [P][length]"""

    golds: tuple[str, ...]
    """The reference answer as the data set states it."""

    def __post_init__(self) -> None:
        sizes = {len(self.ids), len(self.questions), len(self.tokens), len(self.golds)}
        if len(sizes) != 1:
            raise ValueError(f"Prompts fields differ in length: {sorted(sizes)}")

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: list[int]) -> "Prompts":
        """The prompts at `rows`, in that order."""
        return Prompts(
            ids=tuple(self.ids[row] for row in rows),
            questions=tuple(self.questions[row] for row in rows),
            tokens=tuple(self.tokens[row] for row in rows),
            golds=tuple(self.golds[row] for row in rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How completions are drawn."""

    group_size: int
    """G, completions per prompt."""

    max_new_tokens: int
    """Length cap of a completion, its end-of-sequence token included."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""

    top_p: float = 1.0
    """Nucleus mass kept; 1 keeps the whole distribution, which training requires."""

    top_k: int = 0
    """Candidates kept; 0 keeps all, which training requires."""

    ignore_eos: bool = False
    """Run every completion to the cap (benchmarks only)."""

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size={self.group_size}: at least 1 completion per prompt")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: 0 (greedy) or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: 0 (all) or above")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """P prompts with G completions each; row b belongs to prompt b // G."""

    prompts: Prompts
    group_size: int

    completions: Int[Tensor, "B C"]
    """Chosen token ids, end-of-sequence included where reached; 0 beyond `lengths`. int64, CPU."""

    lengths: Int[Tensor, " B"]
    """Chosen tokens of each completion. int64, CPU."""

    sampler_logprobs: Float[Tensor, "B C"]
    """log mu(token) in nats at the sampling temperature, as the engine saw it (noise included);
    0 beyond `lengths`. fp32, CPU."""

    truncated: Bool[Tensor, " B"]
    """True where the length cap, not an end-of-sequence token, ended the completion."""

    rollout_step: int
    """The clock that drives noise and seeds: how many rollouts were drawn before this one."""

    sigma: float
    """Standard deviation of the noise that the sampler's norms carried; 0 for none."""

    def __post_init__(self) -> None:
        B, C = self.completions.shape
        if len(self.prompts) * self.group_size != B:
            raise ValueError(f"{len(self.prompts)} prompts x {self.group_size} != {B} completions")
        if B and int(self.lengths.max()) > C:
            raise ValueError(f"a length of {int(self.lengths.max())} exceeds the width {C}")

    @property
    def mask(self) -> Bool[Tensor, "B C"]:
        """True where the policy chose the token."""
        return torch.arange(self.completions.shape[1]) < self.lengths[:, None]  # [B, C]

    def completion(self, row: int) -> list[int]:
        """Token ids of completion `row`, without padding."""
        ids: list[int] = self.completions[row, : int(self.lengths[row])].tolist()
        return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the reward room says of one completion."""

    correct: bool | None
    """None: the verifier abstains (a gold it cannot read, a crash), which is not a 0."""

    reason: str
    """One short line a person can read, for example ``no answer`` or ``56 != 55``."""

    answer: str | None
    """The answer found in the completion; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Rewards of one step's rollouts."""

    rewards: Float[Tensor, "P G"]
    """Weighted sum of the components; NaN where every component abstained."""

    components: Mapping[str, Float[Tensor, "P G"]]
    """Each component unweighted, NaN where it abstained; for logs."""

    verdicts: tuple[Verdict, ...]
    """One for each completion, prompt-major. [B]"""

    texts: tuple[str, ...]
    """Each completion decoded with its special tokens. [B]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """What one step learns from: rollouts with credit, everything [B] or [B, C], on the CPU."""

    rollouts: Rollouts

    advantages: Float[Tensor, " B"]
    """Group-relative advantage; 0 for sequences that carry no signal."""

    weights: Float[Tensor, "B C"]
    """Weight of each token in the step's loss. They hold the whole normalisation (token or
    sequence mean, over the global step), so that a loss is a plain sum over any split of it;
    0 where a token does not count. The loss is ``-sum(weights * gain)``."""

    old_logprobs: Float[Tensor, "B C"] | None = None
    """log pi_old by the trainer before the update, in nats; None when the step makes one update,
    where it equals the policy's own."""

    ref_logprobs: Float[Tensor, "B C"] | None = None
    """log pi with adapters off; None without a KL term."""

    @property
    def rows(self) -> list[int]:
        """Sequences with at least one token that counts."""
        rows: list[int] = (self.weights != 0).any(1).nonzero().flatten().tolist()
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens of a packed micro-batch that continues another run.

    A completion's parent is its prompt; a prompt's parent is the part that several prompts share.
    Tokens of a segment attend to themselves causally and to all of every ancestor.
    """

    start: int
    """First row in S."""

    length: int

    parent: int | None
    """Index of the segment it continues; always smaller than its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A micro-batch: a forest of segments laid end to end, every shared token stored once."""

    tokens: Int[Tensor, " S"]

    positions: Int[Tensor, " S"]
    """Position of each token in its own sequence, for the rotary embedding."""

    segments: tuple[Segment, ...]

    predictors: Int[Tensor, " N"]
    """Row in S whose hidden state predicts each scored token."""

    targets: Int[Tensor, " N"]
    """The scored token ids."""

    sequence: Int[Tensor, " N"]
    """Row b of the step's [B, C] maps that each scored token belongs to."""

    offset: Int[Tensor, " N"]
    """Column c of the step's [B, C] maps."""

    def gather(self, values: Float[Tensor, "B C"]) -> Float[Tensor, " N"]:
        """A step map at this micro-batch's scored tokens."""
        return values[self.sequence, self.offset]

    def to(self, device: torch.device | str) -> "Packed":
        """Move what the model reads; `sequence` and `offset` stay on the host with the maps."""
        return Packed(
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            segments=self.segments,
            predictors=self.predictors.to(device),
            targets=self.targets.to(device),
            sequence=self.sequence,
            offset=self.offset,
        )
