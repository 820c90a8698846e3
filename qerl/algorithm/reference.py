"""The objective once more, from the formulas of the papers, in loops and fp64.

It shares no code with the modules that train: where the two disagree, one of them is wrong. It
takes per-token log-probabilities as [B, C] maps, reads a run's settings from its `Algorithm`, and
is for tests.
"""

import math
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.algorithm.algorithm import Algorithm
from qerl.types import Rollouts


def reference_loss(
    algorithm: Algorithm,
    rollouts: Rollouts,
    rewards: Float[Tensor, "P G"],
    logprobs: Float[Tensor, "B C"],
    old_logprobs: Float[Tensor, "B C"] | None = None,
    ref_logprobs: Float[Tensor, "B C"] | None = None,
) -> Float[Tensor, ""]:
    """Sum of the losses of the step's optimizer updates, all taken at the same parameters.

    Args:
        algorithm: The settings.
        rollouts: Completions of P prompts.
        rewards: As the reward room gives them, NaN for an abstention.
        logprobs: log pi, nats, fp64, with gradient; read within the completions only.
        old_logprobs: log pi_old; None for pi_old = pi.
        ref_logprobs: log pi of the reference; None without a KL term.
    """
    G = rollouts.group_size
    P = len(rollouts.prompts)
    advantages, counts = _credit(algorithm, rollouts, rewards)
    loss = torch.zeros((), dtype=torch.float64)
    for part in range(algorithm.updates_per_rollout):
        first, last = (
            P * part // algorithm.updates_per_rollout,
            P * (part + 1) // algorithm.updates_per_rollout,
        )
        rows = [b for b in range(first * G, last * G) if counts[b]]
        tokens = sum(int(rollouts.lengths[b]) for b in rows)
        for b in rows:
            length = int(rollouts.lengths[b])
            gains = _gains(
                algorithm,
                advantages[b],
                logprobs[b, :length],
                rollouts.sampler_logprobs[b, :length].double(),
                None if old_logprobs is None else old_logprobs[b, :length].double(),
                None if ref_logprobs is None else ref_logprobs[b, :length].double(),
            )
            total = torch.stack(gains).sum()
            if algorithm.reduce == "token":  # DAPO: 1 / sum_i |o_i|
                loss = loss - total / tokens
            elif algorithm.reduce == "sequence":  # GRPO: 1 / G * 1 / |o_i|
                loss = loss - total / length / len(rows)
            else:  # Dr. GRPO: 1 / G * 1 / cap
                loss = loss - total / algorithm.max_new_tokens / len(rows)
    return loss


def _credit(
    algorithm: Algorithm, rollouts: Rollouts, rewards: Tensor
) -> tuple[list[float], list[bool]]:
    """Advantage of each completion, and whether it is part of the loss."""
    G = rollouts.group_size
    credit = algorithm.credit
    advantages: list[float] = []
    counts: list[bool] = []
    for p in range(len(rollouts.prompts)):
        group = [float(reward) for reward in rewards[p]]
        if algorithm.overlong is not None:
            group = [
                reward + _overlong(algorithm, rollouts, p * G + i) for i, reward in enumerate(group)
            ]
        judged = [reward for reward in group if not math.isnan(reward)]
        equal = not judged or max(judged) - min(judged) <= 1e-6
        for i, reward in enumerate(group):
            row = p * G + i
            absent = math.isnan(reward)
            advantages.append(0.0 if absent or equal else _advantage(algorithm, reward, judged))
            counts.append(
                not absent
                and int(rollouts.lengths[row]) > 0
                and not (credit.mask_truncated and bool(rollouts.truncated[row]))
                and not (credit.equal_groups == "drop" and equal)
            )
    return advantages, counts


def _advantage(algorithm: Algorithm, reward: float, group: list[float]) -> float:
    """(r - mean) / (std + eps)."""
    mean = fmean(group)
    if algorithm.credit.scale == "none":
        return reward - mean
    squares = sum((other - mean) ** 2 for other in group)
    std = math.sqrt(squares / (len(group) - algorithm.credit.ddof))
    return (reward - mean) / (std + algorithm.credit.eps)


def _overlong(algorithm: Algorithm, rollouts: Rollouts, row: int) -> float:
    """DAPO, Eq. 13; a truncated completion is one that is longer than the cap."""
    assert algorithm.overlong is not None
    cap, cache = algorithm.overlong.max_new_tokens, algorithm.overlong.ramp
    length = int(rollouts.lengths[row])
    if bool(rollouts.truncated[row]):
        return -algorithm.overlong.weight
    if length <= cap - cache:
        return 0.0
    return algorithm.overlong.weight * ((cap - cache) - length) / cache


def _gains(
    algorithm: Algorithm,
    advantage: float,
    logprobs: Tensor,
    sampler: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
) -> list[Tensor]:
    """What each token of one completion adds to J before normalisation."""
    objective = algorithm.objective
    length = len(logprobs)
    behind = logprobs.detach() if old is None else old
    sequence_ratio = torch.exp((logprobs - behind).sum() / length)
    gains: list[Tensor] = []
    for t in range(length):
        token_ratio = torch.exp(logprobs[t] - behind[t])
        ratio = token_ratio if objective.ratio == "token" else sequence_ratio
        value = ratio * advantage
        low, high = 1 - objective.clip_low, 1 + objective.clip_high
        bounded = min(max(ratio, torch.tensor(low)), torch.tensor(high)) * advantage
        gain = bounded if bounded < value else value
        if objective.dual_clip is not None and advantage < 0:
            floor = torch.tensor(objective.dual_clip * advantage, dtype=torch.float64)
            gain = floor if floor > gain else gain
        gain = gain * _correction(algorithm, behind.detach(), sampler, t)
        if objective.kl_coef > 0 and ref is not None:
            other = torch.exp(ref[t]) / torch.exp(logprobs[t])
            gain = gain - objective.kl_coef * (other - torch.log(other) - 1)
        gains.append(gain)
    return gains


def _correction(algorithm: Algorithm, trainer: Tensor, sampler: Tensor, t: int) -> float:
    """pi_old / mu of token t, or its geometric mean over the completion, bounded."""
    settings = algorithm.correction
    if settings.kind == "none":
        return 1.0
    ratios = [math.exp(float(a - b)) for a, b in zip(trainer, sampler, strict=True)]
    weight = ratios[t] if settings.level == "token" else math.prod(ratios) ** (1 / len(ratios))
    if settings.kind == "truncate":
        return min(weight, settings.cap)
    return weight if 1 / settings.cap <= weight <= settings.cap else 0.0
