"""GPTQ: codes that make up for one another's errors on calibration inputs.

Columns are rounded one after another; what a column's rounding does to the output is compensated
in the columns that are not rounded yet,

    e_i = (w_i - q_i) / U_ii,    w_j <- w_j - e_i U_ij  for j > i,    Uᵀ U = (H + damping)⁻¹,

with H = XᵀX and U upper triangular. Source: GPTQ (arXiv:2210.17323, section 3 and algorithm 1).

The block scales are fixed before and never change, round to nearest's or searched ones. That keeps
every format's blocks and lets columns go in any order (static groups): the largest diagonal of H
first, so that the inputs that matter most are rounded while there is most room to compensate.

Departures: the paper fits a scale when the loop reaches its block; here an early column of another
block may come first, so the scales come from the weights as they are in the checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from qerl.quant.e2m1 import E2M1_VALUES, encode_e2m1
from qerl.quant.nibbles import pack_low_first
from qerl.quant.packed import PackedWeight
from qerl.quant.search import BlockScaled

BATCH = 128  # columns between two updates of the rest (lazy batches, section 3.3)
DAMPINGS = (1.0, 10.0, 100.0)  # times `Gptq.damping`, until H can be inverted


@dataclass(frozen=True, kw_only=True)
class GptqSettings:
    """What the paper leaves open."""

    damping: float = 0.01
    """Share of H's mean diagonal that is added to the diagonal; the paper's 1 %."""

    descending: bool = True
    """Round columns in the order of falling diagonal of H (act-order); False takes 0, 1, 2, ..."""

    search: bool = True
    """Scales of the least squared error instead of round to nearest's."""

    def __post_init__(self) -> None:
        if not 0 < self.damping <= 1:
            raise ValueError(f"gptq damping={self.damping}: in (0, 1]; the paper takes 0.01")


def gptq(
    weights: Sequence[Float[Tensor, "_ K"]],
    second_moment: Float[Tensor, "K K"],
    format: BlockScaled,
    settings: GptqSettings,
) -> list[PackedWeight]:
    """Pack the weights of one fused group for the inputs they share.

    Args:
        weights: one tensor scale, one input.
        second_moment: XᵀX of the inputs, fp32, times any positive number.
        format: what the bytes are.
        settings: of the algorithm.

    Raises:
        ValueError: XᵀX is not finite, or not a second moment.
    """
    packed = format.quantize_scaled(weights, search=settings.search)
    order, factor = _inverse_factor(second_moment, settings)
    result = []
    for weight, start in zip(weights, packed, strict=True):
        step = format.steps(start).repeat_interleave(format.block_size, dim=1)  # [N, K]
        codes = round_columns(weight.detach().float()[:, order], step[:, order], factor)
        natural = torch.empty_like(codes)
        natural[:, order] = codes
        tensors = {**start.tensors, "codes": pack_low_first(natural)}
        result.append(replace(start, tensors=tensors))
    return result


def round_columns(
    weight: Float[Tensor, "N K"], step: Float[Tensor, "N K"], factor: Float[Tensor, "K K"]
) -> UInt8[Tensor, "N K"]:
    """E2M1 codes of all columns, left to right.

    Args:
        weight: overwritten.
        step: of each weight.
        factor: U, upper triangular.
    """
    columns = weight.shape[1]
    values = torch.tensor(E2M1_VALUES, device=weight.device)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for start in range(0, columns, BATCH):
        end = min(start + BATCH, columns)
        inside = weight[:, start:end].T.contiguous()  # [batch, N]: a column is one row
        errors = torch.empty_like(inside)
        for i in range(end - start):
            column = start + i
            codes[:, column] = encode_e2m1(inside[i] / step[:, column])
            rounded = values[codes[:, column].int()] * step[:, column]  # [N]
            errors[i] = (inside[i] - rounded) / factor[column, column]
            inside[i + 1 :].addr_(factor[column, column + 1 : end], errors[i], alpha=-1)
        weight[:, end:].addmm_(errors.T, factor[start:end, end:], alpha=-1)
    return codes


def _inverse_factor(
    second_moment: Float[Tensor, "K K"], settings: GptqSettings
) -> tuple[Int[Tensor, " K"], Float[Tensor, "K K"]]:
    """The order of the columns, and U of the damped H in that order."""
    diagonal = second_moment.diagonal()  # [K]
    if not bool(second_moment.isfinite().all()) or bool((diagonal < 0).any()):
        raise ValueError(
            "calibration inputs give a second moment that is not finite or not positive: gptq "
            "needs finite activations; check the checkpoint, or calibrate in fp32"
        )
    order = torch.arange(len(diagonal), device=diagonal.device)
    if settings.descending:
        order = diagonal.argsort(descending=True, stable=True)
    mean = diagonal.mean()
    for times in DAMPINGS:
        damped = second_moment[order][:, order]
        # Inputs that are always 0 leave rows of zeros, and where all are, anything will do.
        damped.diagonal().add_(torch.where(mean > 0, times * settings.damping * mean, 1.0))
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(factor)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return order, upper
    raise ValueError(
        f"gptq damping={settings.damping}: XᵀX cannot be inverted even with {DAMPINGS[-1]:.0f} "
        "times as much; calibrate on more tokens than inputs, or set a larger damping"
    )
