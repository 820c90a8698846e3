"""Two 4-bit codes a byte: how they are packed, and how a scaled block is read back.

A byte is looked up whole: 256 pairs of fp32 values, 8 bytes each, moved as one int64. That is one
gather for two weights, and it needs no shift, mask or interleave on either device.
"""

import functools
from collections.abc import Callable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from qerl.quant.packed import check_dtype, row_chunks

Values = tuple[float, ...]
"""The 16 values of a 4-bit code, in fp32; the index is the code."""


def pack_low_first(codes: UInt8[Tensor, "N K"]) -> UInt8[Tensor, "N K//2"]:
    """Low nibble = even column, high nibble = odd column (compressed-tensors, OCP MX on GPUs)."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def pack_high_first(codes: UInt8[Tensor, "N K"]) -> UInt8[Tensor, "N K//2"]:
    """High nibble = even column, low nibble = odd column (bitsandbytes)."""
    return (codes[:, 0::2] << 4) | codes[:, 1::2]


@functools.cache
def pair_table(values: Values, low_first: bool, device: torch.device) -> Tensor:
    """Byte to (even column, odd column): two fp32 values viewed as one int64, shape [256]."""
    value = torch.tensor(values, dtype=torch.float32)  # [16]
    byte = torch.arange(256)  # [256]
    low, high = value[byte & 15], value[byte >> 4]  # [256]
    pairs = torch.stack((low, high) if low_first else (high, low), dim=1)  # [256, 2]
    return pairs.view(torch.int64).flatten().to(device)


def dequantize_rows(
    codes: UInt8[Tensor, "N half"],
    scale: Callable[[slice], Float[Tensor, "n blocks"]],
    table: Tensor,
    dtype: torch.dtype,
) -> Float[Tensor, "N 2*half"]:
    """Give value(code) * scale in fp32, rounded once to `dtype`; a chunk of rows at a time.

    Args:
        codes: Packed codes.
        scale: The fp32 block scales of a slice of rows.
        table: `pair_table` of the format, on the codes' device.
        dtype: float32, bfloat16 or float16.
    """
    check_dtype(dtype)
    rows, half = codes.shape
    out = torch.empty(rows, 2 * half, dtype=dtype, device=codes.device)
    for chunk in row_chunks((rows, 2 * half), codes.device):
        index = codes[chunk].flatten().int()  # [n * K/2]
        values = table.index_select(0, index).view(torch.float32)  # [n * K]
        factors = scale(chunk)  # [n, K/block]
        blocks = values.view(*factors.shape, -1)  # [n, K/block, block]
        target = out[chunk].view(blocks.shape)
        if dtype == torch.float32:
            torch.mul(blocks, factors[..., None], out=target)
        else:
            target.copy_(blocks.mul_(factors[..., None]))
    return out
