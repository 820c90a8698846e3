"""LoRA in decode: a product with the stacked A beside the matmul, and B added in its epilogue.

    a = x [A_1; A_2; ..]ᵀ   (`shrink`: q, k, v share one product, gate and up another)
    y_i += a_i B_iᵀ         (the end of the 4-bit matmuls; `expand` after a dense one)

`shrink` is launched right before the matmul. It waits for x and then releases the matmul at once,
so both run together; the matmul waits for `shrink` when it needs a, at its end. B carries alpha /
rank. Adapters are updated in place in these buffers; captured graphs stay valid.
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
    """The second half of an adapter: a Bᵀ, to be added to the columns of a stacked matmul."""

    a: Float[Tensor, "M Rs"]
    """bf16 [M, members * R]: product of x and the stacked A; R is a power of two, 16 to 128."""

    b: Float[Tensor, "N R"]
    """bf16: the members' B below each other, times alpha / rank."""

    widths: tuple[int, ...]
    """Columns of y of each member, at most three; they add up to N."""

    def __post_init__(self) -> None:
        rank = self.rank
        if not 1 <= len(self.widths) <= 3 or rank not in (16, 32, 64, 128):
            raise ValueError(
                f"adapter of {len(self.widths)} members, rank {rank}: kernels take up to 3 members "
                "and a rank of 16, 32, 64 or 128; pad B with zeros, or set rollout.graphs=false"
            )

    @property
    def rank(self) -> int:
        return self.b.shape[1]

    def total(self) -> Float[Tensor, "M N"]:
        """The specification: a Bᵀ in fp32, member by member."""
        columns = self.b.float().split(list(self.widths))
        inner = self.a.float().split(self.rank, dim=1)
        return torch.cat([x @ y.T for x, y in zip(inner, columns, strict=True)], dim=1)

    def arguments(self) -> tuple[Tensor, Tensor, int, int, int]:
        """(a, b, row stride of a, end of the first member, end of the second) for kernels."""
        first = self.widths[0]
        second = first + self.widths[1] if len(self.widths) > 1 else first
        return self.a, self.b, self.a.stride(0), first, second

    @staticmethod
    def none(y: Tensor) -> tuple[Tensor, Tensor, int, int, int]:
        """What stands for `arguments` where there is no adapter; never read."""
        return y, y, 0, 0, 0


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
        # In this order: the matmul that is released here reads x without a wait of its own.
        tlc.gdc_wait()
        tlc.gdc_launch_dependents()
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
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)
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
            tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)
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
    """A = x Aᵀ for the rows of `out`, accumulated in fp32.

    Args:
        x: bf16; M rows or more, columns in `order`.
        stacked: bf16, the members' A below each other, natural column order.
        out: bf16, the dtype in which the trainer hands it on (fp32 in tests).
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
        num_stages=3,
        **pdl_options(pdl),
    )
    if order == "mma":
        carve_shared(kernel)
    return out


@triton.jit(do_not_specialize=["M", "FIRST", "SECOND"])
def _expand_kernel(  # noqa: PLR0913
    y_ptr,
    a_ptr,
    b_ptr,
    STRIDE,
    FIRST,
    SECOND,
    M,
    N,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (column tile, token tile): y += a Bᵀ."""
    if PDL:
        tlc.gdc_launch_dependents()
    row = (tl.program_id(1) * BM + tl.arange(0, BM))[:, None]
    start = tl.program_id(0) * BN
    col = start + tl.arange(0, BN)
    j = tl.arange(0, R)
    b = tl.load(b_ptr + col[None, :] * R + j[:, None], mask=(col < N)[None, :], other=0.0)
    member = (col >= FIRST).to(tl.int32) + (col >= SECOND).to(tl.int32)
    last = tl.minimum(start + BN, N) - 1
    low = (start >= FIRST).to(tl.int32) + (start >= SECOND).to(tl.int32)
    high = (last >= FIRST).to(tl.int32) + (last >= SECOND).to(tl.int32)
    if PDL:
        tlc.gdc_wait()
    at = y_ptr + row * N + col[None, :]
    mask = (row < M) & (col < N)[None, :]
    y = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for i in range(low, high + 1):
        a = tl.load(a_ptr + row * STRIDE + i * R + j[None, :], mask=row < M, other=0.0)
        own = tl.where((member == i)[None, :], b, 0.0).to(b.dtype)
        y = tl.dot(a, own, y, input_precision="ieee")
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=mask)


def expand(y: Float[Tensor, "M N"], lora: Expand, *, pdl: int = 1) -> Float[Tensor, "M N"]:
    """Y += a Bᵀ, in place: the adapter of a matmul that has no epilogue of ours.

    Args:
        y: bf16 (fp32 in tests), contiguous.
        lora: its a and b in the dtype of y.
        pdl: programmatic dependent launch.
    """
    m, n = y.shape
    if lora.a.shape[0] != m or lora.b.shape[0] != n:
        raise ValueError(
            f"y {(m, n)}, a {tuple(lora.a.shape)}, B {tuple(lora.b.shape)}: a has the rows of y "
            "and B its columns"
        )
    if not runs_kernels(y):
        return y.copy_(y.float() + lora.total())
    a, b, *places = lora.arguments()
    rows = 16 if m <= 16 else 32
    _expand_kernel[(triton.cdiv(n, 128), triton.cdiv(m, rows))](
        y,
        a,
        b,
        *places,
        m,
        n,
        R=lora.rank,
        BM=rows,
        BN=128,
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )
    return y
