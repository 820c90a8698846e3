"""Decoding by CUDA graph: the host replays whole steps and reads, a little late, who has ended.

A step of a fixed number of rows and prompts is captured once and replayed; the host looks at the
flags of a period while the device computes the next one, so the device never waits for it. Rows
that have ended stand still for up to two periods; then waiting sequences take their places, and
when none wait and few run, the batch shrinks to a smaller graph.

Where there is no CUDA device the same steps run uncaptured: that is how they are tested.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from qerl.kernels.advance import Rows, advance
from qerl.kernels.sample import Draws, sample
from qerl.kernels.tiles import BUCKETS, bucket
from qerl.model.policy import Policy
from qerl.rollout.call import Drawing, known
from qerl.rollout.device_step import Bound, DeviceStep, Limits
from qerl.rollout.pages import PagePool
from qerl.rollout.scheduler import Sequence
from qerl.rollout.stacks import Stack, policy_stacks
from qerl.types import Prompts

PERIOD = 4  # steps between two looks at the flags
WIDTH = 16  # rows of a prompt that read its keys together; more take another place

Key = tuple[int, int, int, float]
"""Of a captured step: rows, places for prompts, rows of a place, temperature."""


class Graphs:
    """Buffers and captured steps that serve one call after the other, until `release`."""

    def __init__(
        self, policy: Policy, stacks: list[dict[str, Stack]], max_sequences: int, page_size: int
    ) -> None:
        """Take no memory yet; `of` finds the stacks."""
        self._policy = policy
        self._stacks = stacks
        self._rows = bucket(min(max_sequences, BUCKETS[-1]))
        self._page_size = page_size
        self.step: DeviceStep | None = None
        self._pool: PagePool | None = None
        self._bound: dict[Key, tuple[Bound, Tensor, torch.cuda.CUDAGraph | None]] = {}
        self._memory: Any = None  # one scratch for all graphs: they take turns

    @staticmethod
    def of(policy: Policy, max_sequences: int, page_size: int) -> "Graphs | None":
        """Graphs, or None where the kernels cannot decode this policy from its own bytes."""
        head_dim, decoder = policy.spec.head_dim, policy.decoder
        powers = page_size & (page_size - 1) == 0 and head_dim & (head_dim - 1) == 0
        if not powers or page_size < 16:
            return None
        if decoder.device.type == "cuda" and decoder.dtype != torch.bfloat16:
            return None
        stacks = policy_stacks(policy)
        return None if stacks is None else Graphs(policy, stacks, max_sequences, page_size)

    @property
    def rows(self) -> int:
        """Most rows of a step."""
        return self._rows

    def prepare(
        self, pool: PagePool, prompts: Prompts, max_new_tokens: int, ends: frozenset[int]
    ) -> DeviceStep:
        """The buffers for a call, with the adapters as they are."""
        longest = max(map(len, prompts.tokens))
        limits = Limits(
            rows=self._rows,
            prompt_pages=-(-longest // self._page_size),
            own_pages=max(1, -(-(max_new_tokens - 1) // self._page_size)),
            longest=max_new_tokens,
            positions=longest + max_new_tokens,
            ends=len(ends),
        )
        step = self.step
        if step is None or pool is not self._pool or not step.limits.holds(limits):
            old = None if step is None else step.limits
            self.release()
            step = DeviceStep(
                self._policy, self._stacks, pool, limits if old is None else old.joined(limits)
            )
            self.step, self._pool = step, pool
        for stacks in self._stacks:
            for stack in stacks.values():
                stack.refresh()
        step.rows.live.zero_()
        step.rows.own_lengths.zero_()
        step.ends.fill_(-1)
        if ends:
            step.ends[: len(ends)] = torch.tensor(sorted(ends)).to(step.device)
        return step

    def release(self) -> None:
        """Drop buffers and captured steps."""
        self.step = self._pool = self._memory = None
        self._bound = {}

    def replay(self, key: Key, members: Int[Tensor, "U W"] | None, steps: int) -> None:
        """Run `steps` steps of a shape; with `members`, its rows' prompts change first."""
        if key not in self._bound:
            self._bound[key] = self._bind(key)
        bound, places, graph = self._bound[key]
        if members is not None:
            places.copy_(members)
        for _ in range(steps):
            if graph is None:
                bound()
            else:
                graph.replay()

    def _bind(self, key: Key) -> tuple[Bound, Tensor, torch.cuda.CUDAGraph | None]:
        rows, prompts, width, temperature = key
        assert self.step is not None
        device = self.step.device
        places = torch.full((prompts, width), -1, dtype=torch.int64, device=device)
        bound = self.step.bind(rows, places, temperature)
        if device.type != "cuda":
            return bound, places, None
        # Twice, so that everything is compiled and shared memory is cut as the graph finds it;
        # over rows that stand still, so that no sequence moves.
        before = bound.rows.take(torch.arange(rows, device=device))
        bound.rows.live.zero_()
        bound.rows.own_lengths.zero_()
        bound.rows.slots.zero_()
        for _ in range(2):
            bound()
        torch.cuda.synchronize(device)
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            bound()
        bound.rows.put(torch.arange(rows, device=device), before)
        return bound, places, graph


@dataclass(frozen=True, slots=True)
class _Look:
    """Flags of the rows at the end of a period, on their way to the host."""

    flags: Int[Tensor, "2 B"]
    """live, ended."""

    event: torch.cuda.Event | None

    sequences: list[Sequence | None] = field(default_factory=list)
    """What each row held then."""


class GraphCall(Drawing):
    """One `generate` by replayed steps."""

    @torch.no_grad()
    def attach(self, graphs: Graphs, prompts: Prompts) -> "GraphCall":
        """Take the buffers; before the first step."""
        self._graphs = graphs
        self._flash = self._pool.keys.device.type == "cuda"
        new_tokens = self._sampling.max_new_tokens
        self._step = graphs.prepare(self._pool, prompts, new_tokens, self._eos_ids)
        self._sequences: list[Sequence | None] = []
        self._launched: dict[int, int] = {}  # row of the caller -> tokens drawn or being drawn
        self._looks: deque[_Look] = deque()
        self._members: Tensor | None = None
        self._key: Key | None = None
        self._resize(bucket(min(graphs.rows, self._scheduler.unfinished)))
        return self

    def step(self) -> None:
        """Fill free rows, run a period, and take out the sequences that ended a period ago."""
        if self._refill_pays():
            self._refill()
        steps = self._steps_to_go()
        if steps:
            assert self._key is not None
            self._graphs.replay(self._key, self._members, steps)
            self._members = None
            live = [s for s in self._sequences if s is not None]
            for sequence in live:
                self._launched[sequence.row] += steps
            self.steps += steps
            self.row_steps += steps * len(live)
        if steps or not self._looks:
            self._looks.append(self._look())
        while len(self._looks) > (1 if steps else 0):
            self._collect(self._looks.popleft())
        self._shrink()

    def _resize(self, rows: int) -> None:
        """Go on with the first `rows` rows, which hold every running sequence."""
        self._sequences = (self._sequences + [None] * rows)[:rows]
        self._group()

    def _steps_to_go(self) -> int:
        """Steps of the next period: none where every row is at its cap."""
        cap = self._sampling.max_new_tokens
        left = [cap - self._launched[s.row] for s in self._sequences if s is not None]
        return min(PERIOD, max(left, default=0))

    def _refill_pays(self) -> bool:
        """Whether to stop for waiting sequences: a prefill pass reads every weight once."""
        waiting = self._scheduler.unfinished - len(self._scheduler.running)
        free = self._sequences.count(None)
        if not waiting or not free:
            return False
        return free >= max(1, len(self._sequences) // 16) or free == len(self._sequences)

    def _refill(self) -> None:
        """Admit what fits, draw first tokens, and give the sequences rows."""
        admitted, prefills = self._scheduler.admit()
        if not admitted:
            return
        self._prefill(prefills)
        device, size = self._step.device, self._pool.page_size
        hidden = torch.stack([known(s.prompt.hidden) for s in admitted])
        logits = self._decoder.logits(hidden)  # [b, V]
        new = self._new_rows(admitted)
        count, vocabulary = logits.shape
        draws = Draws.allocate(count, vocabulary, device)
        sample(logits, new.seeds, new.lengths, self._sampling.temperature, draws)
        advance(new, draws.tokens, draws.logprobs, self._step.ends, size)
        free = [row for row, held in enumerate(self._sequences) if held is None][:count]
        for row, sequence in zip(free, admitted, strict=True):
            self._sequences[row] = sequence
            self._launched[sequence.row] = 1
        self._step.rows.put(torch.tensor(free).to(device), new)
        self.steps += 1
        self.row_steps += len(self._scheduler.running)
        self._group()

    def _new_rows(self, admitted: list[Sequence]) -> Rows:
        """State of sequences that have drawn nothing."""
        limits, device = self._step.limits, self._step.device
        new = Rows.allocate(len(admitted), limits.own_pages, limits.longest, device)
        rows = torch.tensor([s.row for s in admitted]).to(device)
        new.seeds.copy_(self._seeds[rows])
        new.caps.fill_(self._sampling.max_new_tokens)
        new.live.fill_(1)
        new.prompt_lengths.copy_(torch.tensor([len(s.prompt.tokens) for s in admitted]))
        pages = [s.pages + [0] * (limits.own_pages - len(s.pages)) for s in admitted]
        new.own_pages.copy_(torch.tensor(pages))
        return new

    def _group(self) -> None:
        """Tell the step which rows share which prompt."""
        rows: dict[int, list[int]] = {}
        prompts = {}
        for row, sequence in enumerate(self._sequences):
            if sequence is not None:
                rows.setdefault(id(sequence.prompt), []).append(row)
                prompts[id(sequence.prompt)] = sequence.prompt
        width = min(WIDTH, self._sampling.group_size)
        places = [
            (prompts[key], members[start : start + width])
            for key, members in rows.items()
            for start in range(0, len(members), width)
        ]
        count = 1 << (max(1, len(places)) - 1).bit_length()
        limits = self._step.limits
        pages = torch.zeros(count, limits.prompt_pages, dtype=torch.int64)
        lengths = torch.zeros(count, dtype=torch.int64)
        table = torch.full((count, width), -1, dtype=torch.int64)
        for place, (prompt, members) in enumerate(places):
            own = torch.tensor(prompt.pages())
            pages[place, : len(own)] = own
            lengths[place] = len(prompt.tokens)
            table[place, : len(members)] = torch.tensor(members)
        self._step.prompt_pages[:count].copy_(pages)
        self._step.prompt_lengths[:count].copy_(lengths)
        self._members = table
        self._key = (len(self._sequences), count, width, self._sampling.temperature)

    def _look(self) -> _Look:
        """Send the flags to the host, without waiting for them."""
        rows = self._step.rows.first(len(self._sequences))
        flags = torch.stack((rows.live, rows.ended))
        if flags.device.type != "cuda":
            return _Look(flags, None, list(self._sequences))
        host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        host.copy_(flags, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Look(host, event, list(self._sequences))

    def _collect(self, look: _Look) -> None:
        """Take out the sequences that a look shows to have ended."""
        if look.event is not None:
            look.event.synchronize()
        live, ended = look.flags.tolist()
        over = [
            (row, sequence)
            for row, sequence in enumerate(look.sequences)
            if sequence is not None and not live[row] and self._sequences[row] is sequence
        ]
        if not over:
            return
        device, width = self._step.device, self._sampling.max_new_tokens
        at = torch.tensor([row for row, _ in over]).to(device)
        to = torch.tensor([sequence.row for _, sequence in over]).to(device)
        rows = self._step.rows
        self._tokens[to] = rows.drawn[at, :width]
        self._logprobs[to] = rows.logprobs[at, :width]
        self._lengths[to] = rows.lengths[at]
        for row, sequence in over:
            self._ended[sequence.row] = bool(ended[row])
            self._sequences[row] = None
            self._scheduler.finish(sequence)

    def _shrink(self) -> None:
        """Move the last sequences of a call to a smaller step."""
        running = [row for row, sequence in enumerate(self._sequences) if sequence is not None]
        if not running or self._scheduler.unfinished > len(running):
            return
        rows = bucket(len(running))
        if rows >= len(self._sequences):
            return
        self._looks.clear()  # their rows have moved; the next look shows the same sequences
        device = self._step.device
        kept = self._step.rows.take(torch.tensor(running).to(device))
        self._sequences = [self._sequences[row] for row in running]
        self._step.rows.live.zero_()
        self._step.rows.own_lengths.zero_()
        self._step.rows.put(torch.arange(len(running), device=device), kept)
        self._resize(rows)
