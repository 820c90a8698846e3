"""Time the decode kernels on the GPU at hand: correctness first, peers in the same process.

A time is the median of CUDA-graph replays over the linears of several decoder layers (qkv, o,
gate_up, down) whose weights rotate, so that each is read from memory and not from the L2 cache.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from qerl.kernels import layout_nf4
from qerl.kernels.dequant import dequantize, specified
from qerl.kernels.layout import TiledWeight
from qerl.kernels.layout_nf4 import Tiled, TiledNF4, random_nf4
from qerl.kernels.lint import compile_plan
from qerl.kernels.lora import Adapter
from qerl.kernels.norm import add_rms_norm
from qerl.kernels.peers import time_peer
from qerl.kernels.tiles import Codes, Plan, plan_for
from qerl.kernels.timing import FLOPS_PER_US, READ_BYTES_PER_US, graph_us, shapes
from qerl.kernels.w4a16 import Workspace, plan, sum_parts, w4a16, w4a16_parts


def random_weight(shape: tuple[int, int], device: str = "cuda", codes: Codes = "e2m1") -> Tiled:
    """A tiled weight of random codes and plausible scales; N % 64 == 0, K % 128 == 0."""
    if codes == "nf4":
        return random_nf4(shape, device)
    tiles, blocks = shape[0] // 32, shape[1] // 64
    low, high = -(2**31), 2**31 - 1
    words = torch.randint(low, high, (tiles, blocks, 256), dtype=torch.int32, device=device)
    scales = torch.randint(60, 90, (tiles, blocks // 2, 256), dtype=torch.uint8, device=device)
    scale = torch.full((tiles,), 2.0**-10, device=device)
    return TiledWeight(shape, words, scales.view(torch.int32), scale)


@dataclass
class Layers:
    """The linears of `count` decoder layers with random weights, and what their kernels need."""

    geometry: str
    tokens: int
    count: int = 4
    codes: Codes = "e2m1"
    weights: list[dict[str, Tiled]] = field(default_factory=list)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        linears = shapes(self.geometry)
        if not self.weights:
            self.weights = [
                {name: random_weight(shape, codes=self.codes) for name, shape in linears.items()}
                for _ in range(self.count)
            ]
        self.space = Workspace.allocate(
            list(linears.values()), max(self.tokens, 8), codes=self.codes
        )
        for name, (n, k) in linears.items():
            rows = -(-self.tokens // 256) * 256
            self.inputs[name] = torch.randn(rows, k, device="cuda").bfloat16()
            self.outputs[name] = torch.empty(self.tokens, n, device="cuda", dtype=torch.bfloat16)

    def plans(self) -> dict[str, Plan]:
        return {name: plan(weight, self.tokens) for name, weight in self.weights[0].items()}

    def run(self, plans: dict[str, Plan], summed: bool) -> Callable[[], None]:
        """All linears of all layers; x is in the kernel's order, as the kernel before writes it."""

        def step() -> None:
            for layer in self.weights:
                for name, weight in layer.items():
                    how, out = plans[name], self.outputs[name]
                    if how.kernel == "dense":
                        w4a16(self.inputs[name][: self.tokens], weight, how=how)
                        continue
                    rows = self.tokens if how.kernel == "gemv" else how.padded_tokens
                    x = self.inputs[name][:rows]
                    parts = w4a16_parts(x, weight, self.tokens, how, self.space, out)
                    if summed:
                        sum_parts(parts, how.pdl)

        return step


def _multiplied(weight: Tiled) -> Tensor:
    """[N, K]: the weights that the decode product stands for."""
    return layout_nf4.multiplied(weight) if isinstance(weight, TiledNF4) else dequantize(weight)


def check_plan(weight: Tiled, tokens: int, how: Plan, repeats: int = 200) -> dict[str, Any]:
    """Error of `w4a16` against float64 on poisoned output, and how many repeats differ in a bit."""
    n, k = weight.shape
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    want = x.double() @ _multiplied(weight).double().T
    space = Workspace.allocate([weight.shape], 256, codes=weight.codes)
    if how.split * tokens * n > space.partials.numel():  # a plan that is not the table's
        space = replace(space, partials=torch.empty(how.split * tokens * n, device="cuda"))
    first, differing, error = None, 0, 0.0
    out = torch.empty(tokens, n, dtype=torch.bfloat16, device="cuda")
    for _ in range(repeats):
        out.fill_(float("nan"))
        space.partials.fill_(float("nan"))
        w4a16(x, weight, out, workspace=space, how=how)
        if first is None:
            first = out.clone()
            error = float((first.double() - want).norm() / want.norm())
        differing += int(not torch.equal(out, first))
    return {
        "shape": [n, k],
        "tokens": tokens,
        "relative_error": error,
        "differing": differing,
        "repeats": repeats,
        "counters_zero": not bool(space.counters.any()),
        "plan": asdict(how),
    }


def random_adapter(widths: Sequence[int], columns: int, rows: int, rank: int) -> Adapter:
    """An adapter of random A and B for up to `rows` tokens."""
    ranks = len(widths) * rank
    partials, counters = Adapter.scratch(rows, ranks, "cuda")
    return Adapter(
        stacked=(torch.randn(ranks, columns, device="cuda") / columns**0.5).bfloat16(),
        b=torch.randn(sum(widths), rank, device="cuda").bfloat16(),
        widths=tuple(widths),
        a=torch.empty(rows, ranks, dtype=torch.bfloat16, device="cuda"),
        partials=partials,
        counters=counters,
    )


def check_lora(
    weight: Tiled, widths: Sequence[int], tokens: int, rank: int = 32, repeats: int = 200
) -> dict[str, Any]:
    """As `check_plan`, of a norm and a matmul with an adapter launched one upon the other.

    The matmul reads x without a wait of its own; x is poisoned before each run.
    """
    (n, k), how = weight.shape, plan(weight, tokens)
    residual = torch.randn(tokens, k, device="cuda").bfloat16()
    ones = torch.ones(k, device="cuda")
    x = torch.empty(256, k, dtype=torch.bfloat16, device="cuda")
    low = random_adapter(widths, k, tokens, rank)
    space = Workspace.allocate([weight.shape], 256, codes=weight.codes)
    out = torch.empty(tokens, n, dtype=torch.bfloat16, device="cuda")
    rows = how.rows_read(tokens)
    add_rms_norm(None, residual, ones, 1e-6, x)
    given = x[:tokens].double()
    products = (given @ low.stacked.double().T).split(rank, 1)
    columns = low.b.double().split(list(widths))
    added = torch.cat([p @ b.T for p, b in zip(products, columns, strict=True)], 1)
    want = given @ _multiplied(weight).double().T + added
    first, differing = None, 0
    for _ in range(repeats):
        for tensor in (x, low.a, out, space.partials, low.partials):
            tensor.fill_(float("nan"))
        add_rms_norm(None, residual, ones, 1e-6, x, order=how.order)
        parts = w4a16_parts(x[:rows], weight, tokens, how, space, out, low)
        sum_parts(parts, how.pdl)
        first = out.clone() if first is None else first
        differing += int(not torch.equal(out, first))
    assert first is not None
    error = float((first.double() - want).norm() / want.norm())
    zero = not bool(low.counters.any()) and not bool(space.counters.any())
    return {"relative_error": error, "differing": differing, "counters_zero": zero}


def check_dequantize(weight: Tiled) -> bool:
    """True if the dequantise kernel equals the torch reference bit for bit."""
    out = torch.full(weight.shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    return torch.equal(dequantize(weight, out), specified(weight))


def floor_us(geometry: str, tokens: int) -> float:
    """Least time of a layer's linears on an H200: bytes over bandwidth or operations over rate."""
    weights = sum(n * k for n, k in shapes(geometry).values())
    return max(weights * 0.5625 / READ_BYTES_PER_US, 2 * weights * tokens / FLOPS_PER_US)


def time_ours(layers: Layers) -> dict[str, float]:
    """Us a layer: parts left for the next kernel, and with the sums (bf16 out)."""
    plans, count = layers.plans(), len(layers.weights)
    return {
        "parts_us": graph_us(layers.run(plans, summed=False)) / count,
        "bf16_us": graph_us(layers.run(plans, summed=True)) / count,
    }


def precompile(
    plans: Iterable[Plan], rank: int = 0, processes: int = 16, codes: Codes = "e2m1"
) -> None:
    """Fill triton's cache in parallel; a serial bench would compile for minutes.

    Args:
        plans: kernels of kind ``dense`` are left out.
        rank: of the adapters that the matmuls add; 0 for none.
        processes: at a time.
        codes: of the weights.
    """
    distinct = {
        (
            *(p.kernel, p.split > 1, p.warps, p.blocks, p.pdl),
            *(p.token_tile, p.row_tiles, p.stages, p.registers),
        ): p
        for p in plans
        if p.kernel != "dense"
    }
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(partial(_compile, rank, codes), distinct.values(), chunksize=1)


def _compile(rank: int, codes: Codes, how: Plan) -> None:
    compile_plan(how, rank, codes == "nf4")


def tune(
    shape: tuple[int, int],
    tokens: int,
    candidates: Iterable[Plan],
    summed: bool = True,
    codes: Codes = "e2m1",
) -> list[tuple[float, Plan]]:
    """Times of `candidates` on one linear, us, best first. Weights rotate over 240 MB."""
    count = max(2, int(240e6 / (shape[0] * shape[1] * 0.5625)))
    weights = [random_weight(shape, codes=codes) for _ in range(count)]
    x = torch.randn(512, shape[1], device="cuda").bfloat16()
    out = torch.empty(tokens, shape[0], device="cuda", dtype=torch.bfloat16)
    rows = []
    for how in candidates:
        space = Workspace(
            torch.empty(max(1, how.split * tokens * shape[0]), device="cuda"),
            torch.zeros(shape[0] // 16, dtype=torch.int32, device="cuda"),
            x.flatten(),
        )
        tile = how if how.kernel == "gemv" else replace(how, tokens=tokens)
        lines = tokens if how.kernel == "gemv" else tile.padded_tokens

        def step(tile: Plan = tile, space: Workspace = space, lines: int = lines) -> None:
            for weight in weights:
                parts = w4a16_parts(x[:lines], weight, tokens, tile, space, out)
                if summed:
                    sum_parts(parts, tile.pdl)

        try:
            rows.append((graph_us(step, 8) / count, tile))
        except triton.runtime.errors.OutOfResources:
            continue  # the tile asks for more registers or shared memory than an SM has
    return sorted(rows, key=lambda row: row[0])


@dataclass(frozen=True, kw_only=True)
class LinearsBench:
    """The linears of decoder layers: checks, ours, and peers in the same process."""

    geometries: Sequence[str] = ("7b", "32b")
    """Keys of `GEOMETRIES`."""

    tokens: Sequence[int] = (1, 8, 16, 32, 64, 128, 256)
    """M: rows of x; above 256 weights are dequantised and multiplied by cuBLAS."""

    peers: Sequence[str] = ("cublas",)
    """``cublas``, ``humming``, ``marlin``, ``bnb``; the last three where they are installed."""

    layers: int = 4
    """Layers whose weights rotate."""

    repeats: int = 200
    """Runs of each plan that must agree in every bit; 0 skips the checks."""

    def run(self, rows: list[dict[str, Any]]) -> None:
        """Append one row a measurement to `rows`; raises where a result is wrong."""
        plans = [
            plan_for("NVIDIA H200", shape, m)
            for geometry in self.geometries
            for shape in shapes(geometry).values()
            for m in self.tokens
        ]
        precompile(plans)
        for geometry in self.geometries:
            self._ours(geometry, rows)
            for peer in self.peers:
                for m, us in time_peer(peer, geometry, self.tokens, self.layers).items():
                    if isinstance(us, str):
                        failed = {"section": "failed", "geometry": geometry, "tokens": m}
                        rows.append(failed | {"kernel": peer, "error": us})
                    else:
                        rows.append(self._row(geometry, m, peer, us))
                torch.cuda.empty_cache()

    def _ours(self, geometry: str, rows: list[dict[str, Any]]) -> None:
        weights: list[dict[str, Tiled]] = []
        for m in self.tokens:
            layers = Layers(geometry, m, self.layers, weights=weights)
            weights = layers.weights
            plans = layers.plans()
            if "dense" in {how.kernel for how in plans.values()}:
                us = graph_us(layers.run(plans, summed=True)) / self.layers
                rows.append(self._row(geometry, m, "qerl, bf16", us))
                continue
            if self.repeats:
                rows += [self._check(geometry, name, w, m) for name, w in weights[0].items()]
            times = time_ours(layers)
            rows.append(self._row(geometry, m, "qerl, parts", times["parts_us"]))
            rows.append(self._row(geometry, m, "qerl, bf16", times["bf16_us"]))
        del weights, layers
        torch.cuda.empty_cache()

    def _check(self, geometry: str, name: str, weight: Tiled, m: int) -> dict[str, Any]:
        found = check_plan(weight, m, plan(weight, m), self.repeats)
        if found["differing"] or not found["relative_error"] < 3e-3 or not found["counters_zero"]:
            raise ValueError(f"wrong result: {found}; no time of this kernel counts")
        return {"section": "check", "geometry": geometry, "linear": name, **found}

    def _row(self, geometry: str, m: int, kernel: str, us: float) -> dict[str, Any]:
        floor = floor_us(geometry, m)
        row = {"section": "linears", "geometry": geometry, "tokens": m, "kernel": kernel}
        return row | {"us": round(us, 2), "floor_us": round(floor, 2)}
