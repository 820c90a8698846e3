"""W4A16 matmul for few tokens: y = x Wᵀ with W tiled. Bound by reading W once.

Bytes: 0.5625 N K. mma.sync; a warp loads its fragments of W straight into registers (16 bytes a
lane) one turn ahead, unpacks them with nine integer operations and one multiplication per pair, and
takes x from L1. The warps of a program split K; programs of one row tile may split it further, and
the last of them to finish sums the parts in a fixed order, so results repeat bit for bit.

With an adapter, the first programs of the grid multiply x with the stacked A, one row and a part of
K each; the others, at their end, wait until all of those are through and add a Bᵀ to the first part
of K. The first programs of a grid start first, so nobody waits for a program that cannot start.

Source: measured on an H200 against a cp.async ring, stream-K and deeper prefetch, none of which was
faster for 1 to 8 tokens; 4 warps and 32 rows a program were best in every shape.
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
    split_pair,
    thread_barrier,
    unpack,
)
from qerl.kernels.layout import TiledWeight, dequantize_reference
from qerl.kernels.lora import LOW_PARTS, Adapter
from qerl.kernels.tiles import Plan


def w4a16_reference(x: Float[Tensor, "M K"], weight: TiledWeight) -> Float[Tensor, "M N"]:
    """The specification: y = x Wᵀ in fp32, with weights that bf16 does not round.

    They are those of the portable path where the tensor scale is a power of two.
    """
    return x.float() @ dequantize_reference(weight, x.float().dtype).T


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
def _scale_layout(NW, R):
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
def _step(  # noqa: PLR0913
    acc, w, top, low, x, NW: gl.constexpr, R: gl.constexpr, T: gl.constexpr, mma: gl.constexpr
):
    """Acc += W x for one 64-block a warp; top, low: lifted scales of rows r and r + 8."""
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
    return mma_v2(a, b, acc)


@gluon.jit
def _shrink(  # noqa: PLR0913
    x_ptr,
    product,
    STRIDE,
    item,
    M,
    K,
    NW: gl.constexpr,
    T: gl.constexpr,
    PDL: gl.constexpr,
):
    """One row of the stacked A by one part of K, for 8 T tokens; the last part to end sums them."""
    stacked_ptr, a_ptr, part_ptr, counter_ptr, ready_ptr, clear_ptr, PARTS = product
    WORDS: gl.constexpr = 128 * NW  # pairs of columns a turn
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, NW], [1, 0])
    many: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [NW, 1], [1, 0])
    row = item // PARTS
    part = item - row * PARTS
    half = K // 2
    turns = (half + WORDS - 1) // WORDS
    first = turns * part // PARTS
    last = turns * (part + 1) // PARTS
    i = gl.arange(0, WORDS, layout=gl.SliceLayout(0, wide))
    m = gl.minimum(gl.arange(0, 8 * T, layout=gl.SliceLayout(1, wide)), M - 1)
    if PDL == 2:
        tlc.gdc_launch_dependents()
    if PDL:
        tlc.gdc_wait()
    if item == 0:
        gl.store(clear_ptr, 0)  # of the adapter before this one, which is done with
    acc = gl.zeros([8 * T, WORDS], gl.float32, layout=wide)
    for j in range(first, last):
        col = j * WORDS + i
        ok = col < half
        low = gl.load(stacked_ptr + row * half + col, mask=ok, other=0)
        x = gl.load(x_ptr + (m * half)[:, None] + col[None, :], mask=ok[None, :], other=0)
        low0, low1 = split_pair(low)
        x0, x1 = split_pair(x)
        acc += x0.to(gl.float32) * low0.to(gl.float32)[None, :]
        acc += x1.to(gl.float32) * low1.to(gl.float32)[None, :]
    if PDL == 1:
        tlc.gdc_launch_dependents()
    total = gl.sum(acc, axis=1)
    m = gl.arange(0, 8 * T, layout=gl.SliceLayout(1, wide))
    gl.store(part_ptr + (row * PARTS + part) * (8 * T) + m, total)
    thread_barrier()
    if gl.atomic_add(counter_ptr + row, 1, sem="acq_rel") == PARTS - 1:
        thread_barrier()
        token = gl.arange(0, 8 * T, layout=gl.SliceLayout(1, many))
        k = gl.arange(0, 16, layout=gl.SliceLayout(0, many))
        parts = gl.load(
            part_ptr + (row * PARTS + k)[None, :] * (8 * T) + token[:, None],
            mask=(k < PARTS)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        a = gl.sum(parts, axis=1).to(gl.bfloat16)
        gl.store(a_ptr + token * STRIDE + row, a, mask=token < M)
        gl.store(counter_ptr + row, 0)
        thread_barrier()
        gl.atomic_add(ready_ptr, 1, sem="acq_rel")


@gluon.jit
def _add_lora(out, low, tm, tn, M, N, RANK: gl.constexpr):
    """Out + a Bᵀ for a tile of tokens and rows, once all of a is there."""
    a_ptr, b_ptr, STRIDE, FIRST, SECOND, ready_ptr = low
    while gl.atomic_add(ready_ptr, 0, sem="acquire") < STRIDE:
        pass
    thread_barrier()
    rows = gl.minimum(tn, N - 1)
    member = (rows >= FIRST).to(gl.int32) + (rows >= SECOND).to(gl.int32)
    ap = a_ptr + (gl.minimum(tm, M - 1) * STRIDE)[:, None] + (member * RANK)[None, :]
    bp = b_ptr + rows * RANK
    for j in gl.static_range(RANK):  # loads of all columns are in flight together
        b = gl.load(bp + j).to(gl.float32)
        a = gl.load(ap + j, cache_modifier=".cg").to(gl.float32)
        out += a * b[None, :]
    return out


@gluon.jit
def _tile(  # noqa: PLR0913, PLR0915
    x_ptr,
    weight,
    sums,
    low_rank,
    item,
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
):
    """16 R rows, 8 T tokens, one of SPLIT parts of K; see `_gemv_kernel`."""
    words_ptr, scales_ptr, tensor_scale_ptr = weight
    partial_ptr, counter_ptr, y_ptr = sums
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[NW, 1, 1], instr_shape=[1, 16, 8]
    )
    WORDS: gl.constexpr = 128 * R * NW
    tiles = (N + 16 * R - 1) // (16 * R)
    pn = item % tiles
    pk = item // tiles % SPLIT
    pm = item // tiles // SPLIT
    turns = K // (128 * NW)
    lo = turns * pk // SPLIT
    n = turns * (pk + 1) // SPLIT - lo
    tile = pn * R // 2
    block = pn * R - tile * 2  # first row block of this program inside the tile
    i = gl.arange(0, WORDS, layout=_word_layout(NW, R))
    wp = words_ptr + (tile * (K // 64) + lo * (2 * NW)) * 256 + block * 128
    wp += i + i // (128 * R) * (512 - 128 * R)  # warp w reads 64-blocks 2 w and 2 w + 1 of a turn
    i = gl.arange(0, 32 * R * NW, layout=_scale_layout(NW, R))
    sp = scales_ptr + (tile * (K // 128) + lo * NW) * 64 + block * 32
    sp += i + i // (32 * R) * (64 - 32 * R)
    s = gl.load(sp, eviction_policy="evict_first")
    w0 = gl.load(wp, eviction_policy="evict_first")
    w1 = gl.load(wp + 256, eviction_policy="evict_first")
    if PDL == 2:
        tlc.gdc_launch_dependents()
    rm = pm * 8 * T + gl.arange(0, 8 * T, layout=gl.SliceLayout(1, _x_layout(NW, T)))
    i = gl.arange(0, 32 * NW, layout=gl.SliceLayout(0, _x_layout(NW, T)))
    i = lo * (64 * NW) + i + i // 32 * 32
    xp = x_ptr + gl.minimum(rm, M - 1)[:, None] * (K // 2) + i[None, :]
    acc = gl.zeros([NW, 16 * R, 8 * T], gl.float32, layout=mma)
    if PDL:
        tlc.gdc_wait()
    x0 = gl.load(xp)
    x1 = gl.load(xp + 32)
    for _ in range(n - 1):
        wp += 512 * NW
        sp += 64 * NW
        xp += 64 * NW
        top, low = lift_low(s)
        acc = _step(acc, w0, top, low, x0, NW, R, T, mma)
        x0 = gl.load(xp)
        w0 = gl.load(wp, eviction_policy="evict_first")
        ahead = gl.load(sp, eviction_policy="evict_first")
        top, low = lift_high(s)
        acc = _step(acc, w1, top, low, x1, NW, R, T, mma)
        x1 = gl.load(xp + 32)
        w1 = gl.load(wp + 256, eviction_policy="evict_first")
        s = ahead
    top, low = lift_low(s)
    acc = _step(acc, w0, top, low, x0, NW, R, T, mma)
    top, low = lift_high(s)
    acc = _step(acc, w1, top, low, x1, NW, R, T, mma)
    if PDL == 1:
        tlc.gdc_launch_dependents()
    ol: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NW, 1], [1, 0])
    out = gl.sum(acc, axis=0) * (256.0 * gl.load(tensor_scale_ptr + tile))
    out = gl.convert_layout(gl.permute(out, [1, 0]), ol)  # tokens, rows
    tm = pm * 8 * T + gl.arange(0, 8 * T, layout=gl.SliceLayout(1, ol))
    tn = pn * 16 * R + gl.arange(0, 16 * R, layout=gl.SliceLayout(0, ol))
    off = tm[:, None] * N + tn[None, :]
    mask = (tm < M)[:, None] & (tn < N)[None, :]
    if RANK > 0:  # noqa: SIM102 - known when compiling, the other is not
        if pk == 0:
            out = _add_lora(out, low_rank, tm, tn, M, N, RANK)
    if not SUM:
        gl.store(y_ptr + off, out.to(gl.bfloat16), mask=mask)
    else:
        gl.store(partial_ptr + pk * M * N + off, out, mask=mask)
        thread_barrier()
        cp = counter_ptr + pm * tiles + pn
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


@gluon.jit(do_not_specialize=["M", "SPLIT", "FIRST", "SECOND", "PARTS", "AHEAD"])
def _gemv_kernel(  # noqa: PLR0913
    x_ptr,
    words_ptr,
    scales_ptr,
    tensor_scale_ptr,
    partial_ptr,
    counter_ptr,
    y_ptr,
    stacked_ptr,
    a_ptr,
    b_ptr,
    STRIDE,
    FIRST,
    SECOND,
    low_part_ptr,
    low_counter_ptr,
    ready_ptr,
    clear_ptr,
    PARTS,
    AHEAD,
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
):
    """Grid (AHEAD + tiles,): AHEAD programs for the adapter, the others a tile of y each.

    A tile is 16 R rows, 8 T tokens and one of SPLIT parts of K; K % (128 NW) == 0. SUM: SPLIT is
    above 1, and the last program of a tile sums the partials [SPLIT, M, N]. x_ptr: [M, K/2] pairs.
    RANK above 0: an `Adapter`, whose members end at FIRST, SECOND and N and whose a has STRIDE
    columns; its A is taken in PARTS parts of K. PDL 1 releases dependents at the end, 2 at the
    start.
    """
    item = gl.program_id(0)
    weight = (words_ptr, scales_ptr, tensor_scale_ptr)
    sums = (partial_ptr, counter_ptr, y_ptr)
    product = (stacked_ptr, a_ptr, low_part_ptr, low_counter_ptr, ready_ptr, clear_ptr, PARTS)
    low = (a_ptr, b_ptr, STRIDE, FIRST, SECOND, ready_ptr)
    if RANK == 0:
        _tile(x_ptr, weight, sums, low, item, M, N, K, SPLIT, RANK, NW, R, T, SUM, PDL)
    elif item < AHEAD:
        _shrink(x_ptr, product, STRIDE, item, M, K, NW, T, PDL)
    else:
        item -= AHEAD
        _tile(x_ptr, weight, sums, low, item, M, N, K, SPLIT, RANK, NW, R, T, SUM, PDL)


def launch_gemv(
    x: Float[Tensor, "M K"],
    weight: TiledWeight,
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
        adapter: to multiply and add; for at most 16 tokens.
    """
    m, k = x.shape
    n = weight.shape[0]
    tokens = 1 if m <= 8 else 2
    tiles = triton.cdiv(m, 8 * tokens) * triton.cdiv(n, 16 * plan.blocks) * plan.split
    ahead = parts = 0
    extra: tuple[object, ...] = (y, y, y, 0, 0, 0, y, counters, counters, counters)
    if adapter is not None:
        if m > 16:
            raise ValueError(f"{m} tokens: this kernel takes adapters of 16 at most; use wgmma")
        # Two or three turns a program: more would outlast the tiles of a small matmul.
        parts = max(1, min(LOW_PARTS, k // (256 * plan.warps * 2)))
        ahead = len(adapter.stacked) * parts
        extra = (
            adapter.stacked.view(dtype=counters.dtype),
            *adapter.places(),
            *(adapter.partials, adapter.counters, adapter.ready, adapter.clear),
        )
    return _gemv_kernel[(ahead + tiles,)](
        x.view(dtype=counters.dtype),
        *weight.parts(),
        partials,
        counters,
        y,
        *extra,
        parts,
        ahead,
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
        num_warps=plan.warps,
        launch_pdl=plan.pdl > 0,
    )
