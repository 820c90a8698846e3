"""Measured tile shapes per (GPU, N, K, tokens), read from JSON. Nothing is tuned at run time.

A plan says which kernel multiplies and how the work is cut. Shapes that nobody measured get the
plan of the rule in `default_plan`, which reproduces most of the table.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

TABLE = Path(__file__).with_name("tiles.json")
BUCKETS = (8, 16, 32, 64, 128, 256)  # largest number of tokens that each plan serves
Kernel = Literal["gemv", "gemm", "dense"]
Codes = Literal["e2m1", "nf4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which kernel multiplies a [N, K] weight by up to `tokens` rows, and with which tiles."""

    kernel: Kernel
    """``gemv``: few tokens; ``gemm``: wgmma; ``dense``: dequantise and cuBLAS."""

    tokens: int = 8
    """Largest number of rows of x."""

    split: int = 1
    """Programs that share a row tile, each with a part of K."""

    whole: int = 0
    """gemm: leading row tiles that are not split; they fill whole waves of the chip."""

    token_tile: int = 16
    """gemm: rows of x a program, 8 to 256."""

    row_tiles: int = 1
    """gemm: 64-row tiles a program (4 warps each); gemv has 32 rows."""

    stages: int = 4
    """gemm: 128-column steps in flight."""

    registers: int = 80
    """gemm: register cap of a thread."""

    warps: int = 4
    """gemv: warps of a program; K % (128 * warps) == 0."""

    blocks: int = 2
    """gemv: 16-row blocks of a program, 1 or 2."""

    pdl: int = 1
    """Programmatic dependent launch: 0 off; dependents released at the end (1), the start (2)."""

    @property
    def order(self) -> Literal["natural", "mma"]:
        """Column order of x that the kernel reads; the kernel before can write it for free."""
        return "mma" if self.kernel == "gemm" else "natural"

    @property
    def padded_tokens(self) -> int:
        """Rows that a buffer for x should have, so that TMA reads no row past its end."""
        return -(-self.tokens // self.token_tile) * self.token_tile

    def rows_read(self, rows: int) -> int:
        """Rows of x that a kernel of kind gemv or gemm touches for `rows` that count."""
        if self.kernel == "gemv":
            return rows
        return -(-rows // self.token_tile) * self.token_tile


@cache
def table() -> dict[str, Any]:
    """GPU name -> "NxK" ("nf4 NxK") -> bucket -> fields of a `Plan`."""
    loaded: dict[str, Any] = json.loads(TABLE.read_text())
    return loaded


def bucket(tokens: int) -> int:
    """Smallest bucket that holds `tokens`."""
    for size in BUCKETS:
        if tokens <= size:
            return size
    raise ValueError(
        f"tokens={tokens}: decode plans end at {BUCKETS[-1]}; use frozen_linear() above"
    )


def plan_for(gpu: str, shape: tuple[int, int], tokens: int, codes: Codes = "e2m1") -> Plan:
    """The measured plan of `shape` on `gpu`, or the rule's where nobody measured it.

    Args:
        gpu: `torch.cuda.get_device_name()`.
        shape: (N, K).
        tokens: rows of x; above 256 the plan is dense.
        codes: of the weight.
    """
    if tokens > BUCKETS[-1]:
        return Plan(kernel="dense", tokens=tokens)
    size = bucket(tokens)
    key = f"{shape[0]}x{shape[1]}" if codes == "e2m1" else f"{codes} {shape[0]}x{shape[1]}"
    fields = table().get(gpu, {}).get(key, {}).get(str(size))
    return Plan(**fields) if fields else default_plan(shape, size, codes=codes)


def default_plan(
    shape: tuple[int, int], tokens: int, processors: int = 132, codes: Codes = "e2m1"
) -> Plan:
    """A plan by rule: fill the chip about four times (gemv) or twice (gemm) over."""
    n, k = shape
    if k % 64:
        return Plan(kernel="dense", tokens=tokens)
    if tokens <= 8 and k % 512 == 0 and n % 32 == 0:
        split = max(1, min(k // 1024, round(4 * processors / -(-n // 32))))
        return Plan(kernel="gemv", tokens=8, split=split, pdl=2)
    steps, tiles = -(-k // 128), -(-n // 64)
    split = max(1, min(steps // 2, round(2 * processors / tiles), 8))
    tile = max(16, min(tokens, 128))
    stages, registers = {16: (4, 80), 32: (4, 64), 64: (3, 80), 128: (3, 128)}[tile]
    if codes == "nf4":  # a second accumulator
        registers = {16: 80, 32: 80, 64: 112, 128: 200}[tile]
    return Plan(
        kernel="gemm",
        tokens=tokens,
        split=split,
        token_tile=tile,
        stages=stages,
        registers=registers,
    )
