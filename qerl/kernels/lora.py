"""LoRA in decode: one product with the stacked A, and B applied where y is read.

    a = x [A_1; A_2; ..]ᵀ   (this file: q, k, v share one product, gate and up another)
    y_i += a_i B_i          (inside the norm, rope and SiLU kernels: `parts.add_lora`)

B carries alpha / rank and lies transposed, [R, N], so that a row is read in one piece. Adapters are
updated in place in these buffers; captured graphs stay valid.
"""

# Bodies of jitted functions are Triton, not Python: they carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra import cuda as tlc

from qerl.kernels.launch import carve_shared, pdl_options, runs_kernels
from qerl.kernels.layout import natural_order
from qerl.kernels.parts import natural_column

# Most parts of K. A step of 128 columns takes 0.7 us and a launch 3 us (H200, 64 tokens: 6.5 us for
# K=3584 in 7 parts, 14.8 us for K=18944 in 8), so parts are short; their sum is unrolled.
SPLIT = 32


@dataclass(frozen=True, slots=True)
class Expand:
    """The second half of an adapter: a B, to be added to the columns of a stacked matmul."""

    a: Float[Tensor, "M Rs"]
    """fp32 [M, members * R]: product of x and the stacked A; R is a power of two from 16."""

    b: Float[Tensor, "R N"]
    """bf16: the members' B side by side, transposed, times alpha / rank."""

    widths: tuple[int, ...]
    """Columns of each member; they add up to N."""

    @property
    def rank(self) -> int:
        return self.b.shape[0]

    def total(self) -> Float[Tensor, "M N"]:
        """A B in fp32, member by member: the torch twin of `add_lora`."""
        columns = self.b.float().split(self.widths, dim=1)
        inner = self.a.float().split(self.rank, dim=1)
        return torch.cat([x @ y for x, y in zip(inner, columns, strict=True)], dim=1)

    def arguments(self) -> tuple[Tensor, Tensor, int, int]:
        """(a, b, row stride of a, rank) as kernels take them."""
        return self.a, self.b, self.a.stride(0), self.rank


def shrink_reference(
    x: Float[Tensor, "M K"], stacked: Float[Tensor, "Rs K"], order: str = "natural"
) -> Float[Tensor, "M Rs"]:
    """The specification: x Aᵀ in fp32."""
    return (natural_order(x) if order == "mma" else x).float() @ stacked.float().T


@triton.jit(do_not_specialize=["M"])
def _shrink_kernel(  # noqa: PLR0913
    x_ptr,
    a_ptr,
    part_ptr,
    counter_ptr,
    out_ptr,
    M,
    K,
    RS,
    MMA: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (rank tile, token tile, part of K); the last part of a tile sums them in order."""
    pr, pm, pk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = pm * BM + tl.arange(0, BM)
    rank = pr * BR + tl.arange(0, BR)
    steps = tl.cdiv(K, BK)
    acc = tl.zeros((BM, BR), tl.float32)
    if PDL:
        tlc.gdc_launch_dependents()
        tlc.gdc_wait()
    for i in range(steps * pk // SPLIT, steps * (pk + 1) // SPLIT):
        place = i * BK + tl.arange(0, BK)
        col = place
        if MMA:
            col = natural_column(place)
        ok = place < K
        x = tl.load(
            x_ptr + row[:, None] * K + place[None, :],
            mask=(row < M)[:, None] & ok[None, :],
            other=0.0,
        )
        a = tl.load(
            a_ptr + rank[None, :] * K + col[:, None],
            mask=(rank < RS)[None, :] & ok[:, None],
            other=0.0,
        )
        acc = tl.dot(x, a, acc, input_precision="ieee")
    at = row[:, None] * RS + rank[None, :]
    mask = (row < M)[:, None] & (rank < RS)[None, :]
    if SPLIT == 1:
        tl.store(out_ptr + at, acc, mask=mask)
    else:
        tl.store(part_ptr + pk * M * RS + at, acc, mask=mask)
        tl.debug_barrier()
        counter = counter_ptr + pr * tl.num_programs(1) + pm
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1:
            tl.debug_barrier()
            total = tl.zeros((BM, BR), tl.float32)
            # Unrolled: the loads of all parts are in flight together, one L2 latency and not SPLIT.
            for s in tl.static_range(SPLIT):
                total += tl.load(
                    part_ptr + s * M * RS + at, mask=mask, other=0.0, cache_modifier=".cg"
                )
            tl.store(out_ptr + at, total, mask=mask)
            tl.store(counter, 0)


def shrink(
    x: Float[Tensor, "rows K"],
    stacked: Float[Tensor, "Rs K"],
    out: Float[Tensor, "M Rs"],
    partials: Float[Tensor, " P"],
    counters: Int[Tensor, " Q"],
    *,
    order: str = "natural",
    pdl: int = 1,
) -> Float[Tensor, "M Rs"]:
    """A = x Aᵀ, fp32, for the rows of `out`.

    Args:
        x: bf16; M rows or more, columns in `order`.
        stacked: bf16, the members' A below each other, natural column order.
        out: fp32.
        partials: fp32 scratch, SPLIT * M * Rs; not the one of a matmul that runs beside this.
        counters: int32 zeros, one a program tile; left zero.
        order: column order of x.
        pdl: programmatic dependent launch.
    """
    m, k = out.shape[0], stacked.shape[1]
    ranks = stacked.shape[0]
    if x.shape[1] != k or out.shape[1] != ranks or x.shape[0] < m:
        raise ValueError(
            f"x {tuple(x.shape)}, A {tuple(stacked.shape)}, out {tuple(out.shape)}: "
            "x [rows, K] and A [Rs, K] give out [M, Rs] with M <= rows"
        )
    if not runs_kernels(x):
        return out.copy_(shrink_reference(x[:m], stacked, order))
    tile = min(32, max(16, triton.next_power_of_2(m)))
    split = max(1, min(SPLIT, k // 256))
    grid = (triton.cdiv(ranks, 32), triton.cdiv(m, tile), split)
    kernel = _shrink_kernel[grid](
        x,
        stacked,
        partials,
        counters,
        out,
        m,
        k,
        ranks,
        MMA=order == "mma",
        SPLIT=split,
        BM=tile,
        BR=32,
        BK=128,
        PDL=pdl,
        num_warps=4,
        num_stages=4,
        **pdl_options(pdl),
    )
    if order == "mma":
        carve_shared(kernel)
    return out
