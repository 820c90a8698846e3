"""Rotary embedding of whole prompts in place, with the head norm (Qwen3) before it.

    (left, right) -> (left cos - right sin, right cos + left sin)   per head, half-split order

Bound by memory: every head is read and written once. Decode has `rope` instead, which also sums
the parts of its projection and stores pages.
"""

# Bodies of jitted functions are Triton, not Python: they carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from qerl.kernels.launch import runs_kernels


def rotate_reference(
    x: Float[Tensor, "S H Dh"],
    cos: Float[Tensor, "S 1 Dh2"],
    sin: Float[Tensor, "S 1 Dh2"],
    weight: Float[Tensor, " Dh"] | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, "S H Dh"]:
    """The specification: normed heads are rounded to the dtype of `x` before they are turned."""
    wide = x.float()
    if weight is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
        wide = wide.to(x.dtype).float()
    left, right = wide.chunk(2, dim=-1)  # [S, H, Dh/2]
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
    return turned.to(x.dtype)


@triton.jit
def _rotate_kernel(  # noqa: PLR0913
    x_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    EPS,
    H,
    HB: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
):
    """Program (token, HB heads)."""
    HALF: tl.constexpr = D // 2
    row = tl.program_id(0)
    head = tl.program_id(1) * HB + tl.arange(0, HB)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    mask = (head < H) & (lane < HALF)
    at = x_ptr + (row.to(tl.int64) * H + head) * D + lane
    left = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        scale = tl.rsqrt(square / D + EPS)[:, None]
        left = left * scale * tl.load(weight_ptr + lane)
        right = right * scale * tl.load(weight_ptr + HALF + lane)
        left = left.to(x_ptr.dtype.element_ty).to(tl.float32)
        right = right.to(x_ptr.dtype.element_ty).to(tl.float32)
    cos = tl.load(cos_ptr + row * HALF + lane)
    sin = tl.load(sin_ptr + row * HALF + lane)
    turned = left * cos - right * sin
    right = right * cos + left * sin
    tl.store(at, turned.to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(at + HALF, right.to(x_ptr.dtype.element_ty), mask=mask)


def rotate_(
    x: Float[Tensor, "S H Dh"],
    cos: Float[Tensor, "S 1 Dh2"],
    sin: Float[Tensor, "S 1 Dh2"],
    weight: Float[Tensor, " Dh"] | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, "S H Dh"]:
    """Heads of `x`, turned in place by the angles of their positions.

    Args:
        x: bf16 (fp32 in tests), contiguous; Dh a power of two.
        cos: fp32, contiguous, of each token's angles; Dh2 = Dh / 2.
        sin: likewise.
        weight: fp32 weight of the norm over a head; None where the model has none.
        eps: of that norm.
    """
    rows, heads, d = x.shape
    if d & (d - 1) or not x.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)}: contiguous, heads of a power of two")
    if not (cos.is_contiguous() and sin.is_contiguous() and cos.shape[0] == rows):
        raise ValueError(f"cos {tuple(cos.shape)}: contiguous, one row of angles a token")
    if not runs_kernels(x):
        return x.copy_(rotate_reference(x, cos, sin, weight, eps))
    block = min(triton.next_power_of_2(heads), 32)
    _rotate_kernel[(rows, triton.cdiv(heads, block))](
        *(x, cos, sin, x if weight is None else weight, eps, heads),
        HB=block,
        D=d,
        NORM=weight is not None,
        num_warps=4,
    )
    return x
