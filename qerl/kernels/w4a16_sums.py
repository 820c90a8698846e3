"""Sums of the wgmma kernel over K: fragments of W from shared memory, and the loops around them.

E2M1 weights are scaled before they are multiplied; NF4 has one scale a row and 64-block, so each
block is summed on its own and its fp32 sum is scaled.

A pending wgmma still reads its A registers, and ptxas does not keep them: a fragment is passed
to the wait that retires it, so its registers cannot be written while they are read. Plain
``tl.dot`` offers no way to say so and gave wrong results on an H200; ``lint.py`` reads the code.
"""

# Bodies of jitted functions are Triton, not Python: they carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qerl.kernels.fragments import join8, lift_scales, nf4_tables, unpack, unpack_nf4


@gluon.constexpr_function
def _tile_bits(TG):
    return [[1, 0, 0], [2, 0, 0], [4, 0, 0]][: TG.bit_length()]


@gluon.constexpr_function
def _word_layout(TG):
    # [2 TG, 8, 32] words of a 64-block of columns: word 4 | lane 32 | row block 2 | 32-row tile
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]],
        [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]],
        [[0, 4, 0], *_tile_bits(TG)],
        [],
        [2 * TG, 8, 32],
    )


@gluon.constexpr_function
def _scale_layout(TG):
    return gl.DistributedLinearLayout(
        [],
        [[0, 0, 1 << i] for i in range(5)],
        [[0, 1, 0], *_tile_bits(TG)],
        [],
        [2 * TG, 2, 32],
    )


@gluon.constexpr_function
def _scale_atom_layout():
    return gl.DistributedLinearLayout(
        [[0, 2, 0]], [[0, 0, 1 << i] for i in range(5)], [[0, 1, 0], [1, 0, 0]], [], [2, 4, 32]
    )


@gluon.constexpr_function
def scale_rows(TG):
    """Rows of the box that brings the scales of a step."""
    return 4 if TG == 1 else 2


@gluon.jit
def _load_scales(stage, TG: gl.constexpr):
    if TG == 1:  # the box is 2 x 4 rows, a swizzle atom; rows 2 and 3 are the next step's
        both = stage.load(_scale_atom_layout()).reshape([2, 2, 2, 32]).permute([0, 2, 3, 1])
        scales, _ = gl.split(both)
        return gl.convert_layout(scales, _scale_layout(1), assert_trivial=True)
    else:
        return stage.load(_scale_layout(TG))


@gluon.constexpr_function
def _absmax_layout(TG):
    # floats: half 2 | block 2 | 8 rows of lanes, 4 lanes alike | row block 2 | 32-row tile
    lanes = [[0, 0, 0], [0, 0, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]]
    halves = [[0, 0, 1], [0, 0, 2]]
    if TG == 1:  # the atom of `_load_scales`
        return gl.DistributedLinearLayout(
            [*halves, [0, 2, 0]], lanes, [[0, 1, 0], [1, 0, 0]], [], [2, 4, 32]
        )
    return gl.DistributedLinearLayout(
        halves, lanes, [[0, 1, 0], *_tile_bits(TG)], [], [2 * TG, 2, 32]
    )


@gluon.jit
def _load_absmax(stage, TG: gl.constexpr, mma: gl.constexpr):
    """NF4's row scales [64 TG, 1] of both 64-blocks of a step."""
    both = stage.load(_absmax_layout(TG))
    if TG == 1:
        both, _ = gl.split(both.reshape([2, 2, 2, 32]).permute([0, 2, 3, 1]))
    both = both.to(gl.float32, bitcast=True).reshape([2 * TG, 2, 8, 2, 2])  # tile, b, r, k, h
    g0, g1 = gl.split(both.permute([0, 1, 4, 2, 3]))  # tile, b, h, r
    rows: gl.constexpr = gl.SliceLayout(1, mma)
    g0 = gl.convert_layout(g0.reshape([64 * TG]), rows, assert_trivial=True)
    g1 = gl.convert_layout(g1.reshape([64 * TG]), rows, assert_trivial=True)
    return g0[:, None], g1[:, None]


@gluon.jit
def _operand(a0, a1, a2, a3, a4, a5, a6, a7, TG: gl.constexpr, mma: gl.constexpr):  # noqa: PLR0913
    """Unpacked words of one 64-block of columns as register operand A [64 TG, 64]."""
    a = join8(a0, a1, a2, a3, a4, a5, a6, a7)
    a = a.reshape([2 * TG, 2, 8, 4, 2, 2, 2, 2, 2])  # tile, b, r, c, h, q, p1, p0, e
    a = a.permute([0, 1, 4, 2, 5, 6, 7, 3, 8]).reshape([64 * TG, 64])
    return gl.convert_layout(a, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.jit
def _levels(words, tables, TG: gl.constexpr, mma: gl.constexpr):
    """One 64-block of NF4 levels as register operand A."""
    a0, a1, a2, a3, a4, a5, a6, a7 = unpack_nf4(words, tables)
    return _operand(a0, a1, a2, a3, a4, a5, a6, a7, TG, mma)


@gluon.jit
def _fragment(words, top, low, TG: gl.constexpr, mma: gl.constexpr):
    """One 64-block of columns as register operand A [64 TG, 64]."""
    scales = gl.join(top, low)  # 2 TG, 2, 32, h
    scales = gl.join(scales, scales).reshape([2 * TG, 8, 32])  # .., h, q
    scales = gl.convert_layout(scales, _word_layout(TG), assert_trivial=True)
    a0, a1, a2, a3, a4, a5, a6, a7 = unpack(words, scales)
    return _operand(a0, a1, a2, a3, a4, a5, a6, a7, TG, mma)


@gluon.jit
def sum_e2m1(ring, steps, BM: gl.constexpr, TG: gl.constexpr, ST: gl.constexpr, mma: gl.constexpr):
    """The sums [64 TG, BM] over a program's steps, without 2^8 and the tensor scale."""
    xs, ws, ss, full, empty = ring
    RT: gl.constexpr = 64 * TG
    s = 0
    phase = 0
    acc = gl.zeros([RT, BM], gl.float32, layout=mma)
    a1 = gl.zeros([RT, 64], gl.bfloat16, layout=gl.DotOperandLayout(0, mma, 2))
    for j in range(steps):
        mbarrier.wait(full.index(s), phase)
        scales = _load_scales(ss.index(s), TG)
        w0 = ws.index(s).slice(0, 8, dim=1).load(_word_layout(TG))
        w1 = ws.index(s).slice(8, 8, dim=1).load(_word_layout(TG))
        top0, low0, top1, low1 = lift_scales(scales)
        a0 = _fragment(w0, top0, low0, TG, mma)
        x0 = xs.index(s).slice(0, 64, dim=1).permute((1, 0))
        acc = warpgroup_mma(a0, x0, acc, use_acc=j > 0, is_async=True)
        # One group stays in flight; the fragment of the other is tied to the wait that retires it.
        acc, a1 = warpgroup_mma_wait(num_outstanding=1, deps=[acc, a1])
        if j > 0:  # the step before has been read out
            mbarrier.arrive(empty.index(gl.where(s == 0, ST - 1, s - 1)), count=1)
        a1 = _fragment(w1, top1, low1, TG, mma)
        x1 = xs.index(s).slice(64, 64, dim=1).permute((1, 0))
        acc = warpgroup_mma(a1, x1, acc, is_async=True)
        acc, a0 = warpgroup_mma_wait(num_outstanding=1, deps=[acc, a0])
        s += 1
        if s == ST:
            s = 0
            phase ^= 1
    acc, a1 = warpgroup_mma_wait(num_outstanding=0, deps=[acc, a1])
    return acc


@gluon.jit
def sum_nf4(ring, steps, BM: gl.constexpr, TG: gl.constexpr, ST: gl.constexpr, mma: gl.constexpr):
    """As `sum_e2m1`, scaled: each 64-block is summed on its own and added with its absmax.

    One block's product is in flight while the next is unpacked; two would need registers that
    large token tiles do not have.
    """
    xs, ws, ss, full, empty = ring
    RT: gl.constexpr = 64 * TG
    s = 0
    phase = 0
    acc = gl.zeros([RT, BM], gl.float32, layout=mma)
    tables = nf4_tables(steps)
    part = gl.zeros([RT, BM], gl.float32, layout=mma)  # of the block before
    g1 = gl.zeros([RT], gl.float32, layout=gl.SliceLayout(1, mma))[:, None]
    a1 = gl.zeros([RT, 64], gl.bfloat16, layout=gl.DotOperandLayout(0, mma, 2))
    for j in range(steps):
        mbarrier.wait(full.index(s), phase)
        w0 = ws.index(s).slice(0, 8, dim=1).load(_word_layout(TG))
        w1 = ws.index(s).slice(8, 8, dim=1).load(_word_layout(TG))
        g0, g2 = _load_absmax(ss.index(s), TG, mma)
        a0 = _levels(w0, tables, TG, mma)
        part, a1 = warpgroup_mma_wait(num_outstanding=0, deps=[part, a1])
        if j > 0:  # the step before has been read out
            mbarrier.arrive(empty.index(gl.where(s == 0, ST - 1, s - 1)), count=1)
        acc += part * g1
        x0 = xs.index(s).slice(0, 64, dim=1).permute((1, 0))
        part = warpgroup_mma(a0, x0, part, use_acc=False, is_async=True)
        a1 = _levels(w1, tables, TG, mma)
        part, a0 = warpgroup_mma_wait(num_outstanding=0, deps=[part, a0])
        acc += part * g0
        x1 = xs.index(s).slice(64, 64, dim=1).permute((1, 0))
        part = warpgroup_mma(a1, x1, part, use_acc=False, is_async=True)
        # Nothing is waited for: it makes the pending sum a tensor that a loop may carry.
        part, a1 = warpgroup_mma_wait(num_outstanding=1, deps=[part, a1])
        g1 = g2
        s += 1
        if s == ST:
            s = 0
            phase ^= 1
    part, a1 = warpgroup_mma_wait(num_outstanding=0, deps=[part, a1])
    return acc + part * g1
