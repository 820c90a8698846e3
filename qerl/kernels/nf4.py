"""NF4 weights to bf16, bitwise what the format says: from the checkpoint's bytes and from tiles.

``w = NF4_VALUES[code] * (dynamic[absmax byte] * nested_absmax + nested_offset)``, in fp32. Tiles
(`layout_nf4`) hold the bracket in fp32. Training and prefill multiply the result with cuBLAS, and
so does decode where a weight is not whole tiles.
"""

# Bodies of jitted functions are Triton, not Python: they carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from functools import cache

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from qerl.kernels.launch import runs_kernels
from qerl.kernels.layout_nf4 import TiledNF4
from qerl.quant.nf4 import BLOCK_SIZE, NESTED_BLOCK_SIZE, NF4_VALUES, dynamic_values
from qerl.quant.packed import PackedWeight


def dequantize_nf4_reference(packed: PackedWeight) -> Float[Tensor, "N K"]:
    """The specification: the format's own arithmetic."""
    return packed.dequantize(torch.bfloat16)


@triton.jit
def _nf4_kernel(  # noqa: PLR0913
    codes_ptr,
    absmax_ptr,
    nested_ptr,
    offset_ptr,
    value_ptr,
    dynamic_ptr,
    out_ptr,
    TOTAL,
    DOUBLE: tl.constexpr,
    BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
    B: tl.constexpr,
):
    """TOTAL bytes of codes; a byte is two neighbouring weights, high nibble first."""
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    mask = i < TOTAL
    byte = tl.load(codes_ptr + i, mask=mask, other=0).to(tl.int32)
    block = i // (BLOCK // 2)
    scale = tl.load(absmax_ptr + block, mask=mask, other=0)
    if DOUBLE:
        nested = tl.load(nested_ptr + block // NESTED, mask=mask, other=0.0)
        scale = tl.load(dynamic_ptr + scale.to(tl.int32)) * nested + tl.load(offset_ptr)
    high = tl.load(value_ptr + (byte >> 4)) * scale
    low = tl.load(value_ptr + (byte & 15)) * scale
    pair = tl.join(high, low).reshape(2 * B)
    at = tl.program_id(0).to(tl.int64) * 2 * B + tl.arange(0, 2 * B)
    tl.store(out_ptr + at, pair.to(out_ptr.dtype.element_ty), mask=at < 2 * TOTAL)


@cache
def _values(device: torch.device) -> Float[Tensor, "16"]:
    return torch.tensor(NF4_VALUES, device=device)


def dequantize_nf4(
    packed: PackedWeight, out: Float[Tensor, "N K"] | None = None
) -> Float[Tensor, "N K"]:
    """The bf16 matrix of an NF4 weight, equal to `packed.dequantize` bit for bit.

    Args:
        packed: format ``nf4``, with or without double quantisation.
        out: bf16 (fp32 in tests), contiguous, to write into.
    """
    if packed.format.name != "nf4":
        raise ValueError(f"format {packed.format.name}: this reads nf4; tile the E2M1 formats")
    codes, absmax = packed.tensors["codes"], packed.tensors["absmax"]
    if out is None:
        out = torch.empty(packed.shape, dtype=torch.bfloat16, device=codes.device)
    if not runs_kernels(codes):
        return out.copy_(dequantize_nf4_reference(packed))
    double = absmax.dtype == torch.uint8
    _nf4_kernel[(triton.cdiv(codes.numel(), 1024),)](
        codes,
        absmax,
        packed.tensors["nested_absmax"] if double else absmax,
        packed.tensors["nested_offset"] if double else absmax,
        _values(codes.device),
        dynamic_values(codes.device) if double else absmax,
        out,
        codes.numel(),
        DOUBLE=double,
        BLOCK=BLOCK_SIZE,
        NESTED=NESTED_BLOCK_SIZE,
        B=1024,
        num_warps=4,
        enable_fp_fusion=False,  # torch rounds the product before it adds
    )
    return out


@triton.jit
def _tiles_kernel(words_ptr, absmax_ptr, value_ptr, out_ptr, K, BLOCKS, KB: tl.constexpr):
    """One program: 32 rows x 64 KB columns. Words [N/32, BLOCKS, 2 b, 8 r, 4 c, 2 h, 2 q]."""
    tile = tl.program_id(1)
    block = tl.program_id(0) * KB
    base = (tile * BLOCKS + block).to(tl.int64)
    w = tl.load(words_ptr + base * 256 + tl.arange(0, KB * 256), eviction_policy="evict_first")
    s = tl.load(absmax_ptr + base * 32 + tl.arange(0, KB * 32), eviction_policy="evict_first")
    s = s.reshape(KB // 2, 2, 8, 2, 2).permute(0, 3, 1, 2, 4)  # kk, k, b, r, h
    code = (w.reshape(KB * 256, 1) >> (4 * tl.arange(0, 8))[None, :]) & 15
    level = tl.load(value_ptr + code).reshape(KB, 2, 8, 4, 2, 16)  # k, b, r, c, h, column
    out = (level * s.reshape(KB, 2, 8, 1, 2, 1)).to(out_ptr.dtype.element_ty)
    out = out.permute(1, 4, 2, 0, 3, 5).reshape(32, 64 * KB)  # b, h, r | k, c, column
    row = tile * 32 + tl.arange(0, 32)
    col = block * 64 + tl.arange(0, 64 * KB)
    tl.store(out_ptr + row[:, None].to(tl.int64) * K + col[None, :], out)


def dequantize_tiles(weight: TiledNF4, out: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """`layout_nf4.dequantize_reference` of a weight on a GPU, bit for bit, into `out`."""
    n, k = weight.shape
    blocks = 4 if k % 256 == 0 else 2  # 64-column blocks a program
    _tiles_kernel[(k // (64 * blocks), n // 32)](
        *weight.parts(), _values(weight.device), out, k, k // 64, KB=blocks, num_warps=4
    )
    return out
