"""The algorithm of a run: all that turns scored rollouts into a gradient, in one object.

The training room drives it::

    experience = algorithm.experience(rollouts, scored)      # credit and weights, on the host
    for rows in algorithm.minibatches(experience):           # one optimizer step each
        for packed in algorithm.micro_batches(experience, rows):
            logprobs, entropy = policy.score(packed, algorithm.temperature)
            out = algorithm.loss(packed, experience, logprobs, entropy)
            out.loss.backward()
        optimizer.step()
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.algorithm.correction import ImportanceCorrection
from qerl.algorithm.credit import Credit, OverlongPenalty, mixed_groups
from qerl.algorithm.diagnostics import Diagnostics, k3
from qerl.algorithm.objective import ClippedObjective, ObjectiveOut
from qerl.algorithm.packing import pack
from qerl.algorithm.selection import DynamicSampling, group_waste
from qerl.algorithm.weights import Reduce, ReduceSum, one_rank, token_weights
from qerl.types import Experience, Packed, Rollouts, Sampling, Scored


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """GRPO, DAPO and Dr. GRPO are settings of this; see conf/algorithm."""

    objective: ClippedObjective = field(default_factory=ClippedObjective)
    credit: Credit = field(default_factory=Credit)
    correction: ImportanceCorrection = field(default_factory=ImportanceCorrection)

    reduce: Reduce = "token"
    """The denominator of the loss, see weights.py."""

    dynamic_sampling: DynamicSampling | None = None
    """Draw until a step is full of mixed groups; None takes each rollout as it is."""

    overlong: OverlongPenalty | None = None
    """Length penalty added to the rewards before the advantage; None for none."""

    group_size: int = 8
    """G, completions per prompt."""

    prompts_per_step: int = 16
    """Prompts of a rollout step, over all ranks."""

    max_new_tokens: int = 2048
    """Length cap of a completion, its end-of-sequence token included."""

    temperature: float = 1.0
    """Divides the logits, of the sampler and of the trainer alike."""

    updates_per_rollout: int = 1
    """Optimizer steps that share a rollout: its prompts are split into so many parts, and each part
    is one step with a denominator of its own."""

    micro_batch_tokens: int = 16384
    """Largest S of one forward and backward pass."""

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size}: advantages need at least 2 completions per prompt"
            )
        if self.updates_per_rollout < 1 or self.prompts_per_step % self.updates_per_rollout:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} does not split into "
                f"updates_per_rollout={self.updates_per_rollout} equal parts: choose a multiple"
            )
        if self.prompts_per_step < 1 or self.micro_batch_tokens < 1:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} and "
                f"micro_batch_tokens={self.micro_batch_tokens}: at least 1 of each"
            )
        if self.temperature <= 0:
            raise ValueError(
                f"temperature={self.temperature}: above 0; a greedy group is all equal"
            )
        if self.overlong is not None and self.overlong.max_new_tokens != self.max_new_tokens:
            raise ValueError(
                f"overlong.max_new_tokens={self.overlong.max_new_tokens} is not "
                f"max_new_tokens={self.max_new_tokens}: the penalty ramps up to the sampler's cap"
            )
        if self.credit.equal_groups == "skip" and self.objective.kl_coef > 0:
            raise ValueError(
                "credit.equal_groups='skip' with a KL term leaves the KL of those groups out of "
                "the gradient: choose 'keep' or 'drop', or kl_coef 0"
            )

    @property
    def sampling(self) -> Sampling:
        """How training completions are drawn: from the whole distribution, uncut.

        A top-p or top-k below the whole would make the sampler's log-probabilities those of another
        policy than the one that learns, so there is no option for it.
        """
        return Sampling(
            group_size=self.group_size,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
        )

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether `Experience.old_logprobs` must be filled before the first update."""
        return self.updates_per_rollout > 1

    @property
    def needs_ref_logprobs(self) -> bool:
        """Whether `Experience.ref_logprobs` must be filled before the first update."""
        return self.objective.kl_coef > 0

    def experience(
        self, rollouts: Rollouts, scored: Scored, *, reduce_sum: ReduceSum = one_rank
    ) -> Experience:
        """Advantages and token weights of a step, without log-probabilities.

        Args:
            rollouts: The step's completions.
            scored: Their rewards.
            reduce_sum: Sums a number over all ranks, so that the denominators are those of the
                global step. Called `updates_per_rollout` times on every rank. A trainer that
                averages gradients over ranks must multiply its loss by their number.
        """
        rewards = scored.rewards  # [P, G]
        if self.overlong is not None:
            penalty = self.overlong(rollouts.lengths, rollouts.truncated)  # [B]
            rewards = rewards + penalty.view_as(rewards)
        credited = self.credit(rewards, rollouts.truncated)
        parts = [
            token_weights(
                rollouts.mask[rows],
                credited.counted[rows],
                self.reduce,
                max_new_tokens=self.max_new_tokens,
                reduce_sum=reduce_sum,
            )
            for rows in self._parts(rollouts)
        ]
        weights = torch.cat(parts) * credited.learned[:, None]  # [B, C]
        return Experience(rollouts=rollouts, advantages=credited.advantages, weights=weights)

    def minibatches(self, experience: Experience) -> list[list[int]]:
        """Rows to learn from in each of the `updates_per_rollout` optimizer steps.

        Whole groups, in order. A part is empty where nothing of it counts.
        """
        counting = set(experience.rows)
        return [
            [row for row in range(part.start, part.stop) if row in counting]
            for part in self._parts(experience.rollouts)
        ]

    def micro_batches(self, experience: Experience, rows: list[int]) -> list[Packed]:
        """The tokens of `rows`, packed for one forward pass each."""
        return pack(experience.rollouts, rows, token_budget=self.micro_batch_tokens)

    def loss(
        self,
        packed: Packed,
        experience: Experience,
        logprobs: Float[Tensor, " N"],
        entropy: Float[Tensor, " N"] | None = None,
    ) -> ObjectiveOut:
        """The micro-batch's share of the step's loss and diagnostics.

        Args:
            packed: A micro-batch of `micro_batches`.
            experience: The step, with `old_logprobs` and `ref_logprobs` where they are needed.
            logprobs: log pi of `packed.targets` with gradient, nats, at `temperature`.
            entropy: Entropy of pi at each of them, nats, without gradient; None if not measured.
        """
        if self.needs_old_logprobs and experience.old_logprobs is None:
            raise ValueError(
                f"updates_per_rollout={self.updates_per_rollout}: the ratio needs old_logprobs"
            )
        device = logprobs.device
        maps = (experience.old_logprobs, experience.ref_logprobs)
        old, ref = (None if it is None else packed.gather(it).to(device) for it in maps)  # [N]
        sampler = packed.gather(experience.rollouts.sampler_logprobs).to(device)  # [N] nats
        weights = packed.gather(experience.weights).to(device)  # [N]
        sequence = packed.sequence.to(device)  # [N]
        # The sampler is compared with the adapters it sampled with, not with those updated since.
        trainer = logprobs.detach() if old is None else old  # [N] nats
        out = self.objective(
            logprobs,
            old,
            experience.advantages[packed.sequence].to(device),
            weights,
            ref_logprobs=ref,
            correction=self.correction(trainer, sampler, sequence),
            sequence=sequence,
        )
        seen = _mismatch(trainer, sampler, entropy, weights)
        return replace(out, diagnostics=out.diagnostics + seen)

    def group_metrics(self, scored: Scored) -> dict[str, float]:
        """What share of the drawn groups teaches, and what G predicts for the pass rate seen.

        ``train/group_waste_expected`` is p^G + (1 - p)^G at the mean pass rate p; the waste seen is
        higher as far as prompts differ in difficulty.
        """
        judged = [verdict.correct for verdict in scored.verdicts if verdict.correct is not None]
        metrics = {
            "train/groups_mixed_fraction": float(mixed_groups(scored.rewards).float().mean()),
            "train/abstained_fraction": float(scored.rewards.isnan().float().mean()),
        }
        if judged:
            rate = sum(judged) / len(judged)
            metrics["train/group_waste_expected"] = group_waste(rate, self.group_size)
        return metrics

    def _parts(self, rollouts: Rollouts) -> list[slice]:
        """Rows of each optimizer step: equal runs of whole groups, as nearly as P allows."""
        bounds = [
            len(rollouts.prompts) * part // self.updates_per_rollout * self.group_size
            for part in range(self.updates_per_rollout + 1)
        ]
        return [slice(start, stop) for start, stop in pairwise(bounds)]


def _mismatch(
    trainer: Float[Tensor, " N"],
    sampler: Float[Tensor, " N"],
    entropy: Float[Tensor, " N"] | None,
    weights: Float[Tensor, " N"],
) -> Diagnostics:
    """How far the sampler was from the trainer at the tokens that count, and the entropy there."""
    gap = trainer - sampler  # [N] nats
    means = {
        "train/mismatch_kl": k3(gap),
        "train/mismatch_mean": gap,
        "train/mismatch_mean_abs": gap.abs(),
    }
    if entropy is not None:
        means["train/entropy_nats"] = entropy
    return Diagnostics.measure(weights != 0, means, {"train/mismatch_max": gap.abs()})
