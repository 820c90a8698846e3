"""Tiled 4-bit weights to bf16, bitwise what the format says, and the frozen linear on top.

``w = value(code) * (block_scale * tensor_scale)``, in fp32, rounded once. Bound by memory: 0.5625
bytes read and 2 written a weight. Training and prefill dequantise into a scratch matrix and call
cuBLAS: at 8192 tokens that costs 5% over a bf16 weight and none of its memory.
"""

# Bodies of jitted functions are Triton, not Python: they carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from qerl.kernels import layout_nf4
from qerl.kernels.layout import dequantize_reference
from qerl.kernels.layout_nf4 import Tiled, TiledNF4
from qerl.kernels.nf4 import dequantize_tiles


@triton.jit
def _dequantize_kernel(
    words_ptr, scales_ptr, tensor_scale_ptr, out_ptr, N, K, BLOCKS, KB: tl.constexpr
):
    """One program: 32 rows x 64 KB columns. Words [N/32, BLOCKS, 2 b, 8 r, 4 c, 2 h, 2 q]."""
    tile = tl.program_id(1)
    block = tl.program_id(0) * KB
    base = (tile * BLOCKS + block).to(tl.int64)
    w = tl.load(words_ptr + base * 256 + tl.arange(0, KB * 256), eviction_policy="evict_first")
    s = tl.load(scales_ptr + base * 32 + tl.arange(0, KB * 32), eviction_policy="evict_first")
    g = tl.load(tensor_scale_ptr + tile)
    byte = (s.reshape(KB * 32, 1) >> (8 * tl.arange(0, 4))[None, :]) & 255
    lifted = (((byte << 4) + 0x7580) << 16).to(tl.float32, bitcast=True)  # scale * 2^118
    step = (lifted * (1.0 / (1 << 59)) * (1.0 / (1 << 59))) * g
    step = step.reshape(KB // 2, 2, 8, 4, 2, 2).permute(0, 4, 1, 2, 3, 5)  # kk, k, b, r, c, h
    step = step.reshape(KB, 2, 8, 4, 2, 1)
    p0 = w & -0x7E3F7E40  # 0x81C081C0 as int32
    p1 = (w << 6) & -0x7E3F7E40
    p2 = ((w << 10) | ((w >> 22) & 0x3FF)) & -0x7E3F7E40
    p3 = ((w << 4) & -0x7E7F7E80) | ((w >> 4) & 0x00400040)  # 0x81808180 as int32
    pairs = tl.join(tl.join(p0, p2), tl.join(p1, p3))  # .., pair
    low = (pairs << 16).to(tl.float32, bitcast=True)
    high = (pairs & -65536).to(tl.float32, bitcast=True)
    unit = tl.join(low, high) * 8.507059173023462e37  # 2^126
    unit = unit.reshape(KB, 2, 8, 4, 2, 16)  # k, b, r, c, h, column
    out = (unit * step).to(out_ptr.dtype.element_ty)
    out = out.permute(1, 4, 2, 0, 3, 5).reshape(32, 64 * KB)  # b, h, r | k, c, column
    row = tile * 32 + tl.arange(0, 32)
    col = block * 64 + tl.arange(0, 64 * KB)
    mask = (row < N)[:, None] & (col < K)[None, :]
    tl.store(out_ptr + row[:, None].to(tl.int64) * K + col[None, :], out, mask=mask)


def specified(weight: Tiled) -> Float[Tensor, "N K"]:
    """The specification of `dequantize`: the torch reference of the weight's codes."""
    if isinstance(weight, TiledNF4):
        return layout_nf4.dequantize_reference(weight)
    return dequantize_reference(weight)


def dequantize(weight: Tiled, out: Float[Tensor, "N K"] | None = None) -> Float[Tensor, "N K"]:
    """The bf16 matrix [N, K] of `weight`. Equal to `specified` bit for bit.

    Args:
        weight: tiled weight of either code; a CPU weight takes the torch reference.
        out: bf16 [N, K], contiguous, to write into.
    """
    n, k = weight.shape
    if out is None:
        out = torch.empty(n, k, dtype=torch.bfloat16, device=weight.device)
    if out.shape != (n, k) or out.dtype != torch.bfloat16 or not out.is_contiguous():
        raise ValueError(f"out {tuple(out.shape)} {out.dtype}: pass contiguous bf16 {(n, k)}")
    if not weight.words.is_cuda:
        return out.copy_(specified(weight))
    if isinstance(weight, TiledNF4):
        return dequantize_tiles(weight, out)
    rows, cols = weight.padded
    blocks = 4 if cols % 256 == 0 else 2  # 64-column blocks a program
    _dequantize_kernel[(cols // (64 * blocks), rows // 32)](
        *weight.parts(), out, n, k, cols // 64, KB=blocks, num_warps=4
    )
    return out


class _FrozenLinear(torch.autograd.Function):
    """y = x Wᵀ with W dequantised in each pass and never kept."""

    @staticmethod
    def forward(ctx, x, weight, scratch):
        ctx.weight, ctx.scratch = weight, scratch
        dense = dequantize(weight, scratch)  # [N, K]
        return torch.nn.functional.linear(x, dense.to(x.dtype))

    @staticmethod
    def backward(ctx, grad):
        dense = dequantize(ctx.weight, ctx.scratch)  # [N, K]
        return grad @ dense.to(grad.dtype), None, None


def frozen_linear(
    x: Float[Tensor, "*rows K"],
    weight: Tiled,
    scratch: Float[Tensor, "N K"] | None = None,
) -> Float[Tensor, "*rows N"]:
    """Y = x Wᵀ for training and prefill: dequantise, cuBLAS, drop. dx = dy W likewise; no dW.

    Args:
        x: [.., K] in bf16 (fp32 on a CPU).
        weight: frozen; it gets no gradient.
        scratch: bf16 [N, K] that successive layers of one stream may share.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has {x.shape[-1]} columns: the weight {weight.shape} needs {weight.shape[1]}"
        )
    y: Tensor = _FrozenLinear.apply(x, weight, scratch)
    return y
