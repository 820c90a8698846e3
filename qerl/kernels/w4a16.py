"""y = x Wᵀ with W in 4 bits, for any number of tokens: one call that picks the kernel.

================  ============================================  ===============================
tokens            kernel                                        x
================  ============================================  ===============================
1 to 8            `w4a16_gemv`: mma.sync                        natural column order
9 to 256          `w4a16_gemm`: wgmma                           `mma_order`, rows padded
above, or any     dequantise + cuBLAS (or cuBLAS on a bf16      natural column order
other GPU, CPU    shadow copy, where one is kept)
================  ============================================  ===============================

A split kernel leaves fp32 parts. `w4a16` sums them with one more kernel; the decode engine calls
`w4a16_parts` and lets the kernel that reads y (norm, rope, SiLU) sum them instead.
"""

# Bodies of jitted functions are Triton, not Python: they carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import logging
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra import cuda as tlc

from qerl.kernels.dequant import frozen_linear
from qerl.kernels.launch import carve_shared, check_rows, gpu_name, is_hopper
from qerl.kernels.layout_nf4 import Tiled
from qerl.kernels.lora import Adapter, shrink, shrink_parts
from qerl.kernels.parts import Parts, mma_column
from qerl.kernels.tiles import BUCKETS, Codes, Plan, bucket, plan_for
from qerl.kernels.w4a16_gemm import descriptors, launch_gemm
from qerl.kernels.w4a16_gemv import launch_gemv

logger = logging.getLogger(__name__)
_told: set[str] = set()


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch of the decode kernels. One serves all linears of one stream, in order."""

    partials: Float[Tensor, " P"]
    """fp32: split * M * N of the largest split linear."""

    counters: Int[Tensor, " Q"]
    """int32 zeros, one a program tile; every kernel leaves them zero."""

    x: Float[Tensor, " X"]
    """bf16: padded M * K of the widest input, for reordered columns."""

    @staticmethod
    def allocate(
        shapes: list[tuple[int, int]],
        tokens: int,
        device: torch.device | str = "cuda",
        codes: Codes = "e2m1",
    ) -> "Workspace":
        """Scratch for linears of `shapes` (N, K) and up to `tokens` rows of x."""
        device = torch.device(device)
        partials = counters = width = 1
        largest = bucket(min(tokens, BUCKETS[-1]))
        for shape in shapes:
            plans = [_plan(shape, size, device, codes) for size in BUCKETS if size <= largest]
            split = [p.split * p.tokens * shape[0] for p in plans if p.split > 1]
            partials = max([partials, *split])
            counters = max(counters, -(-shape[0] // 16))
            width = max([width, *(p.padded_tokens * shape[1] for p in plans)])
        return Workspace(
            torch.empty(partials, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
            torch.empty(width, dtype=torch.bfloat16, device=device),
        )


def _plan(shape: tuple[int, int], tokens: int, device: torch.device, codes: Codes) -> Plan:
    if not is_hopper(device):
        return Plan(kernel="dense", tokens=tokens)
    return plan_for(gpu_name(device), shape, tokens, codes)


def plan(weight: Tiled, tokens: int) -> Plan:
    """The plan for `tokens` rows of x on the weight's device."""
    return _plan(weight.shape, tokens, weight.device, weight.codes)


@triton.jit
def _mma_order_kernel(x_ptr, out_ptr, K, B: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tlc.gdc_launch_dependents()
        tlc.gdc_wait()
    row = tl.program_id(1)
    col = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + row * K + col, mask=col < K)
    tl.store(out_ptr + row * K + mma_column(col), x, mask=col < K)


@triton.jit(do_not_specialize=["M", "SPLIT"])
def _sum_kernel(part_ptr, y_ptr, M, N, FIRST, SPLIT, B: tl.constexpr, PDL: tl.constexpr):
    """y[m, FIRST + c] = sum over s of part[s, m, c], s ascending."""
    if PDL:
        tlc.gdc_launch_dependents()
        tlc.gdc_wait()
    row = tl.program_id(1)
    col = tl.program_id(0) * B + tl.arange(0, B)
    cut = N - FIRST
    total = tl.zeros((B,), tl.float32)
    for s in range(SPLIT):
        total += tl.load(part_ptr + (s * M + row) * cut + col, mask=col < cut, other=0.0)
    tl.store(y_ptr + row * N + FIRST + col, total.to(y_ptr.dtype.element_ty), mask=col < cut)


def to_mma_order(
    x: Float[Tensor, "M K"], out: Float[Tensor, "rows K"], pdl: int = 1
) -> Float[Tensor, "rows K"]:
    """`mma_order` of x in the first M rows of `out`."""
    m, k = x.shape
    grid = (triton.cdiv(k, 1024), m)
    kernel = _mma_order_kernel[grid](x, out, k, B=1024, PDL=pdl, num_warps=4, launch_pdl=pdl > 0)
    carve_shared(kernel)
    return out


def w4a16_parts(
    x: Float[Tensor, "rows K"],
    weight: Tiled,
    tokens: int,
    how: Plan,
    workspace: Workspace,
    out: Float[Tensor, "M N"],
    adapter: Adapter | None = None,
) -> Parts:
    """Y as the parts that the kernel leaves; the kernel that reads y adds them up.

    Args:
        x: bf16 in the order `how.order`; for ``mma`` with the rows padded to `how.token_tile` (what
            the rows past `tokens` hold is never used).
        weight: tiled weight on a Hopper GPU.
        tokens: M, the rows of x that count.
        how: a plan of kernel ``gemv`` or ``gemm``.
        workspace: scratch; the parts live in its `partials` until the next split linear.
        out: bf16 [M, N]; the columns that are not cut are written here.
        adapter: LoRA of this weight, to be added; its `a` has `tokens` rows.
    """
    n = weight.shape[0]
    if how.kernel == "gemv":
        if adapter is not None:
            shrink_parts(x, adapter, pdl=how.pdl)
        space = (workspace.partials, workspace.counters)
        launch_gemv(x[:tokens], weight, out, *space, how, adapter)
        return Parts(out, workspace.partials, n, 0)
    if adapter is not None:
        shrink(x, adapter, order=how.order, pdl=how.pdl)
    operands = descriptors(x, weight, how.token_tile, how.row_tiles)
    carve_shared(launch_gemm(operands, weight, out, workspace.partials, tokens, how, adapter))
    if how.split == 1:
        return Parts(out, workspace.partials, n, 0)
    return Parts(out, workspace.partials, how.whole * 64 * how.row_tiles, how.split)


def w4a16(
    x: Float[Tensor, "M K"],
    weight: Tiled,
    out: Float[Tensor, "M N"] | None = None,
    *,
    workspace: Workspace | None = None,
    shadow: Float[Tensor, "N K"] | None = None,
    how: Plan | None = None,
) -> Float[Tensor, "M N"]:
    """Y = x Wᵀ, accumulated in fp32, bf16 out. Deterministic: equal inputs give equal bits.

    Args:
        x: bf16 [M, K], natural column order, contiguous.
        weight: tiled weight.
        out: bf16 [M, N] to write into; with it and `workspace` nothing is allocated.
        workspace: scratch, `Workspace.allocate`; made for this call where absent.
        shadow: bf16 copy of the weight. Above 128 tokens cuBLAS on it is faster.
        how: a plan other than the table's.
    """
    check_rows("x", x, weight.shape[1], x.dtype if not x.is_cuda else torch.bfloat16)
    m, n = x.shape[0], weight.shape[0]
    how = how or plan(weight, m)
    if shadow is not None and m > 128:
        return torch.mm(x, shadow.t(), out=out) if out is not None else torch.mm(x, shadow.t())
    if how.kernel == "dense":
        _tell(f"{weight.shape} x {m} tokens on {weight.device}: dequantise + matmul")
        y = frozen_linear(x, weight)
        return y if out is None else out.copy_(y)
    if out is None:
        out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    space = workspace or Workspace.allocate([weight.shape], m, x.device, weight.codes)
    rows = x
    if how.order == "mma":
        padded = how.rows_read(m)
        rows = space.x[: padded * x.shape[1]].view(padded, x.shape[1])
        to_mma_order(x, rows, how.pdl)
    return sum_parts(w4a16_parts(rows, weight, m, how, space, out), how.pdl)


def sum_parts(parts: Parts, pdl: int = 1) -> Float[Tensor, "M N"]:
    """`parts.dense`, with the sums of the cut columns written into it."""
    if parts.split:
        dense, cut, m, n, first, split = parts.arguments()
        grid = (triton.cdiv(n - first, 1024), m)
        kernel = _sum_kernel[grid](
            cut, dense, m, n, first, split, B=1024, PDL=pdl, num_warps=4, launch_pdl=pdl > 0
        )
        carve_shared(kernel)
    return parts.dense


def _tell(message: str) -> None:
    if message not in _told:
        _told.add(message)
        logger.info("w4a16: %s", message)
