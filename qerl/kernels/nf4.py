"""NF4 weights to bf16, bitwise what the format says. Their matmuls are cuBLAS on the result.

``w = NF4_VALUES[code] * (dynamic[absmax byte] * nested_absmax + nested_offset)``, in fp32. NF4 has
no decode matmul here: its 16 levels need a table where E2M1 needs nine integer operations for eight
weights, which is why it is kept for comparisons with QLoRA.
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
