"""Rotary embedding of q and k, and k and v written into their pages, in one pass over qkv.

    (left, right) -> (left cos - right sin, right cos + left sin)   per head, half-split order

with the sum of the projection's parts, its bias and the head norm (Qwen3) before it.
Pages: keys and values of a layer are [Hk, slots, Dh]; a slot is page * page size + offset.
"""

# Bodies of jitted functions are Triton, not Python: they carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from dataclasses import dataclass

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra import cuda as tlc

from qerl.kernels.launch import carve_shared, pdl_options, runs_kernels
from qerl.kernels.parts import Parts, load_parts
from qerl.kernels.rotate import rotate_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What turns a qkv projection into rotated heads."""

    heads: int
    """H, query heads."""

    kv_heads: int
    """Hk."""

    head_dim: int
    """Dh, a power of two."""

    cos: Float[Tensor, "P half"]
    """fp32 [positions, Dh/2]; the table that training uses."""

    sin: Float[Tensor, "P half"]
    """fp32 [positions, Dh/2]."""

    bias: Float[Tensor, " N"] | None = None
    """Bias of the stacked projection."""

    q_norm: Float[Tensor, " Dh"] | None = None
    """fp32 weight of the norm over a query head (Qwen3)."""

    k_norm: Float[Tensor, " Dh"] | None = None
    """fp32 weight of the norm over a key head."""

    eps: float = 1e-6
    """Of the head norms."""


def rope_reference(
    parts: Parts, heads: Heads, positions: Int[Tensor, " M"]
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification: rotated q [M, H, Dh] and k [M, Hk, Dh], and v [M, Hk, Dh]."""
    y = parts.total()
    if heads.bias is not None:
        y = y + heads.bias.float()
    y = y.to(parts.dense.dtype).unflatten(1, (-1, heads.head_dim))  # [M, H + 2 Hk, Dh]
    q, k, v = y.split((heads.heads, heads.kv_heads, heads.kv_heads), dim=1)
    cos, sin = heads.cos[positions][:, None], heads.sin[positions][:, None]  # [M, 1, Dh/2]
    q = rotate_reference(q, cos, sin, heads.q_norm, heads.eps)
    return q, rotate_reference(k, cos, sin, heads.k_norm, heads.eps), v


@triton.jit(do_not_specialize=["M", "SPLIT"])
def _rope_kernel(  # noqa: PLR0913
    dense_ptr,
    cut_ptr,
    M,
    N,
    FIRST,
    SPLIT,
    bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    slot_ptr,
    q_ptr,
    key_ptr,
    value_ptr,
    head_stride,
    EPS,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    CARVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (head, token); heads are q, then k, then v. CARVE only tells codes apart."""
    HALF: tl.constexpr = D // 2
    if PDL:
        tlc.gdc_launch_dependents()
        tlc.gdc_wait()
    head = tl.program_id(0)
    row = tl.program_id(1)
    lane = tl.arange(0, HALF)
    col = head * D + lane
    left = load_parts(dense_ptr, cut_ptr, row, col, True, M, N, FIRST, SPLIT)
    right = load_parts(dense_ptr, cut_ptr, row, col + HALF, True, M, N, FIRST, SPLIT)
    if BIAS:
        left += tl.load(bias_ptr + col).to(tl.float32)
        right += tl.load(bias_ptr + col + HALF).to(tl.float32)
    left = left.to(q_ptr.dtype.element_ty).to(tl.float32)
    right = right.to(q_ptr.dtype.element_ty).to(tl.float32)
    if head < H + HK:
        if NORM:
            square = tl.sum(left * left, 0) + tl.sum(right * right, 0)
            scale = tl.rsqrt(square / D + EPS)
            norm_ptr = q_norm_ptr
            if head >= H:
                norm_ptr = k_norm_ptr
            left = left * scale * tl.load(norm_ptr + lane)
            right = right * scale * tl.load(norm_ptr + HALF + lane)
            left = left.to(q_ptr.dtype.element_ty).to(tl.float32)
            right = right.to(q_ptr.dtype.element_ty).to(tl.float32)
        angle = tl.load(position_ptr + row) * HALF + lane
        cos = tl.load(cos_ptr + angle)
        sin = tl.load(sin_ptr + angle)
        turned = left * cos - right * sin
        right = right * cos + left * sin
        left = turned
    left = left.to(q_ptr.dtype.element_ty)
    right = right.to(q_ptr.dtype.element_ty)
    if head < H:
        to = q_ptr + (row * H + head) * D + lane
        tl.store(to, left)
        tl.store(to + HALF, right)
    else:
        slot = tl.load(slot_ptr + row).to(tl.int64)
        kv = (head - H) % HK
        at = kv.to(tl.int64) * head_stride + slot * D + lane
        if head < H + HK:
            tl.store(key_ptr + at, left)
            tl.store(key_ptr + at + HALF, right)
        else:
            tl.store(value_ptr + at, left)
            tl.store(value_ptr + at + HALF, right)


def rope_and_store(
    parts: Parts,
    heads: Heads,
    places: tuple[Int[Tensor, " M"], Int[Tensor, " M"]],
    q: Float[Tensor, "M H Dh"],
    pages: tuple[Float[Tensor, "Hk slots Dh"], Float[Tensor, "Hk slots Dh"]],
    *,
    carve: bool = False,
    pdl: int = 1,
) -> Float[Tensor, "M H Dh"]:
    """Rotated queries in `q`; rotated keys and the values in their slots of `pages`.

    Args:
        parts: of the stacked projection [q; k; v], N = (H + 2 Hk) Dh.
        heads: sizes, rotary table, bias, head norms.
        places: int64; positions, which index the rotary table, and slots, where each token's k and
            v go. No two rows share a slot.
        q: bf16 (fp32 in tests) out.
        pages: keys and values of this layer; the last two axes contiguous.
        carve: it runs between wgmma matmuls (`launch.carve_shared`).
        pdl: programmatic dependent launch.
    """
    m, n = parts.dense.shape
    (positions, slots), (keys, values) = places, pages
    h, hk, d = heads.heads, heads.kv_heads, heads.head_dim
    if n != (h + 2 * hk) * d or d & (d - 1):
        raise ValueError(
            f"qkv has {n} columns: {h} + 2 x {hk} heads of {d} (a power of two) differ"
        )
    if not runs_kernels(q):
        turned, k, v = rope_reference(parts, heads, positions)
        keys[:, slots], values[:, slots] = k.transpose(0, 1), v.transpose(0, 1)
        return q.copy_(turned)
    if keys.stride() != values.stride() or keys.stride(2) != 1 or keys.stride(1) != d:
        raise ValueError(f"page strides {keys.stride()}: slots of a head must lie end to end")
    norm = heads.q_norm is not None
    kernel = _rope_kernel[(h + 2 * hk, m)](
        *parts.arguments(),
        heads.bias if heads.bias is not None else q,
        heads.q_norm if norm else q,
        heads.k_norm if norm else q,
        heads.cos,
        heads.sin,
        positions,
        slots,
        q,
        keys,
        values,
        keys.stride(0),
        heads.eps,
        H=h,
        HK=hk,
        D=d,
        BIAS=heads.bias is not None,
        NORM=norm,
        CARVE=carve,
        PDL=pdl,
        num_warps=2,
        **pdl_options(pdl),
    )
    if carve:
        carve_shared(kernel)
    return q
