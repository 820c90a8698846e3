"""The end of the wgmma kernel where the weight has an adapter: out^T += B a^T, on wgmma too.

B comes straight into registers as operand A; a, the product that `lora.shrink` left, goes through
shared memory. A row tile that spans members of a stack (q, k, v) takes one turn for each of them.
"""

# Bodies of jitted functions are Triton, not Python: they carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qerl.kernels.fragments import thread_barrier


@gluon.jit
def _member(row, FIRST, SECOND):
    """Which member of the stack a row of W belongs to."""
    return gl.where(row >= FIRST, 1, 0) + gl.where(row >= SECOND, 1, 0)


@gluon.jit
def add_lora(  # noqa: PLR0913
    out,
    stage,
    adapter,
    token,
    tile,
    M,
    N,
    RANK: gl.constexpr,
    BM: gl.constexpr,
    TG: gl.constexpr,
    mma: gl.constexpr,
):
    """Out + B aᵀ for a row tile, one member of the stack at a time; `stage` is free for a."""
    a_ptr, b_ptr, STRIDE, FIRST, SECOND = adapter
    RT: gl.constexpr = 64 * TG
    # 16 bytes of a row of a to a lane.
    ROW: gl.constexpr = RANK // 8
    LANES: gl.constexpr = ROW if ROW < 32 else 32
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4 * TG, 1], [1, 0])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    am = token * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, flat))
    ar = gl.arange(0, RANK, layout=gl.SliceLayout(0, flat))
    bn = tile * RT + gl.arange(0, RT, layout=gl.SliceLayout(1, operand))
    br = gl.arange(0, RANK, layout=gl.SliceLayout(0, operand))
    own = _member(bn, FIRST, SECOND)
    last = gl.minimum(tile * RT + RT, N) - 1
    for i in range(_member(tile * RT, FIRST, SECOND), _member(last, FIRST, SECOND) + 1):
        thread_barrier()  # every warp has read what the stage held
        a = gl.load(
            a_ptr + (am * STRIDE)[:, None] + (i * RANK + ar)[None, :],
            mask=(am < M)[:, None],
            other=0.0,
        )
        low = stage.slice(0, RANK, dim=1)
        low.store(a)
        fence_async_shared()
        b = gl.load(
            b_ptr + (bn * RANK)[:, None] + br[None, :],
            mask=((bn < N) & (own == i))[:, None],
            other=0.0,
        )
        out = warpgroup_mma(b, low.permute((1, 0)), out, is_async=True)
        out, b = warpgroup_mma_wait(num_outstanding=0, deps=[out, b])
    return out
