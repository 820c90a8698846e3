"""Every kernel compiles for sm_90a without a GPU, and the machine code of the matmuls is clean."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from qerl.kernels import (
    advance,
    dequant,
    lint,
    lora,
    nf4,
    norm,
    paged_attention,
    rope,
    rotate,
    sample,
    swiglu,
    w4a16,
)
from qerl.kernels.tiles import Plan, default_plan, table

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
PARTS = (BF16, F32, 5, 4608, 128, 3)  # dense, cut, M, N, FIRST, SPLIT

SMALL: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "dequantize": (
        dequant._dequantize_kernel,
        (I32, I32, F32, BF16, 4608, 3584, 56),
        {"KB": 4},
    ),
    "nf4_tiles": (nf4._tiles_kernel, (I32, F32, F32, BF16, 3584, 56), {"KB": 4}),
    "advance": (
        advance._advance_kernel,
        (I64, F32, *(I64,) * 12, F32, 512, 5, 2),
        {"PAGE": 128, "PDL": 1, "num_warps": 1},
    ),
    "sum": (w4a16._sum_kernel, (F32, BF16, 5, 4608, 0, 3), {"B": 1024, "PDL": 1}),
    "reorder": (w4a16._mma_order_kernel, (BF16, BF16, 3584), {"B": 1024, "PDL": 1}),
    "norm": (
        norm._norm_kernel,
        (*PARTS, BF16, F32, BF16, 1e-6),
        {"ADD": True, "MMA": True, "B": 8192, "PDL": 1, "num_warps": 16},
    ),
    "silu_mul": (
        swiglu._silu_mul_kernel,
        (*PARTS, BF16),
        {"MMA": True, "B": 1024, "PDL": 1},
    ),
    "gate_mul": (swiglu._gate_mul_kernel, (BF16, BF16, 18944), {"B": 4096, "num_warps": 8}),
    "rotate": (
        rotate._rotate_kernel,
        (BF16, F32, F32, F32, 1e-6, 28),
        {"HB": 32, "D": 128, "NORM": True},
    ),
    "rope": (
        rope._rope_kernel,
        (*PARTS, BF16, F32, F32, F32, F32, I64, I64, BF16, BF16, BF16, 8192, 1e-6),
        {"H": 28, "HK": 4, "D": 128, "BIAS": True, "NORM": True, "CARVE": True, "PDL": 1},
    ),
    "shrink": (
        lora._shrink_kernel,
        (BF16, BF16, F32, I32, BF16, 5, 3584, 96),
        {"MMA": True, "SPLIT": 7, "BM": 64, "BR": 32, "BK": 128, "PDL": 1},
    ),
    "shrink_parts": (
        lora._shrink_parts_kernel,
        (BF16, BF16, F32, 5, 3584, 96, 7),
        {"BM": 8, "BK": 512, "PDL": 1},
    ),
    "expand": (
        lora._expand_kernel,
        (BF16, BF16, BF16, 96, 3584, 4096, 5, 4608),
        {"R": 32, "BM": 16, "BN": 128, "PDL": 1},
    ),
    "attention": (
        paged_attention._attention_kernel,
        (
            *(BF16, BF16, BF16, 8192, I64, I64, I64, I64, I64, F32, F32, BF16),
            *(4, 16, 64, 8, 8, 0.1, 7, 2, 2),
        ),
        {"HK": 4, "G": 7, "D": 128, "PAGE": 128, "BM": 16, "BN": 64}
        | {"DIRECT": False, "MMA": True, "PDL": 1},
    ),
    "merge": (
        paged_attention._merge_kernel,
        (F32, F32, BF16, 1792, 4),
        {"H": 28, "D": 128, "MMA": True, "PDL": 1, "num_warps": 1},
    ),
    "sample_chunks": (
        sample._chunk_kernel,
        (F32, F32, 151936, 151936, 1.0, 38),
        {"B": 4096, "PDL": 1, "num_warps": 8},
    ),
    "sample_pick": (
        sample._pick_kernel,
        (F32, F32, I64, I64, I64, F32, F32, F32, 151936, 151936, 1.0, 38),
        {"GREEDY": False, "B": 4096, "C": 64, "PDL": 1, "num_warps": 8},
    ),
}


@pytest.fixture(autouse=True)
def _can_compile() -> None:
    if reason := lint.why_not():
        pytest.skip(reason)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_small_kernels_compile_for_hopper_without_spills(name: str) -> None:
    kernel, arguments, options = SMALL[name]
    with lint.hopper_target():
        compiled = kernel.warmup(*arguments, **options, grid=(1,))
    assert lint.read_code(compiled).spills == 0


def shipped_plans() -> list[tuple[Plan, bool]]:
    """One plan for each distinct machine code among the measured ones; whether it is of NF4."""
    plans = [
        (Plan(**f), name.startswith("nf4"))
        for gpu in table().values()
        for name, s in gpu.items()
        for f in s.values()
    ]
    codes = {
        (
            nf4,
            *(p.kernel, p.kernel == "gemv" and p.split > 1, p.token_tile, p.row_tiles),
            *(p.stages, p.registers, p.warps, p.blocks, p.pdl),
        ): (p, nf4)
        for p, nf4 in plans
    }
    return list(codes.values())


def describe(plan: Plan) -> str:
    if plan.kernel == "gemv":
        return f"gemv-{plan.warps}w-{plan.blocks}b-split{plan.split}-pdl{plan.pdl}"
    return f"gemm-{plan.token_tile}x{plan.row_tiles}-{plan.stages}s-{plan.registers}r"


QUICK = [  # the shapes of machine code that differ most; all shipped ones are a slow test
    Plan(kernel="gemv", split=5, warps=4, blocks=1, pdl=2),
    Plan(kernel="gemm", split=4, token_tile=16, stages=4, registers=64),
    Plan(kernel="gemm", split=4, token_tile=256, row_tiles=2, stages=3, registers=168),
]


@pytest.mark.parametrize("rank", [0, 32])
@pytest.mark.parametrize("plan", QUICK, ids=describe)
def test_no_pending_wgmma_operand_is_overwritten(plan: Plan, rank: int) -> None:
    assert lint.check(plan, rank).clean


NF4 = [  # every token tile the rule takes, and the shapes of gemv
    Plan(kernel="gemv", split=5, warps=4, blocks=1, pdl=2),
    Plan(kernel="gemv", split=1, warps=4, blocks=2, pdl=1),
    *(default_plan((4608, 3584), tokens, codes="nf4") for tokens in (16, 32, 64, 128)),
]


@pytest.mark.parametrize("rank", [0, 32])
@pytest.mark.parametrize("plan", NF4, ids=describe)
def test_nf4_has_clean_machine_code(plan: Plan, rank: int) -> None:
    assert lint.check(plan, rank, nf4=True).clean


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 32])
@pytest.mark.parametrize("shipped", shipped_plans(), ids=lambda s: describe(s[0]) + "-nf4" * s[1])
def test_every_shipped_plan_has_clean_machine_code(shipped: tuple[Plan, bool], rank: int) -> None:
    assert lint.check(shipped[0], rank, nf4=shipped[1]).clean


LOOP = """
.L_x_1:
        /*0100*/ WARPGROUP.ARRIVE ;
        /*0110*/ HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0 ;
        /*0120*/ LDS.128 {target}, [R60] ;
        /*0130*/ WARPGROUP.DEPBAR.LE gsb0, 0x{pending} ;
        /*0140*/ LOP3.LUT R6, R40, 0x81c081c0, RZ, 0xc0, !PT ;
        /*0150*/ @P0 BRA `(.L_x_1) ;
"""


def test_lint_sees_a_write_to_a_pending_operand() -> None:
    # R4..R7 are read until the wait at 0130; the load at 0120 writes R6 before it.
    assert lint.hazards(LOOP.format(target="R6", pending="0")) == [(0x110, 0x120)]


def test_lint_accepts_writes_after_the_wait() -> None:
    assert lint.hazards(LOOP.format(target="R44", pending="0")) == []


def test_lint_knows_that_a_wait_may_leave_groups_pending() -> None:
    # One group may stay in flight at 0130, so the write to R6 at 0140 meets it.
    assert lint.hazards(LOOP.format(target="R44", pending="1")) == [(0x110, 0x140)]
