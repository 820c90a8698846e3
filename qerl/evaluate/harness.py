"""mean@k of a policy on a set of prompts, through any engine, with its uncertainty.

The standard error is over problems (each problem's mean over its k samples is one observation),
because samples of one problem are not independent draws from the benchmark.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.reward.reward import Reward
from qerl.rollout.engine import Engine
from qerl.types import Prompts, Rollouts, Sampling, Scored

# Seeds derive from the rollout step; evaluation has one of its own, so that every evaluation of a
# run draws with the same random numbers and differences between them are paired.
EVALUATION_STEP = -1

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Verdicts on n problems with k samples each."""

    rollouts: Rollouts
    scored: Scored
    correct: Float[Tensor, "P G"]
    """1 right, 0 wrong, NaN where the verifier abstained."""

    @property
    def per_problem(self) -> Float[Tensor, " P"]:
        """Mean over the samples of each problem; NaN where every sample was abstained on."""
        return self.correct.nanmean(1)

    @property
    def mean(self) -> float:
        """mean@k."""
        return float(self.per_problem.nanmean())

    @property
    def standard_error(self) -> float:
        """Of `mean`, over problems; NaN for a single problem."""
        judged = self.per_problem[~self.per_problem.isnan()].double()
        return float(judged.std() / math.sqrt(len(judged))) if len(judged) > 1 else math.nan

    def summary(self) -> dict[str, float]:
        """The figures that logs and records carry."""
        verdicts = self.scored.verdicts
        return {
            "mean_at_k": self.mean,
            "standard_error": self.standard_error,
            "problems": float(len(self.rollouts.prompts)),
            "samples": float(self.rollouts.group_size),
            "truncated_share": float(self.rollouts.truncated.float().mean()),
            "no_answer_share": sum(v.answer is None for v in verdicts) / max(1, len(verdicts)),
            "abstained_share": float(self.correct.isnan().float().mean()),
            "length_mean": float(self.rollouts.lengths.float().mean()),
        }


def evaluate(
    engine: Engine,
    prompts: Prompts,
    sampling: Sampling,
    reward: Reward,
    decode: Callable[[list[int]], str],
    *,
    seed: int,
    progress: Progress | None = None,
) -> Evaluation:
    """Draw and judge `sampling.group_size` completions of every prompt, noise off."""
    if len(prompts) == 0:
        raise ValueError("no prompts to evaluate: the data set is empty after its checks")
    engine.sync()
    rollouts = engine.generate(
        prompts, sampling, seed=seed, rollout_step=EVALUATION_STEP, progress=progress
    )
    scored = reward(rollouts, decode)
    marks = [math.nan if v.correct is None else float(v.correct) for v in scored.verdicts]
    correct = torch.tensor(marks).view(len(prompts), rollouts.group_size)  # [P, G]
    return Evaluation(rollouts=rollouts, scored=scored, correct=correct)
