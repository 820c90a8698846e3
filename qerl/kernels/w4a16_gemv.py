"""W4A16 matmul for few tokens: y = x Wᵀ with W tiled. Bound by reading W once.

Bytes: 0.5625 N K. mma.sync; a warp loads its fragments of W straight into registers (16 bytes a
lane) one turn ahead, unpacks them with nine integer operations and one multiplication per pair, and
takes x from L1. The warps of a program split K; programs of one row tile may split it further, and
the last of them to finish sums the parts in a fixed order, so results repeat bit for bit.

With an adapter, x is ready before the launch (`lora.shrink` waited for it) and is read without a
wait; the wait is at the end, for the parts of x Aᵀ, which each tile sums and multiplies with B.
"""

# Bodies of jitted functions are Triton, not Python: they carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
from jaxtyping import Float
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra import cuda as tlc

from qerl.kernels.fragments import (
    join8,
    lift_high,
    lift_low,
    nf4_tables,
    split_pair,
    thread_barrier,
    unpack,
    unpack_nf4,
)
from qerl.kernels.layout import dequantize_reference
from qerl.kernels.layout_nf4 import Tiled, TiledNF4, multiplied
from qerl.kernels.lora import PARTS as MOST_PARTS
from qerl.kernels.lora import Adapter
from qerl.kernels.tiles import Plan


def w4a16_reference(x: Float[Tensor, "M K"], weight: Tiled) -> Float[Tensor, "M N"]:
    """The specification: y = x Wᵀ in fp32, with weights that bf16 does not round.

    They are those of the portable path where the tensor scale is a power of two. For NF4, bf16
    rounds the level instead of the weight.
    """
    if isinstance(weight, TiledNF4):
        return x.float() @ multiplied(weight).T
    return x.float() @ dequantize_reference(weight, x.float().dtype).T


MOST = gl.constexpr(MOST_PARTS)


@gluon.constexpr_function
def _powers(start, count):
    return [[start << i] for i in range(count.bit_length() - 1)]


@gluon.constexpr_function
def _word_layout(NW, R):
    # 32-bit words: word 4 | lane 32 | row block R | warp NW
    return gl.DistributedLinearLayout(
        [[1], [2], *_powers(128, R)], _powers(4, 32), _powers(128 * R, NW), [], [128 * R * NW]
    )


@gluon.constexpr_function
def _scale_layout(NW, R, NF4):
    if NF4:  # floats: half 2 | block 2 | 8 rows of lanes, 4 lanes alike | row block R | warp NW
        return gl.DistributedLinearLayout(
            [[1], [2], *_powers(32, R)],
            [[0], [0], [4], [8], [16]],
            _powers(32 * R, NW),
            [],
            [32 * R * NW],
        )
    # 32-bit words: lane 32 | row block R | warp NW
    return gl.DistributedLinearLayout(
        _powers(32, R), _powers(1, 32), _powers(32 * R, NW), [], [32 * R * NW]
    )


@gluon.constexpr_function
def _x_layout(NW, T):
    # pairs of bf16: 8 pairs a lane, 4 lanes across, 8 token rows of lanes, T blocks of 8 tokens
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *[[8 << i, 0] for i in range(T.bit_length() - 1)]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[0, 32 << i] for i in range(NW.bit_length() - 1)],
        [],
        [8 * T, 32 * NW],
    )


@gluon.jit
def _absmax(s, HIGH: gl.constexpr, NW: gl.constexpr, R: gl.constexpr, mma: gl.constexpr):
    """The row scales [NW, 16 R, 1] of the first or second 64-block, from those of both."""
    s = s.reshape([NW, R, 8, 2, 2]).permute([0, 1, 4, 2, 3])  # warp, b, h, r, k
    first, second = gl.split(s)
    if HIGH:
        first = second
    rows: gl.constexpr = gl.SliceLayout(2, mma)
    return gl.convert_layout(first.reshape([NW, 16 * R]), rows, assert_trivial=True)[:, :, None]


@gluon.jit
def _step(  # noqa: PLR0913
    acc,
    w,
    s,
    x,
    tables,
    HIGH: gl.constexpr,
    NF4: gl.constexpr,
    NW: gl.constexpr,
    R: gl.constexpr,
    T: gl.constexpr,
    mma: gl.constexpr,
):
    """Acc += W x for one 64-block a warp, the first or second (HIGH) of those that s scales.

    E2M1 scales the weights; NF4, with one scale a row, the sums of the block.
    """
    if NF4:
        a0, a1, a2, a3, a4, a5, a6, a7 = unpack_nf4(w, tables)
    else:
        if HIGH:
            top, low = lift_high(s)
        else:
            top, low = lift_low(s)
        scales = gl.join(top, low)  # .., h
        scales = gl.join(scales, scales).reshape([128 * R * NW])  # .., h, q
        scales = gl.convert_layout(scales, _word_layout(NW, R), assert_trivial=True)
        a0, a1, a2, a3, a4, a5, a6, a7 = unpack(w, scales)
    a = join8(a0, a1, a2, a3, a4, a5, a6, a7)
    a = a.reshape([NW, R, 8, 4, 2, 2, 2, 2, 2])  # warp, b, r, c, h, q, p1, p0, e
    a = a.permute([0, 1, 4, 2, 5, 6, 7, 3, 8]).reshape([NW, 16 * R, 64])
    a = gl.convert_layout(a, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)
    x0, x1 = split_pair(x)
    b = gl.join(x0, x1).reshape([T, 8, NW, 4, 4, 2, 2])  # t, r, warp, c, j, h, e
    b = b.permute([2, 4, 5, 3, 6, 0, 1]).reshape([NW, 64, 8 * T])
    b = gl.convert_layout(b, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)
    if NF4:
        part = mma_v2(a, b, gl.zeros([NW, 16 * R, 8 * T], gl.float32, layout=mma))
        return acc + part * _absmax(s, HIGH, NW, R, mma)
    else:
        return mma_v2(a, b, acc)


@gluon.jit
def _index(axis: gl.constexpr, size: gl.constexpr, layout: gl.constexpr):
    """0 .. size - 1 along one of the three axes of an operand, as a [.., size, ..] tensor."""
    if axis == 0:
        i = gl.arange(0, size, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        return i[:, None, None]
    elif axis == 1:
        i = gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        return i[None, :, None]
    else:
        i = gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
        return i[None, None, :]


@gluon.jit
def _load_b(
    b_ptr,
    row,
    RANK: gl.constexpr,
    KR: gl.constexpr,
    NW: gl.constexpr,
    R: gl.constexpr,
    mma: gl.constexpr,
):
    """B of 16 R rows as operand [NW, 16 R, KR]: each warp has KR of the RANK columns."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    rank = _index(0, NW, left) * KR + _index(2, KR, left)
    at = b_ptr + (row + _index(1, 16 * R, left)) * RANK + rank
    return gl.load(at, mask=rank < RANK, other=0.0)


@gluon.jit
def _load_a(  # noqa: PLR0913
    part_ptr,
    member,
    M,
    RANKS,
    PARTS,
    RANK: gl.constexpr,
    KR: gl.constexpr,
    NW: gl.constexpr,
    T: gl.constexpr,
    mma: gl.constexpr,
):
    """X Aᵀ of one member as operand [NW, KR, 8 T], summed over its PARTS parts [RANKS, M]."""
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    rank = _index(0, NW, right) * KR + _index(1, KR, right)
    m = _index(2, 8 * T, right)
    at = part_ptr + (member * RANK + rank) * M + m
    ok = (rank < RANK) & (m < M)
    a = gl.zeros([NW, KR, 8 * T], gl.float32, layout=right)
    for p in gl.static_range(MOST):  # masked, unrolled: all loads are in flight together
        a += gl.load(at + p * M * RANKS, mask=ok & (p < PARTS), other=0.0)
    return a.to(gl.bfloat16)


@gluon.jit(do_not_specialize=["M", "SPLIT", "FIRST", "SECOND", "PARTS"])
def _gemv_kernel(  # noqa: C901, PLR0913, PLR0915
    x_ptr,
    words_ptr,
    scales_ptr,
    tensor_scale_ptr,
    partial_ptr,
    counter_ptr,
    y_ptr,
    b_ptr,
    low_ptr,
    RANKS,
    FIRST,
    SECOND,
    PARTS,
    M,
    N,
    K,
    SPLIT,
    RANK: gl.constexpr,
    NW: gl.constexpr,
    R: gl.constexpr,
    T: gl.constexpr,
    SUM: gl.constexpr,
    PDL: gl.constexpr,
    NF4: gl.constexpr,
):
    """One program: 16 R rows, 8 T tokens, one of SPLIT parts of K. K % (128 NW) == 0.

    SUM: SPLIT is above 1, and the last program of a tile sums the partials [SPLIT, M, N].
    x_ptr: [M, K/2] pairs. RANK above 0: b [N, RANK] and the parts [PARTS, RANKS, M] of x Aᵀ of an
    `Adapter`, whose members end at FIRST, SECOND and N. PDL 1 releases dependents at the end, 2 at
    the start.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[NW, 1, 1], instr_shape=[1, 16, 8]
    )
    WORDS: gl.constexpr = 128 * R * NW
    pm = gl.program_id(0)
    pn = gl.program_id(1)
    pk = gl.program_id(2)
    turns = K // (128 * NW)
    lo = turns * pk // SPLIT
    n = turns * (pk + 1) // SPLIT - lo
    tile = pn * R // 2
    block = pn * R - tile * 2  # first row block of this program inside the tile
    i = gl.arange(0, WORDS, layout=_word_layout(NW, R))
    wp = words_ptr + (tile * (K // 64) + lo * (2 * NW)) * 256 + block * 128
    wp += i + i // (128 * R) * (512 - 128 * R)  # warp w reads 64-blocks 2 w and 2 w + 1 of a turn
    i = gl.arange(0, 32 * R * NW, layout=_scale_layout(NW, R, NF4))
    sp = scales_ptr + (tile * (K // 128) + lo * NW) * 64 + block * 32
    sp += i + i // (32 * R) * (64 - 32 * R)
    s = gl.load(sp, eviction_policy="evict_first")
    w0 = gl.load(wp, eviction_policy="evict_first")
    w1 = gl.load(wp + 256, eviction_policy="evict_first")
    KR: gl.constexpr = RANK // NW if RANK // NW > 16 else 16  # columns of B a warp
    if RANK > 0:
        b = _load_b(b_ptr, pn * 16 * R, RANK, KR, NW, R, mma)
    if PDL == 2:
        tlc.gdc_launch_dependents()
    rm = pm * 8 * T + gl.arange(0, 8 * T, layout=gl.SliceLayout(1, _x_layout(NW, T)))
    i = gl.arange(0, 32 * NW, layout=gl.SliceLayout(0, _x_layout(NW, T)))
    i = lo * (64 * NW) + i + i // 32 * 32
    xp = x_ptr + gl.minimum(rm, M - 1)[:, None] * (K // 2) + i[None, :]
    acc = gl.zeros([NW, 16 * R, 8 * T], gl.float32, layout=mma)
    tables = nf4_tables(M) if NF4 else 0
    if PDL and RANK == 0:
        tlc.gdc_wait()
    x0 = gl.load(xp)
    x1 = gl.load(xp + 32)
    for _ in range(n - 1):
        wp += 512 * NW
        sp += 64 * NW
        xp += 64 * NW
        acc = _step(acc, w0, s, x0, tables, False, NF4, NW, R, T, mma)
        x0 = gl.load(xp)
        w0 = gl.load(wp, eviction_policy="evict_first")
        ahead = gl.load(sp, eviction_policy="evict_first")
        acc = _step(acc, w1, s, x1, tables, True, NF4, NW, R, T, mma)
        x1 = gl.load(xp + 32)
        w1 = gl.load(wp + 256, eviction_policy="evict_first")
        s = ahead
    acc = _step(acc, w0, s, x0, tables, False, NF4, NW, R, T, mma)
    acc = _step(acc, w1, s, x1, tables, True, NF4, NW, R, T, mma)
    if PDL == 1:
        tlc.gdc_launch_dependents()
    if not NF4:
        acc = acc * (256.0 * gl.load(tensor_scale_ptr + tile))
    if RANK > 0:
        if PDL:
            tlc.gdc_wait()
        if pk == 0:
            row = pn * 16 * R  # all rows of a tile are of one member
            member = gl.where(row >= FIRST, 1, 0) + gl.where(row >= SECOND, 1, 0)
            a = _load_a(low_ptr, member, M, RANKS, PARTS, RANK, KR, NW, T, mma)
            acc = mma_v2(b, a, acc)
    ol: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NW, 1], [1, 0])
    out = gl.sum(acc, axis=0)
    out = gl.convert_layout(gl.permute(out, [1, 0]), ol)  # tokens, rows
    tm = pm * 8 * T + gl.arange(0, 8 * T, layout=gl.SliceLayout(1, ol))
    tn = pn * 16 * R + gl.arange(0, 16 * R, layout=gl.SliceLayout(0, ol))
    off = tm[:, None] * N + tn[None, :]
    mask = (tm < M)[:, None] & (tn < N)[None, :]
    if not SUM:
        gl.store(y_ptr + off, out.to(gl.bfloat16), mask=mask)
    else:
        gl.store(partial_ptr + pk * M * N + off, out, mask=mask)
        thread_barrier()
        cp = counter_ptr + pm * gl.num_programs(1) + pn
        if gl.atomic_add(cp, 1, sem="acq_rel") == SPLIT - 1:
            thread_barrier()
            total = gl.zeros([8 * T, 16 * R], gl.float32, layout=ol)
            for j in range(SPLIT):
                part = gl.load(
                    partial_ptr + j * M * N + off, mask=mask, other=0.0, cache_modifier=".cg"
                )
                total += part
            gl.store(y_ptr + off, total.to(gl.bfloat16), mask=mask)
            gl.store(cp, 0)


def launch_gemv(
    x: Float[Tensor, "M K"],
    weight: Tiled,
    y: Float[Tensor, "M N"],
    partials: Float[Tensor, " P"],
    counters: Tensor,
    plan: Plan,
    adapter: Adapter | None = None,
) -> object:
    """Launch on checked arguments; `w4a16` is the front door.

    Args:
        x: bf16, natural column order, contiguous.
        weight: K % (128 * plan.warps) == 0 without padding.
        y: bf16; unused where partials are kept.
        partials: fp32, at least plan.split * M * N; unused where split is 1.
        counters: int32 zeros, one a program tile; the kernel leaves them zero.
        plan: split (at most K / (128 * warps)), warps, blocks and pdl.
        adapter: to add; the launch before this one is its `shrink_parts`.
    """
    m, k = x.shape
    n = weight.shape[0]
    tokens = 1 if m <= 8 else 2
    extra: tuple[object, ...] = (y, partials, 0, 0, 0, 0)
    if adapter is not None:
        if any(width % 32 for width in adapter.widths):
            raise ValueError(f"members of {adapter.widths} columns: each needs whole tiles of 32")
        _, b, *places = adapter.places()
        extra = (b, adapter.partials, *places, adapter.parts)
    grid = (triton.cdiv(m, 8 * tokens), triton.cdiv(n, 16 * plan.blocks), plan.split)
    return _gemv_kernel[grid](
        x.view(dtype=counters.dtype),
        *weight.operands(),
        partials,
        counters,
        y,
        *extra,
        m,
        n,
        k,
        plan.split,
        RANK=adapter.rank if adapter else 0,
        NW=plan.warps,
        R=plan.blocks,
        T=tokens,
        SUM=plan.split > 1,
        PDL=plan.pdl,
        NF4=isinstance(weight, TiledNF4),
        num_warps=plan.warps,
        launch_pdl=plan.pdl > 0,
    )
