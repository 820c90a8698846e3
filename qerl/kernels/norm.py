"""Residual addition and RMSNorm in one pass, with the sum of a split matmul before it.

    residual += bf16(y);  out = residual / rms(residual) * weight

The weight is read in fp32 on every launch, so noise added to it in place acts at once, also in a
captured CUDA graph. Bound by launch latency in decode: a token is one program.
"""

# Bodies of jitted functions are Triton, not Python: they carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.language.extra import cuda as tlc

from qerl.kernels.launch import carve_shared, pdl_options, runs_kernels
from qerl.kernels.layout import mma_order
from qerl.kernels.parts import Parts, load_parts, mma_column


def add_rms_norm_reference(
    parts: Parts | None,
    residual: Float[Tensor, "M D"],
    weight: Float[Tensor, " D"],
    eps: float,
    *,
    order: str = "natural",
) -> tuple[Float[Tensor, "M D"], Float[Tensor, "M D"]]:
    """The specification: (new residual, normed rows in `order`)."""
    if parts is not None:
        y = parts.total()
        residual = (residual.float() + y.to(residual.dtype).float()).to(residual.dtype)
    wide = residual.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # [M, 1]
    out = (wide * scale * weight).to(residual.dtype)
    return residual, mma_order(out) if order == "mma" else out


@triton.jit(do_not_specialize=["M", "SPLIT"])
def _norm_kernel(  # noqa: PLR0913
    dense_ptr,
    cut_ptr,
    M,
    N,
    FIRST,
    SPLIT,
    residual_ptr,
    weight_ptr,
    out_ptr,
    EPS,
    ADD: tl.constexpr,
    MMA: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tlc.gdc_launch_dependents()
    row = tl.program_id(0)
    col = tl.arange(0, B)
    mask = col < N
    weight = tl.load(weight_ptr + col, mask=mask, other=0.0)
    if PDL:
        tlc.gdc_wait()
    at = residual_ptr + row * N + col
    r = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        y = load_parts(dense_ptr, cut_ptr, row, col, mask, M, N, FIRST, SPLIT)
        r += y.to(residual_ptr.dtype.element_ty).to(tl.float32)
        kept = r.to(residual_ptr.dtype.element_ty)
        tl.store(at, kept, mask=mask)
        r = kept.to(tl.float32)
    x = r * tl.rsqrt(tl.sum(r * r, 0) / N + EPS) * weight
    place = col
    if MMA:
        place = mma_column(col)
    tl.store(out_ptr + row * N + place, x.to(out_ptr.dtype.element_ty), mask=mask)


def add_rms_norm(
    parts: Parts | None,
    residual: Float[Tensor, "M D"],
    weight: Float[Tensor, " D"],
    eps: float,
    out: Float[Tensor, "rows D"],
    *,
    order: str = "natural",
    pdl: int = 1,
) -> Float[Tensor, "rows D"]:
    """Normed rows in the first M rows of `out`; `residual` is updated in place.

    Args:
        parts: output of the o or down projection; None to norm the residual as it is.
        residual: bf16 (fp32 in tests), contiguous.
        weight: fp32.
        eps: of the norm.
        out: M rows or more; the others are left alone.
        order: ``mma`` for the column order of the wgmma kernel.
        pdl: programmatic dependent launch.
    """
    m, n = residual.shape
    if out.shape[0] < m or out.shape[1] != n:
        raise ValueError(f"out {tuple(out.shape)}: it takes {m} rows of {n} columns")
    if weight.dtype != torch.float32:
        raise ValueError(f"weight {weight.dtype}: norms are fp32, noise of 1e-4 is lost in bf16")
    if not runs_kernels(residual):
        kept, normed = add_rms_norm_reference(parts, residual, weight, eps, order=order)
        residual.copy_(kept)
        out[:m] = normed
        return out
    some = parts or Parts.of(residual)
    kernel = _norm_kernel[(m,)](
        *some.arguments(),
        residual,
        weight,
        out,
        eps,
        ADD=parts is not None,
        MMA=order == "mma",
        B=triton.next_power_of_2(n),
        PDL=pdl,
        num_warps=16 if n > 2048 else 8,
        **pdl_options(pdl),
    )
    if order == "mma":
        carve_shared(kernel)
    return out
