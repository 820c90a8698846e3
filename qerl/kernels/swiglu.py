"""silu(gate) * up from the stacked gate_up projection, with the sum of its parts.

Bound by launch latency in decode; the sum over the parts of K costs no launch of its own.
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


def silu_mul_reference(parts: Parts, *, order: str = "natural") -> Float[Tensor, "M F"]:
    """The specification: gate and up are rounded to the dtype of y before they are used."""
    gate, up = parts.total().to(parts.dense.dtype).float().chunk(2, dim=1)  # [M, F]
    out = (torch.nn.functional.silu(gate) * up).to(parts.dense.dtype)
    return mma_order(out) if order == "mma" else out


@triton.jit(do_not_specialize=["M", "SPLIT"])
def _silu_mul_kernel(  # noqa: PLR0913
    dense_ptr,
    cut_ptr,
    M,
    N,
    FIRST,
    SPLIT,
    out_ptr,
    MMA: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tlc.gdc_launch_dependents()
        tlc.gdc_wait()
    F = N // 2
    row = tl.program_id(1)
    col = tl.program_id(0) * B + tl.arange(0, B)
    mask = col < F
    gate = load_parts(dense_ptr, cut_ptr, row, col, mask, M, N, FIRST, SPLIT)
    up = load_parts(dense_ptr, cut_ptr, row, col + F, mask, M, N, FIRST, SPLIT)
    gate = gate.to(out_ptr.dtype.element_ty).to(tl.float32)
    up = up.to(out_ptr.dtype.element_ty).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    place = col
    if MMA:
        place = mma_column(col)
    tl.store(out_ptr + row * F + place, y.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(
    parts: Parts,
    out: Float[Tensor, "rows F"],
    *,
    order: str = "natural",
    pdl: int = 1,
) -> Float[Tensor, "rows F"]:
    """silu(gate) * up in the first M rows of `out`.

    Args:
        parts: of the stacked projection [gate; up], N = 2 F.
        out: bf16 (fp32 in tests); M rows or more.
        order: column order of `out`.
        pdl: programmatic dependent launch.
    """
    m, n = parts.dense.shape
    if out.shape[1] * 2 != n or out.shape[0] < m:
        raise ValueError(f"out {tuple(out.shape)}: gate_up {(m, n)} gives {m} rows of {n // 2}")
    if not runs_kernels(out):
        out[:m] = silu_mul_reference(parts, order=order)
        return out
    kernel = _silu_mul_kernel[(triton.cdiv(n // 2, 1024), m)](
        *parts.arguments(),
        out,
        MMA=order == "mma",
        B=1024,
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )
    if order == "mma":
        carve_shared(kernel)
    return out


def gate_mul_reference(
    gate: Float[Tensor, "S F"], up: Float[Tensor, "S F"]
) -> Float[Tensor, "S F"]:
    """The specification: silu(gate) is rounded to the dtype of `gate` before it is multiplied."""
    return torch.nn.functional.silu(gate) * up


@triton.jit
def _gate_mul_kernel(gate_ptr, up_ptr, TOTAL, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    mask = at < TOTAL
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(gate_ptr.dtype.element_ty).to(tl.float32)
    tl.store(gate_ptr + at, (silu * up).to(gate_ptr.dtype.element_ty), mask=mask)


def gate_mul_(gate: Float[Tensor, "S F"], up: Float[Tensor, "S F"]) -> Float[Tensor, "S F"]:
    """silu(gate) * up in the place of `gate`, rounded where the policy's own SwiGLU rounds.

    Args:
        gate: bf16 (fp32 in tests), contiguous.
        up: likewise.
    """
    if gate.shape != up.shape or not (gate.is_contiguous() and up.is_contiguous()):
        raise ValueError(f"gate {tuple(gate.shape)}, up {tuple(up.shape)}: alike and contiguous")
    if not runs_kernels(gate):
        return gate.copy_(gate_mul_reference(gate, up))
    total = gate.numel()
    _gate_mul_kernel[(triton.cdiv(total, 4096),)](gate, up, total, B=4096, num_warps=8)
    return gate
