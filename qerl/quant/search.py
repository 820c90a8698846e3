"""Search for block scales that leave the smallest squared error, without data.

Round to nearest maps the largest |w| of a block to 6, the largest E2M1 value. Mapping it to 4
spends the wide gap between 4 and 6 elsewhere; mapping it above 6 clips it and refines the rest.
For every block

    scale = argmin over candidates of  sum_k c_k (w_k - step q(w_k / step))^2,   c_k = 1 or given,

where q is the nearest E2M1 value. Ties take the candidate that comes first, and the first is that
of round to nearest: no block is ever worse than it.

Which candidates suffice. Where max |w| is at most 3.5 steps, codes use 0 .. 3 only, and half the
step holds the same values and more between them: steps above max / 3.5 need no trial (but at the
ends of the exponent range). Steps below max / 7.5 clip a fifth of the largest weight, which pays in
blocks of one outlier and small weights only. All 126 E4M3 scales instead of the 9 tried here would
lower the error of Gaussian weights by 1e-5 of it (`tests/quant/test_search.py`).

Source: the choice between 4 and 6, Four Over Six (arXiv:2512.02010, section 3).
"""

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from qerl.quant.e2m1 import E2M1_MAX
from qerl.quant.packed import Format, PackedWeight, row_chunks

MethodName = Literal["rtn", "mse", "awq", "gptq"]
"""How codes and scales are chosen; it does not change what the bytes mean."""

METHODS: tuple[MethodName, ...] = ("rtn", "mse", "awq", "gptq")

E4M3_OFFSETS = (1, 2, 3, 4, 5, 6, -1, -2)
"""Neighbours of round to nearest's byte: max |w| of 3.5 to 7.5 steps. Eight are a binade."""

E4M3_BOUNDS = (1, 126)
"""Bytes of 2^-9 and 448: 0 is no scale and 127 is NaN."""

E8M0_OFFSETS = (-1, 1)
"""One binade down clips a maximum of 7 steps at 6; one up matters at the ends of the range only."""


@runtime_checkable
class BlockScaled(Format, Protocol):
    """A format of E2M1 codes under block scales: what search, GPTQ and AWQ work on."""

    def quantize_scaled(
        self,
        weights: Sequence[Float[Tensor, "_ K"]],
        *,
        search: bool,
        importance: Float[Tensor, " K"] | None = None,
    ) -> list[PackedWeight]:
        """Pack weights of one fused group, whatever the format's own method is.

        Args:
            weights: share the tensor scale where the format has one.
            search: take the block scales of the least squared error, not round to nearest's.
            importance: weight of each input channel in that error; None for 1.
        """
        ...

    def steps(self, packed: PackedWeight) -> Float[Tensor, "N blocks"]:
        """What a code's value is multiplied by, fp32: block scale times tensor scale."""
        ...


def check_method(method: str, format: str, allowed: Sequence[str] = METHODS) -> None:
    """Raise ValueError unless `format` knows `method`."""
    if method not in METHODS:
        raise ValueError(f"quant.method={method}: one of {', '.join(METHODS)}")
    if method not in allowed:
        raise ValueError(
            f"quant.method={method}: {format} has no method but {' or '.join(allowed)}; choose "
            f"quant=nvfp4 or quant=mxfp4 for {method}"
        )


def check_data_free(method: str, format: str) -> None:
    """Raise ValueError where `method` needs calibration data, which a load does not have."""
    if method in ("awq", "gptq"):
        raise ValueError(
            f"quant.method={method}: needs calibration data, so a checkpoint cannot be packed with "
            f"it while it loads; run python scripts/quantize.py quant={format} "
            f"quant.method={method} once and load its folder, or take quant.method=mse"
        )


def search_bytes(
    weight: Float[Tensor, "N K"],
    first: UInt8[Tensor, "N blocks"],
    steps: Float[Tensor, "256"],
    offsets: Sequence[int],
    bounds: tuple[int, int],
    importance: Float[Tensor, " K"] | None = None,
) -> UInt8[Tensor, "N blocks"]:
    """The byte of each block's scale with the least error.

    Args:
        weight: any floating dtype; read a chunk of rows at a time.
        first: round to nearest's bytes, within `bounds`; every other one has to beat them.
        steps: the step that a byte stands for, fp32; positive and rising within `bounds`.
        offsets: candidates relative to `first`; those outside `bounds` are clamped into them.
        bounds: the first and the last byte that is a scale.
        importance: weight of each column in the error, not negative.
    """
    best = first.clone()  # [N, blocks]
    width = weight.shape[1] // first.shape[1]
    columns = None if importance is None else importance.float().view(-1, width)  # [blocks, width]
    for rows in row_chunks((weight.shape[0], weight.shape[1]), weight.device):
        start = first[rows].int()  # [n, blocks]
        unit = steps[start]  # [n, blocks]
        # In units of the first step nothing overflows or vanishes when it is squared.
        blocks = weight[rows].float().unflatten(1, (-1, width)).abs().div_(unit[..., None])
        scratch = (torch.empty_like(blocks), torch.empty_like(blocks))
        chosen = best[rows]  # [n, blocks], a view
        least = block_errors(blocks, torch.ones_like(unit), columns, scratch)  # [n, blocks]
        for offset in offsets:
            byte = (start + offset).clamp_(*bounds)
            error = block_errors(blocks, steps[byte] / unit, columns, scratch)
            better = error < least
            torch.where(better, byte.to(torch.uint8), chosen, out=chosen)
            torch.where(better, error, least, out=least)
    return best


def block_errors(
    magnitudes: Float[Tensor, "n blocks width"],
    step: Float[Tensor, "n blocks"],
    columns: Float[Tensor, "blocks width"] | None,
    scratch: tuple[Tensor, Tensor],
) -> Float[Tensor, "n blocks"]:
    """Sum of squared differences between |w| and its nearest value under `step`, fp32.

    `scratch` holds two tensors like `magnitudes`, which are overwritten.
    """
    x, gap = scratch
    torch.div(magnitudes, step[..., None], out=x).clamp_(max=E2M1_MAX)
    # Values lie 0.5 apart below 2, 1 up to 4 and 2 above: half the power of two below x, and no
    # less than 0.5. Adding and taking away 1.5 * 2^23 of these gaps rounds x to a multiple of one.
    torch.clamp(x, min=1.0, out=gap).view(torch.int32).bitwise_and_(0x7F800000)
    gap.mul_(0.75 * 2**23)
    x.add_(gap).sub_(gap).mul_(step[..., None]).sub_(magnitudes).square_()
    if columns is not None:
        x.mul_(columns)
    return x.sum(-1)
