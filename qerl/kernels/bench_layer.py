"""Time whole decoder layers made of the decode kernels, with random weights.

A layer is norm, qkv, rope, attention, merge, o, norm, gate_up, SiLU, down; with LoRA also four
products with the stacked A. It shows how the kernels are chained: plans name the column order in
which a kernel writes the input of the next matmul, and parts are summed where they are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qerl.kernels.bench import precompile, random_adapter, random_weight
from qerl.kernels.layout_nf4 import Tiled
from qerl.kernels.lora import Adapter
from qerl.kernels.norm import add_rms_norm
from qerl.kernels.paged_attention import Cut, Tables, paged_attention
from qerl.kernels.parts import Parts
from qerl.kernels.rope import Heads, rope_and_store
from qerl.kernels.swiglu import silu_mul
from qerl.kernels.tiles import plan_for
from qerl.kernels.timing import GEOMETRIES, graph_us, shapes
from qerl.kernels.w4a16 import Workspace, plan, w4a16_parts

HEAD_DIM = 128
PAGE = 128


@dataclass
class Batch:
    """Rows of a decode batch: groups of `group` share a prompt."""

    rows: int
    prompt: int = 512
    own: int = 512
    group: int = 16

    def tables(self) -> Tables:
        """Pages in random order; prompts shared where the batch holds a whole group."""
        shared = self.group > 1 and self.rows % self.group == 0
        prompts = self.rows // self.group if shared else 0
        own = self.own if shared else self.own + self.prompt
        counts = (prompts * self.prompt // PAGE, self.rows * -(-own // PAGE))
        pages = torch.randperm(sum(counts), device="cuda")
        members = torch.arange(self.rows if shared else 0, device="cuda")
        return Tables(
            pages[: counts[0]].view(prompts, -1) if shared else pages[:0].view(0, 1),
            torch.full((prompts,), self.prompt, device="cuda"),
            members.view(prompts, self.group if shared else 1),
            pages[counts[0] :].view(self.rows, -1),
            torch.full((self.rows,), own, device="cuda"),
        )


class DecodeLayers:
    """`count` layers of a geometry, their adapters, pages and buffers."""

    def __init__(self, geometry: str, batch: Batch, rank: int = 0, count: int = 4) -> None:
        width, kv, mlp = GEOMETRIES[geometry]
        self.width, self.rank, self.rows = width, rank, batch.rows
        linears = shapes(geometry)
        self.weights: list[dict[str, Tiled]] = [
            {name: random_weight(shape) for name, shape in linears.items()} for _ in range(count)
        ]
        self.plans = {name: plan(self.weights[0][name], batch.rows) for name in linears}
        self.space = Workspace.allocate(list(linears.values()), max(8, batch.rows))
        self.tables = batch.tables()
        heads = (width // HEAD_DIM, kv // HEAD_DIM, HEAD_DIM)
        slots = PAGE * (self.tables.own_pages.numel() + self.tables.prompt_pages.numel())
        self.pages = [
            tuple(_random(heads[1], slots, HEAD_DIM) for _ in range(2)) for _ in range(count)
        ]
        angles = torch.rand(4096, HEAD_DIM // 2, device="cuda")
        self.heads = Heads(
            heads=heads[0],
            kv_heads=heads[1],
            head_dim=HEAD_DIM,
            cos=angles.cos(),
            sin=angles.sin(),
            bias=_random(linears["qkv"][0]),
        )
        self.cut = Cut.allocate(batch.rows, self.tables.members.shape[0], heads)
        last = self.tables.own_lengths - 1
        own = self.tables.own_pages.gather(1, (last // PAGE)[:, None])[:, 0]
        self.slots = own * PAGE + last % PAGE
        self.positions = torch.full((batch.rows,), batch.prompt + batch.own - 1, device="cuda")
        self.norm = torch.ones(width, device="cuda")
        self.residual = _random(batch.rows, width)
        self.q = _random(batch.rows, heads[0], HEAD_DIM)
        self.inputs = {name: _random(256, k) for name, (_, k) in linears.items()}
        self.outputs = {name: _random(batch.rows, n) for name, (n, _) in linears.items()}
        self._adapters((width, kv, mlp))

    def _adapters(self, sizes: tuple[int, int, int]) -> None:
        width, kv, mlp = sizes
        members = {"qkv": (width, kv, kv), "o": (width,), "gate_up": (mlp, mlp), "down": (width,)}
        columns = {"qkv": width, "o": width, "gate_up": width, "down": mlp}
        self.adapters: dict[str, list[Adapter]] = {
            name: [
                random_adapter(widths, columns[name], self.rows, self.rank) for _ in self.weights
            ]
            for name, widths in members.items()
            if self.rank
        }

    def _order(self, name: str) -> str:
        return self.plans[name].order

    def _linear(self, layer: int, name: str) -> Parts:
        x, how = self.inputs[name], self.plans[name]
        adapter = self.adapters[name][layer] if self.rank else None
        rows = x[: how.rows_read(self.rows)]
        weight, out = self.weights[layer][name], self.outputs[name]
        return w4a16_parts(rows, weight, self.rows, how, self.space, out, adapter)

    def step(self) -> None:
        """All layers once."""
        for layer in range(len(self.weights)):
            self.layer(layer)
        self._norm(self._linear(len(self.weights) - 1, "down"), "qkv")

    def layer(self, layer: int) -> None:
        """One decoder layer; the norm of the layer after it is in the next call."""
        self._norm(self._linear(layer - 1, "down") if layer else None, "qkv")
        qkv = self._linear(layer, "qkv")
        keys, values = self.pages[layer]
        rope_and_store(
            *(qkv, self.heads, (self.positions, self.slots), self.q, (keys, values)),
            carve=self._order("o") == "mma",
        )
        paged_attention(
            self.q,
            (keys, values),
            self.tables,
            PAGE,
            self.cut,
            self.inputs["o"],
            order=self._order("o"),
        )
        self._norm(self._linear(layer, "o"), "gate_up")
        gate_up = self._linear(layer, "gate_up")
        silu_mul(gate_up, self.inputs["down"], order=self._order("down"))

    def _norm(self, parts: Parts | None, following: str) -> None:
        out, order = self.inputs[following], self._order(following)
        add_rms_norm(parts, self.residual, self.norm, 1e-6, out, order=order)

    def attention(self) -> None:
        """The attention of all layers alone."""
        for pages in self.pages:
            keys, values = pages
            paged_attention(self.q, (keys, values), self.tables, PAGE, self.cut, self.inputs["o"])

    def matmuls(self) -> None:
        """The linears of all layers alone."""
        rank, self.rank = self.rank, 0
        for layer in range(len(self.weights)):
            for name in self.plans:
                self._linear(layer, name)
        self.rank = rank

    def times(self) -> dict[str, Any]:
        """Us a layer: everything, the matmuls alone, the attention alone, and its bytes per us."""
        count = len(self.weights)
        attention = graph_us(self.attention) / count
        tokens = int(self.tables.own_lengths.sum() + self.tables.prompt_lengths.sum())
        heads = self.heads
        kv_bytes = 4 * tokens * heads.kv_heads * heads.head_dim
        return {
            "layer_us": graph_us(self.step) / count,
            "matmuls_us": graph_us(self.matmuls) / count,
            "attention_us": attention,
            "attention_gb_per_s": kv_bytes / attention / 1e3,
        }


@dataclass(frozen=True, kw_only=True)
class LayersBench:
    """Whole decoder layers: matmuls, small kernels, attention; with and without LoRA."""

    geometries: Sequence[str] = ("7b",)
    """Keys of `timing.GEOMETRIES`."""

    batches: Sequence[int] = (1, 8, 16, 64, 128)
    """Rows of the decode batch; from 16 on, groups of 16 share their prompt."""

    ranks: Sequence[int] = (0, 32)
    """LoRA ranks on all linears; 0 for none."""

    prompt: int = 512
    """Tokens of a prompt, a multiple of 128."""

    own: int = 512
    """Tokens that each row has generated."""

    layers: int = 4
    """Layers whose weights and pages rotate."""

    def run(self, rows: list[dict[str, Any]]) -> None:
        """Append one row a measurement to `rows`."""
        linears = [shape for geometry in self.geometries for shape in shapes(geometry).values()]
        for rank in self.ranks:
            precompile((plan_for("NVIDIA H200", s, m) for s in linears for m in self.batches), rank)
        for geometry in self.geometries:
            for batch in self.batches:
                for rank in self.ranks:
                    size = Batch(batch, self.prompt, self.own)
                    times = DecodeLayers(geometry, size, rank, self.layers).times()
                    row = {"section": "layer", "geometry": geometry, "batch": batch, "rank": rank}
                    rows.append(row | {key: round(value, 2) for key, value in times.items()})
                    torch.cuda.empty_cache()


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
