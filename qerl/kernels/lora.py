"""LoRA in decode: a product with the stacked A beside the matmul, and B added in its epilogue.

    a = x [A_1; A_2; ..]ᵀ   (q, k, v share one product, gate and up another)
    y_i += a_i B_iᵀ         (B carries alpha / rank)

`shrink` is launched right before the matmul: it waits for x and then releases the matmul, so that
both run together; the matmul waits for `shrink` at its end and adds a Bᵀ in its epilogue. For a few
tokens `shrink` leaves parts of K that the epilogue sums. A dense matmul is followed by `expand`.

Adapters are updated in place in these buffers; captured graphs stay valid.
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


PARTS = 8
"""Most parts of K that are left to an epilogue; each tile of the matmul reads them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """LoRA of a stacked matmul, with the scratch of its first product."""

    stacked: Float[Tensor, "Rs K"]
    """bf16: the members' A below each other; Rs = members * R."""

    b: Float[Tensor, "N R"]
    """bf16: the members' B below each other, times alpha / rank; R is 16, 32, 64 or 128."""

    widths: tuple[int, ...]
    """Columns of y of each member, at most three; they add up to N."""

    a: Float[Tensor, "M Rs"]
    """bf16: x Aᵀ of the last call, unless it was left in parts."""

    partials: Float[Tensor, " P"]
    """fp32 scratch, [parts, Rs, M] in front; adapters of one stream share it."""

    counters: Int[Tensor, " Q"]
    """int32 zeros, left zero; adapters of one stream share them."""

    def __post_init__(self) -> None:
        rank = self.rank
        if not 1 <= len(self.widths) <= 3 or rank not in (16, 32, 64, 128):
            raise ValueError(
                f"adapter of {len(self.widths)} members, rank {rank}: kernels take up to 3 members "
                "and a rank of 16, 32, 64 or 128; pad B with zeros, or set rollout.graphs=false"
            )

    @staticmethod
    def scratch(
        rows: int, ranks: int, device: torch.device | str
    ) -> tuple[Float[Tensor, " P"], Int[Tensor, " Q"]]:
        """(partials, counters) for up to `rows` tokens and `ranks` rows of a stacked A."""
        partials = torch.empty(SPLIT * rows * ranks, device=device)
        tiles = -(-ranks // 32) * -(-rows // 16)
        return partials, torch.zeros(tiles, dtype=torch.int32, device=device)

    @property
    def rank(self) -> int:
        """R."""
        return self.b.shape[1]

    @property
    def parts(self) -> int:
        """Parts of K in which `shrink_parts` leaves the product."""
        return max(1, min(PARTS, self.stacked.shape[1] // 512))

    def added(self, a: Float[Tensor, "M Rs"]) -> Float[Tensor, "M N"]:
        """The specification of the second product: a Bᵀ in fp32, member by member."""
        columns = self.b.float().split(list(self.widths))
        inner = a.float().split(self.rank, dim=1)
        return torch.cat([x @ y.T for x, y in zip(inner, columns, strict=True)], dim=1)

    def places(self) -> tuple[Tensor, Tensor, int, int, int]:
        """(a, b, columns of a, end of the first member, end of the second) for kernels."""
        first = self.widths[0]
        second = first + self.widths[1] if len(self.widths) > 1 else first
        return self.a, self.b, self.a.stride(0), first, second


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
    first, last = steps * pk // SPLIT, steps * (pk + 1) // SPLIT
    place = first * BK + tl.arange(0, BK)
    col = place
    if MMA:
        col = natural_column(place)
    ap = a_ptr + rank[None, :] * K + col[:, None]
    ok = (rank < RS)[None, :] & (place < K)[:, None]
    a = tl.load(ap, mask=ok, other=0.0)  # depends on no other kernel: fetched before the wait
    acc = tl.zeros((BM, BR), tl.float32)
    if PDL:
        # In this order: the matmul that is released here reads x without a wait of its own.
        tlc.gdc_wait()
        tlc.gdc_launch_dependents()
    xp = x_ptr + row[:, None] * K + place[None, :]
    for i in range(first, last):
        place = i * BK + tl.arange(0, BK)
        x = tl.load(xp, mask=(row < M)[:, None] & (place < K)[None, :], other=0.0)
        acc = tl.dot(x, a, acc, input_precision="ieee")
        xp += BK
        ap += BK  # BK is whole groups of 64, inside which columns are permuted
        ok = (rank < RS)[None, :] & (place + BK < tl.minimum(K, last * BK))[:, None]
        a = tl.load(ap, mask=ok, other=0.0)
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


@triton.jit(do_not_specialize=["M", "PARTS"])
def _shrink_parts_kernel(  # noqa: PLR0913
    x_ptr,
    a_ptr,
    part_ptr,
    M,
    K,
    RS,
    PARTS,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row of A, part of K): part [PARTS, RS, M] for up to BM tokens.

    Without tensor cores, whose operands would take shared memory: an SM runs programs of two
    kernels at a time only if both want it cut alike, and the gemv wants all of it as cache.
    """
    rank, pk = tl.program_id(0), tl.program_id(1)
    steps = tl.cdiv(K, BK)
    first, last = steps * pk // PARTS, steps * (pk + 1) // PARTS
    end = tl.minimum(K, last * BK)
    row = tl.arange(0, BM)
    col = first * BK + tl.arange(0, BK)
    a = tl.load(a_ptr + rank * K + col, mask=col < end, other=0.0)  # waits for no other kernel
    acc = tl.zeros((BM, BK), tl.float32)
    if PDL:
        # In this order: the matmul that is released here reads x without a wait of its own.
        tlc.gdc_wait()
        tlc.gdc_launch_dependents()
    for _ in range(first, last):
        at = x_ptr + row[:, None] * K + col[None, :]
        x = tl.load(at, mask=(row < M)[:, None] & (col < end)[None, :], other=0.0)
        acc += x.to(tl.float32) * a.to(tl.float32)[None, :]
        col += BK
        a = tl.load(a_ptr + rank * K + col, mask=col < end, other=0.0)
    tl.store(part_ptr + (pk * RS + rank) * M + row, tl.sum(acc, 1), mask=row < M)


def shrink(
    x: Float[Tensor, "rows K"], adapter: Adapter, *, order: str = "natural", pdl: int = 1
) -> Float[Tensor, "M Rs"]:
    """`adapter.a` = x Aᵀ for as many rows as it has, accumulated in fp32.

    Args:
        x: bf16 (fp32 in tests); M rows or more, columns in `order`.
        adapter: its A is in natural column order.
        order: column order of x.
        pdl: programmatic dependent launch.
    """
    stacked, out = adapter.stacked, adapter.a
    (m, ranks), k = _check_shrink(x, adapter), stacked.shape[1]
    if not runs_kernels(x):
        return out.copy_(shrink_reference(x[:m], stacked, order))
    tile = min(64 if m >= 128 else 32, max(16, triton.next_power_of_2(m)))
    split = max(1, min(SPLIT, k // 256))
    grid = (triton.cdiv(ranks, 32), triton.cdiv(m, tile), split)
    kernel = _shrink_kernel[grid](
        x,
        stacked,
        adapter.partials,
        adapter.counters,
        out,
        m,
        k,
        ranks,
        MMA=order == "mma",
        SPLIT=split,
        BM=tile,
        BR=32,
        BK=256 if tile == 16 else 128,  # a wider tile spills
        PDL=pdl,
        num_warps=4,
        num_stages=1,
        **pdl_options(pdl),
    )
    if order == "mma":
        carve_shared(kernel)
    return out


def shrink_parts(x: Float[Tensor, "rows K"], adapter: Adapter, *, pdl: int = 1) -> None:
    """`adapter.parts` parts of x Aᵀ in `adapter.partials`, fp32 [parts, Rs, M], for an epilogue.

    Args:
        x: bf16 (fp32 in tests); M rows or more, at most 16 of them, natural column order.
        adapter: its `a` says M, and stays as it was.
        pdl: programmatic dependent launch.
    """
    (m, ranks), k, parts = _check_shrink(x, adapter), adapter.stacked.shape[1], adapter.parts
    if m > 16:
        raise ValueError(f"M={m}: parts are for 16 tokens at most; take `shrink`")
    _shrink_parts_kernel[(ranks, parts)](
        x,
        adapter.stacked,
        adapter.partials,
        m,
        k,
        ranks,
        parts,
        BM=8 if m <= 8 else 16,
        BK=512,
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )


def _check_shrink(x: Tensor, adapter: Adapter) -> tuple[int, int]:
    """(M, Rs); raises where x, A and a do not belong together."""
    (m, ranks), stacked = adapter.a.shape, adapter.stacked
    if x.shape[1] != stacked.shape[1] or stacked.shape[0] != ranks or x.shape[0] < m:
        raise ValueError(
            f"x {tuple(x.shape)}, A {tuple(stacked.shape)}, a {(m, ranks)}: "
            "x [rows, K] and A [Rs, K] give a [M, Rs] with M <= rows"
        )
    return m, ranks


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


def add_adapter(
    y: Float[Tensor, "M N"], x: Float[Tensor, "rows K"], adapter: Adapter, *, pdl: int = 1
) -> Float[Tensor, "M N"]:
    """Y += (x Aᵀ) Bᵀ in place: the adapter of a matmul that has no epilogue of ours.

    Args:
        y: bf16 (fp32 in tests), contiguous.
        x: the matmul's input, natural column order.
        adapter: in the dtype of y.
        pdl: programmatic dependent launch.
    """
    return expand(y, shrink(x, adapter, pdl=pdl), adapter, pdl=pdl)


def expand(
    y: Float[Tensor, "M N"], a: Float[Tensor, "M Rs"], adapter: Adapter, *, pdl: int = 1
) -> Float[Tensor, "M N"]:
    """Y += a Bᵀ in place, where a is `adapter.a` or stands for it."""
    m, n = y.shape
    if len(a) != m or len(adapter.b) != n:
        raise ValueError(
            f"y {(m, n)}, a {tuple(a.shape)}, B {tuple(adapter.b.shape)}: a has the rows of y and "
            "B its columns"
        )
    if not runs_kernels(y):
        return y.copy_(y.float() + adapter.added(a))
    rows = 16 if m <= 16 else 32
    _expand_kernel[(triton.cdiv(n, 128), triton.cdiv(m, rows))](
        y,
        a,
        *adapter.places()[1:],
        m,
        n,
        R=adapter.rank,
        BM=rows,
        BN=128,
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )
    return y
