"""W4A16 matmul for 9 to 256 tokens: y = x Wᵀ with W tiled, on wgmma.

out^T = W x^T: the unpacked W is the register operand A, x in shared memory is B. A producer warp
brings words, scales and x by TMA through a ring of stages; 4 warps a row tile unpack one 64-block
while the tensor cores work on the one before. Columns of x come in `mma_order`.

Work items: the first `WHOLE` row tiles are one item each and write bf16 (or fp32); the others are
cut in SPLIT parts along K whose fp32 partials [SPLIT, M, N - first] the next kernel sums in order.

With an adapter, x is ready before the launch (`lora.shrink` waited for it) and is brought without a
wait; B is one more register operand at the end, with the adapter's product in the first stage of x.
"""

# Bodies of jitted functions are Triton, not Python: they carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import torch
from jaxtyping import Float
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda as tlc

from qerl.kernels.epilogue import add_lora
from qerl.kernels.fragments import tma_load
from qerl.kernels.layout_nf4 import Tiled, TiledNF4
from qerl.kernels.lora import Adapter
from qerl.kernels.tiles import Plan
from qerl.kernels.w4a16_sums import scale_rows, sum_e2m1, sum_nf4


@gluon.jit
def _item(MT, T, WHOLE, SPLIT):
    """Token tile, row tile, first step and steps of this program; its part, -1 for a whole tile."""
    program = gl.program_id(0)
    item = program // MT
    token = program - item * MT
    cut = item - WHOLE
    whole = cut < 0
    tile = gl.where(whole, item, WHOLE + cut // SPLIT)
    part = gl.where(whole, -1, cut - cut // SPLIT * SPLIT)
    first = gl.where(whole, 0, T * part // SPLIT)
    steps = gl.where(whole, T, T * (part + 1) // SPLIT) - first
    return token, tile, first, steps, part


@gluon.jit
def _producer(  # noqa: PLR0913
    xd,
    wd,
    sd,
    shared,
    BM: gl.constexpr,
    TG: gl.constexpr,
    ST: gl.constexpr,
    PDL: gl.constexpr,
    RANK: gl.constexpr,
):
    xs, ws, ss, full, empty, MT, T, WHOLE, SPLIT = shared
    nbytes: gl.constexpr = xd.block_type.nbytes + wd.block_type.nbytes + sd.block_type.nbytes
    token, tile, first, steps, _ = _item(MT, T, WHOLE, SPLIT)
    ahead = gl.minimum(steps, ST)
    for q in gl.static_range(ST):  # weights depend on no other kernel: fetch before the wait
        if q < ahead:
            mbarrier.expect(full.index(q), nbytes)
            tma_load(wd, [tile * 2 * TG, (first + q) * 16, 0], full.index(q), ws.index(q))
            tma_load(sd, [tile * 2 * TG, (first + q) * 2, 0], full.index(q), ss.index(q))
    if PDL and RANK == 0:
        tlc.gdc_wait()
    s = 0
    phase = 1  # a fresh barrier passes a wait for phase 1
    for j in range(steps):
        mbarrier.wait(empty.index(s), phase)
        if j >= ahead:
            mbarrier.expect(full.index(s), nbytes)
            tma_load(wd, [tile * 2 * TG, (first + j) * 16, 0], full.index(s), ws.index(s))
            tma_load(sd, [tile * 2 * TG, (first + j) * 2, 0], full.index(s), ss.index(s))
        tma_load(xd, [token * BM, (first + j) * 128], full.index(s), xs.index(s))
        s += 1
        if s == ST:
            s = 0
            phase ^= 1


@gluon.jit
def _consumer(  # noqa: PLR0913
    shared,
    tensor_scale_ptr,
    partial_ptr,
    y_ptr,
    adapter,
    M,
    N,
    BM: gl.constexpr,
    TG: gl.constexpr,
    ST: gl.constexpr,
    PDL: gl.constexpr,
    RANK: gl.constexpr,
    NF4: gl.constexpr,
):
    xs, ws, ss, full, empty, MT, T, WHOLE, SPLIT = shared
    ring = (xs, ws, ss, full, empty)
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4 * TG, 1], instr_shape=[16, BM, 16]
    )
    RT: gl.constexpr = 64 * TG
    token, tile, _, steps, part = _item(MT, T, WHOLE, SPLIT)
    tm = token * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, mma))
    tn = tile * RT + gl.arange(0, RT, layout=gl.SliceLayout(1, mma))
    if NF4:
        out = sum_nf4(ring, steps, BM, TG, ST, mma)
    else:
        last = (N - 1) // 32
        g = 256.0 * gl.load(tensor_scale_ptr + gl.minimum(tn // 32, last))
        out = sum_e2m1(ring, steps, BM, TG, ST, mma) * g[:, None]
    if PDL:
        tlc.gdc_wait()  # y and the partials may still be read by the kernel before
        tlc.gdc_launch_dependents()
    if RANK > 0:  # noqa: SIM102 - known when compiling, the other is not
        if part <= 0:  # a whole tile, or the first part of one
            out = add_lora(out, xs.index(0), adapter, token, tile, M, N, RANK, BM, TG, mma)
    mask = (tm < M)[None, :] & (tn < N)[:, None]
    if part < 0:
        off = tm[None, :] * N + tn[:, None]
        gl.store(y_ptr + off, out.to(gl.bfloat16), mask=mask)
    else:
        cut = N - WHOLE * RT
        off = (part * M + tm)[None, :] * cut + (tn - WHOLE * RT)[:, None]
        gl.store(partial_ptr + off, out, mask=mask)


@gluon.jit(do_not_specialize=["M", "T", "MT", "WHOLE", "SPLIT", "FIRST", "SECOND"])
def _gemm_kernel(  # noqa: PLR0913
    xd,
    wd,
    sd,
    tensor_scale_ptr,
    partial_ptr,
    y_ptr,
    a_ptr,
    b_ptr,
    STRIDE,
    FIRST,
    SECOND,
    M,
    N,
    T,
    MT,
    WHOLE,
    SPLIT,
    RANK: gl.constexpr,
    BM: gl.constexpr,
    TG: gl.constexpr,
    ST: gl.constexpr,
    PDL: gl.constexpr,
    NF4: gl.constexpr,
):
    """Grid (MT * items,); 4 TG warps and a producer; row tile 64 TG, token tile BM, K step 128.

    T: steps of 128 columns in K. MT: token tiles. See the module for WHOLE and SPLIT.
    """
    xs = gl.allocate_shared_memory(gl.bfloat16, [ST, BM, 128], xd.layout)
    ws = gl.allocate_shared_memory(gl.int32, [ST, 2 * TG, 16, 32], wd.layout)
    ss = gl.allocate_shared_memory(gl.int32, [ST, 2 * TG, scale_rows(TG), 32], sd.layout)
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(ST):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    shared = (xs, ws, ss, full, empty, MT, T, WHOLE, SPLIT)
    adapter = (a_ptr, b_ptr, STRIDE, FIRST, SECOND)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    shared,
                    tensor_scale_ptr,
                    partial_ptr,
                    y_ptr,
                    adapter,
                    M,
                    N,
                    BM,
                    TG,
                    ST,
                    PDL,
                    RANK,
                    NF4,
                ),
            ),
            (_producer, (xd, wd, sd, shared, BM, TG, ST, PDL, RANK)),
        ],
        [1],
        [24],
    )


def _shared(bits: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=rank)


def descriptors(
    x: Float[Tensor, "M K"], weight: Tiled, token_tile: int, row_tiles: int
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """TMA descriptors of x, words and scales. Rows of x past its end read as zero, but slowly."""
    tiles, blocks = weight.words.shape[0], weight.words.shape[1]
    words = weight.words.view(tiles, blocks * 8, 32)
    scales = weight.operands()[1].view(torch.int32).view(tiles, blocks, 32)
    box = 4 if row_tiles == 1 else 2
    return (
        TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [token_tile, 128], _shared(16, 2)),
        TensorDescriptor(
            words, list(words.shape), list(words.stride()), [2 * row_tiles, 16, 32], _shared(32, 3)
        ),
        TensorDescriptor(
            scales,
            list(scales.shape),
            list(scales.stride()),
            [2 * row_tiles, box, 32],
            _shared(32, 3),
        ),
    )


def launch_gemm(
    operands: tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor],
    weight: Tiled,
    y: Float[Tensor, "M N"],
    partials: Float[Tensor, " P"],
    tokens: int,
    plan: Plan,
    adapter: Adapter | None = None,
) -> object:
    """Launch on checked arguments; `w4a16` is the front door.

    Args:
        operands: `descriptors` of x (columns in `mma_order`, rows padded to the token tile).
        weight: the tiled weight behind them.
        y: bf16 [M, N]; row tiles before `plan.whole` (all, if the split is 1) are written here.
        partials: fp32, at least split * M * (N - first cut row).
        tokens: M.
        plan: tile shape and split; `split <= ceil(K / 128)`.
        adapter: to add; the launch before this one is its `shrink`.
    """
    n = weight.shape[0]
    tiles = -(-n // (64 * plan.row_tiles))
    whole = tiles if plan.split == 1 else plan.whole
    token_tiles = -(-tokens // plan.token_tile)
    items = whole + (tiles - whole) * plan.split
    return _gemm_kernel[(items * token_tiles,)](
        *operands,
        weight.operands()[2],
        partials,
        y,
        *(adapter.places() if adapter else (y, y, 0, 0, 0)),
        tokens,
        n,
        weight.words.shape[1] // 2,
        token_tiles,
        whole,
        plan.split,
        RANK=adapter.rank if adapter else 0,
        BM=plan.token_tile,
        TG=plan.row_tiles,
        ST=plan.stages,
        PDL=plan.pdl,
        NF4=isinstance(weight, TiledNF4),
        num_warps=4 * plan.row_tiles,
        maxnreg=plan.registers,
        launch_pdl=plan.pdl > 0,
    )
