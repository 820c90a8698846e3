"""A whole decode step on the device: embed, layers, head, draw, and what follows a draw.

Nothing in it depends on the host: tokens, lengths, positions, slots and the stop test are in fixed
buffers, so a captured step can be replayed without a word from Python. Norms are read where the
policy has them, noise included; adapters from the buffers of `stacks`.
"""

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Int
from torch import Tensor

from qerl.kernels.advance import Rows, advance
from qerl.kernels.lora import Adapter, add_adapter, expand, shrink
from qerl.kernels.norm import add_rms_norm
from qerl.kernels.paged_attention import Cut, Tables, paged_attention
from qerl.kernels.parts import Parts
from qerl.kernels.rope import Heads, rope_and_store
from qerl.kernels.sample import Draws, sample
from qerl.kernels.swiglu import silu_mul
from qerl.kernels.tiles import BUCKETS, Codes, Plan
from qerl.kernels.w4a16 import Workspace, plan, w4a16_parts
from qerl.model.head import project
from qerl.model.policy import Policy
from qerl.rollout.pages import PagePool
from qerl.rollout.stacks import STACKS, Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes of the buffers of a decode step."""

    rows: int
    """Most rows, one of `BUCKETS`."""

    prompt_pages: int
    """Of the longest prompt."""

    own_pages: int
    """Of the longest completion, at least 1."""

    longest: int
    """Tokens of the longest completion."""

    positions: int
    """Tokens of the longest sequence."""

    ends: int
    """Ids that end a completion."""

    def holds(self, other: "Limits") -> bool:
        """True where buffers of these sizes serve `other`."""
        return self.rows == other.rows and all(
            getattr(self, f.name) >= getattr(other, f.name) for f in fields(self)
        )

    def joined(self, other: "Limits") -> "Limits":
        """Sizes that serve both, for the rows of `other`."""
        sizes = {f.name: max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return Limits(**(sizes | {"rows": other.rows}))


class DeviceStep:
    """The buffers of a decode step, and the step over the first rows of them."""

    def __init__(
        self, policy: Policy, stacks: list[dict[str, Stack]], pool: PagePool, limits: Limits
    ) -> None:
        """Allocate; `limits.rows` is one of `BUCKETS`."""
        decoder, spec = policy.decoder, policy.spec
        device, dtype, rows = decoder.device, decoder.dtype, limits.rows
        self._policy, self._stacks, self._pool = policy, stacks, pool
        self.limits, self.device = limits, device
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.rows = Rows.allocate(rows, limits.own_pages, limits.longest, device)
        self.ends = torch.full((max(1, limits.ends),), -1, device=device)  # [E]
        self.prompt_pages = torch.zeros(
            rows, limits.prompt_pages, dtype=torch.int64, device=device
        )  # [U, m]
        self.prompt_lengths = torch.zeros(rows, dtype=torch.int64, device=device)  # [U]
        self._sizes = (spec.heads, spec.kv_heads, spec.head_dim)
        cos, sin = decoder.rotary(torch.arange(limits.positions, device=device))
        self._heads = [
            Heads(
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                cos=cos[:, 0].contiguous(),
                sin=sin[:, 0].contiguous(),
                bias=some["qkv"].bias,
                q_norm=None if a.q_norm is None else a.q_norm.weight,
                k_norm=None if a.k_norm is None else a.k_norm.weight,
                eps=spec.rms_eps,
            )
            for some, a in zip(stacks, (layer.attention for layer in policy.layers()), strict=True)
        ]

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        shapes = {name: stacks[0][name].shape for name in STACKS}
        self._residual = buffer(rows, spec.hidden_size)
        self._hidden = buffer(rows, spec.hidden_size)
        self._q = buffer(rows, spec.heads, spec.head_dim)
        self._inputs = {name: buffer(BUCKETS[-1], k) for name, (_, k) in shapes.items()}
        self._outputs = {name: buffer(rows, n) for name, (n, _) in shapes.items()}
        weights = [stack.weight for stack in stacks[0].values()]
        codes: Codes = next((w.codes for w in weights if not isinstance(w, Tensor)), "e2m1")
        self._space = Workspace.allocate(list(shapes.values()), rows, device, codes)
        self._make_adapters(rows)

    def _make_adapters(self, rows: int) -> None:
        """What the kernels take of each stack's LoRA."""
        found = [
            (layer, name, stack)
            for layer, stacks in enumerate(self._stacks)
            for name, stack in stacks.items()
            if stack.lora_a is not None
        ]
        widest = max((len(s.lora_a) for *_, s in found if s.lora_a is not None), default=1)
        partials, counters = Adapter.scratch(rows, widest, self.device)
        dtype = self._residual.dtype
        self._adapters: dict[tuple[int, str], Adapter] = {}
        for layer, name, stack in found:
            assert stack.lora_a is not None
            assert stack.lora_b is not None
            self._adapters[layer, name] = Adapter(
                stacked=stack.lora_a,
                b=stack.lora_b,
                widths=stack.widths,
                a=torch.zeros(rows, len(stack.lora_a), dtype=dtype, device=self.device),
                partials=partials,
                counters=counters,
            )

    def adapters(self, rows: int) -> dict[tuple[int, str], Adapter]:
        """LoRA for the first `rows` rows, by layer and stack; without those that have none."""
        return {key: replace(some, a=some.a[:rows]) for key, some in self._adapters.items()}

    def plans(self, rows: int) -> dict[str, Plan]:
        """How each stack is multiplied by `rows` rows."""
        found = {}
        for name in STACKS:
            weight = self._stacks[0][name].weight
            dense = Plan(kernel="dense", tokens=rows)
            found[name] = dense if isinstance(weight, Tensor) else plan(weight, rows)
        return found

    def cut(self, rows: int, prompts: int) -> Cut:
        """How attention over `rows` rows of `prompts` prompts is split."""
        cut = Cut.allocate(rows, prompts, self._sizes, self.device)
        # A row without a prompt merges what the prompt's part holds for it: nothing, not garbage.
        cut.mixed.zero_()
        cut.stats.zero_()
        return cut

    def bind(self, rows: int, members: Int[Tensor, "U W"], temperature: float) -> "Bound":
        """The step over the first `rows` rows, whose prompts are the first U."""
        return Bound(self, rows, members, temperature)


class Bound:
    """A step of fixed shape: what a graph captures."""

    def __init__(
        self, step: DeviceStep, rows: int, members: Int[Tensor, "U W"], temperature: float
    ) -> None:
        self._step, self._count, self._temperature = step, rows, temperature
        self.rows = step.rows.first(rows)
        prompts = members.shape[0]
        self._tables = Tables(
            step.prompt_pages[:prompts],
            step.prompt_lengths[:prompts],
            members,
            self.rows.own_pages,
            self.rows.own_lengths,
        )
        self._cut = step.cut(rows, prompts)
        self._plans = step.plans(rows)
        self._adapters = step.adapters(rows)
        self._draws = Draws.allocate(rows, len(step._policy.decoder.head), step.device)

    def __call__(self) -> None:
        """Feed every row's newest token, draw the next one, take it over."""
        step = self._step
        decoder, rows = step._policy.decoder, self.rows
        residual = step._residual[: self._count]
        torch.index_select(decoder.embed, 0, rows.tokens, out=residual)
        parts: Parts | None = None
        for index, layer in enumerate(step._policy.layers()):
            norm = layer.input_norm
            self._norm(parts, norm.weight, norm.eps, "qkv")
            self._attention(index)
            norm = layer.post_attention_norm
            self._norm(self._linear(index, "o"), norm.weight, norm.eps, "gate_up")
            out, order = step._inputs["down"], self._plans["down"].order
            silu_mul(self._linear(index, "gate_up"), out, order=order)
            parts = self._linear(index, "down")
        hidden, final = step._hidden[: self._count], decoder.final_norm
        add_rms_norm(parts, residual, final.weight, final.eps, hidden)
        logits = project(hidden, decoder.head)  # [rows, V]
        drawn = sample(logits, rows.seeds, rows.lengths, self._temperature, self._draws)
        advance(rows, drawn.tokens, drawn.logprobs, step.ends, step._pool.page_size)

    def _norm(self, parts: Parts | None, weight: Tensor, eps: float, following: str) -> None:
        step, order = self._step, self._plans[following].order
        residual, out = step._residual[: self._count], step._inputs[following]
        add_rms_norm(parts, residual, weight, eps, out, order=order)

    def _attention(self, index: int) -> None:
        step, order = self._step, self._plans["o"].order
        pages, q = step._pool.layer_slots(index), step._q[: self._count]
        qkv = self._linear(index, "qkv")
        places = (self.rows.positions, self.rows.slots)
        heads = step._heads[index]
        rope_and_store(qkv, heads, places, q, pages, carve=order == "mma")
        size, out = step._pool.page_size, step._inputs["o"]
        paged_attention(q, pages, self._tables, size, self._cut, out, order=order)

    def _linear(self, index: int, name: str) -> Parts:
        """The stack's product with its adapter, as parts."""
        step, how, rows = self._step, self._plans[name], self._count
        stack, x, out = step._stacks[index][name], step._inputs[name], step._outputs[name][:rows]
        adapter = self._adapters.get((index, name))
        if isinstance(stack.weight, Tensor):
            return Parts.of(self._dense(x, stack.weight, out, adapter))
        return w4a16_parts(
            x[: how.rows_read(rows)], stack.weight, rows, how, step._space, out, adapter
        )

    def _dense(self, x: Tensor, weight: Tensor, out: Tensor, adapter: Adapter | None) -> Tensor:
        """The product with a dense weight; the adapter's first product runs beside it."""
        side = self._step.side
        if adapter is None or side is None:
            y = torch.mm(x[: self._count], weight.T, out=out)
            return y if adapter is None else add_adapter(y, x, adapter)
        main = torch.cuda.current_stream(self._step.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            a = shrink(x, adapter, pdl=0)
        y = torch.mm(x[: self._count], weight.T, out=out)
        main.wait_stream(side)
        return expand(y, a, adapter, pdl=0)
