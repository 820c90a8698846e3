"""Token weights: the whole normalisation of a step's loss, worked out once.

loss = -sum over tokens of weight * gain, hence any split of the tokens into micro-batches,
accumulation windows or ranks gives the same gradient. Three denominators:

=========  =========================================  =====================================
token      1 / tokens that count                      DAPO (arXiv:2503.14476, Eq. 8)
sequence   1 / (sequences that count * their length)  GRPO (arXiv:2402.03300, Sec. 4.1)
constant   1 / (sequences that count * length cap)    Dr. GRPO (arXiv:2503.20783, Sec. 3)
=========  =========================================  =====================================

All are taken over the global optimizer step: all its prompts, all its micro-batches, all ranks.
A sequence that does not count is in neither numerator nor denominator.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Reduce = Literal["token", "sequence", "constant"]
ReduceSum = Callable[[float], float]


def one_rank(value: float) -> float:
    """The sum of `value` over ranks where there is one rank."""
    return value


def token_weights(
    mask: Bool[Tensor, "B C"],
    keep: Bool[Tensor, " B"],
    reduce: Reduce,
    *,
    max_new_tokens: int,
    reduce_sum: ReduceSum = one_rank,
) -> Float[Tensor, "B C"]:
    """Weight of each token in the loss of one optimizer step; 0 where a token does not count.

    Args:
        mask: True where the policy chose the token.
        keep: True where the sequence counts. A sequence without tokens never counts.
        reduce: ``token``, ``sequence`` or ``constant``, see the module.
        max_new_tokens: The length cap, in tokens; only ``constant`` reads it.
        reduce_sum: Sums a number over all ranks. It is called exactly once, also by a rank on
            which nothing counts, so that ranks cannot wait for each other.

    Returns:
        fp32. All zeros where nothing counts on any rank.
    """
    if reduce not in get_args(Reduce):
        raise ValueError(f"reduce={reduce!r}: one of {get_args(Reduce)}")
    counted = mask & keep[:, None]  # [B, C]
    lengths = counted.sum(1, dtype=torch.float64)  # [B] tokens
    per_token = torch.ones_like(lengths)  # [B]
    if reduce == "token":
        total = reduce_sum(float(lengths.sum()))  # tokens
    else:
        total = reduce_sum(float((lengths > 0).sum()))  # sequences
        span = lengths if reduce == "sequence" else torch.full_like(lengths, max_new_tokens)
        per_token = 1 / span.clamp(min=1)  # [B]
    return (counted * (per_token / max(total, 1.0))[:, None]).float()
