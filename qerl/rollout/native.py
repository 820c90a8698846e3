"""Our engine: the policy's own decoder over paged keys and values, with continuous batching.

All P * G sequences of a step share one batch: each distinct prompt is computed once, rows leave
the batch when they finish, and waiting sequences take their places. There is no copy of any
weight, so there is nothing to synchronise: sampler and trainer cannot be different policies.
"""

import time
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qerl.model.layers import RMSNorm
from qerl.model.policy import Policy
from qerl.rollout.attend import DecodeAttend, Groups, PrefillAttend
from qerl.rollout.engine import Progress, RolloutStats, check_idle, check_request
from qerl.rollout.pages import PagePool, page_bytes
from qerl.rollout.sampler import draw, sequence_seeds, uniforms
from qerl.rollout.scheduler import Prefill, Scheduler
from qerl.rollout.scheduler import Sequence as Running
from qerl.types import Prompts, Rollouts, Sampling


class NativeEngine:
    """Samples with the very tensors that are trained."""

    name = "native"

    def __init__(
        self,
        policy: Policy,
        *,
        max_sequences: int = 64,
        page_size: int = 16,
        kv_budget_gib: float = 4.0,
        max_context: int | None = None,
        prefill_tokens: int = 8192,
        eos_ids: Sequence[int] | None = None,
    ) -> None:
        """Take no memory yet; the first call does.

        Args:
            policy: whose adapters and noisy norms are read at every call.
            max_sequences: rows of the decode batch.
            page_size: tokens of a key/value page; also the grain at which prompts share.
            kv_budget_gib: most memory for keys and values, in GiB. A call takes no more than it
                can use.
            max_context: most tokens of prompt and completion; None takes the model's own limit.
            prefill_tokens: most prompt tokens in one pass, unless one prompt alone has more.
            eos_ids: ids that end a completion; None takes those of the model's config.
        """
        limit = policy.spec.max_positions
        self._policy = policy
        self._max_sequences = max_sequences
        self._page_size = page_size
        self._budget_bytes = int(kv_budget_gib * 2**30)
        self._max_context = limit if max_context is None else max_context
        self._prefill_tokens = prefill_tokens
        self._eos_ids = frozenset(policy.spec.eos_ids if eos_ids is None else eos_ids)
        if max_sequences < 1:
            raise ValueError(f"max_sequences={max_sequences}: at least 1 row")
        if page_size < 1:
            raise ValueError(f"page_size={page_size}: at least 1 token")
        if self._max_context > limit:
            raise ValueError(f"max_context={max_context}: the model's limit is {limit} positions")
        self._pool: PagePool | None = None
        self._busy = False
        self.stats: RolloutStats | None = None

    @property
    def norms(self) -> Sequence[RMSNorm]:
        """The policy's own norms, which this engine reads."""
        return self._policy.noisy_norms

    @property
    def pool(self) -> PagePool | None:
        """Key/value memory; None until the first call and after `release`."""
        return self._pool

    def sync(self) -> None:
        """Nothing to copy: the engine reads the policy's adapters."""
        check_idle(self._busy)

    def release(self) -> None:
        """Free the key/value memory; the next call takes it again."""
        check_idle(self._busy)
        self._pool = None

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        *,
        seed: int,
        rollout_step: int,
        sigma: float = 0.0,
        progress: Progress | None = None,
    ) -> Rollouts:
        """Draw `sampling.group_size` completions of every prompt; see `Engine.generate`.

        A completion is a function of (weights, prompt, seed, rollout step, prompt id, sample
        index): neither the other prompts nor `max_sequences` take part, up to the rounding of
        matrix products of different heights.
        """
        check_idle(self._busy)
        check_request(self._policy, prompts, sampling.max_new_tokens, self._max_context)
        started = time.perf_counter()
        own_pages = -(-(sampling.max_new_tokens - 1) // self._page_size)  # the last is never fed
        pool = self._take_pool(prompts, sampling.group_size, own_pages)
        scheduler = Scheduler(
            prompts.tokens,
            sampling.group_size,
            pool=pool,
            max_sequences=self._max_sequences,
            own_pages=own_pages,
        )
        seeds = sequence_seeds(seed, rollout_step, prompts.ids, sampling.group_size)
        call = _Call(self._policy, scheduler, pool, sampling, seeds, self._prefill_tokens)
        self._busy = True
        try:
            self._run(call, scheduler, sampling, progress)
            assert pool.used == 0, f"{pool.used} pages are held after the last sequence"
        finally:
            self._busy = False
            peak = pool.peak
            pool.reset()
        rollouts = call.rollouts(prompts, rollout_step=rollout_step, sigma=sigma)
        self.stats = RolloutStats(
            sequences=len(seeds),
            tokens=int(rollouts.lengths.sum()),
            seconds=time.perf_counter() - started,
            prompt_tokens=sum(map(len, prompts.tokens)) * sampling.group_size,
            prefill_tokens=call.prefill_tokens,
            occupancy=call.row_steps / (call.steps * self._max_sequences),
            peak_pages=peak,
            peak_kv_bytes=peak * page_bytes(self._policy.spec, self._page_size, pool.keys.dtype),
        )
        return rollouts

    def _run(
        self, call: "_Call", scheduler: Scheduler, sampling: Sampling, progress: Progress | None
    ) -> None:
        """Draw tokens until every sequence is finished."""
        eos_ids = frozenset() if sampling.ignore_eos else self._eos_ids
        total = scheduler.unfinished
        # no_grad, not inference_mode: tensors that the model may cache on the way stay usable in
        # training.
        with torch.no_grad():
            while scheduler.unfinished:
                before = scheduler.unfinished
                call.step(eos_ids)
                if progress is not None and scheduler.unfinished < before:
                    progress(total - scheduler.unfinished, total)

    def _take_pool(self, prompts: Prompts, group_size: int, own_pages: int) -> PagePool:
        """A pool of as many pages as the call can use or the budget allows; kept if it suffices."""
        spec, decoder = self._policy.spec, self._policy.decoder
        size = self._page_size
        rows = min(self._max_sequences, len(prompts) * group_size)
        # Pages are held for the prompts of running rows and for the next in line, no others.
        chains = sorted((-(-len(tokens) // size) for tokens in set(prompts.tokens)), reverse=True)
        useful = rows * own_pages + sum(chains[: rows + 1])
        allowed = self._budget_bytes // page_bytes(spec, size, decoder.dtype) - 1  # one pads
        pages = max(1, min(useful, allowed))
        pool = self._pool
        if pool is None or pool.pages < pages or pool.keys.device != decoder.device:
            self._pool = None  # freed before its successor is allocated
            pool = PagePool(
                spec, pages=pages, page_size=size, dtype=decoder.dtype, device=decoder.device
            )
            self._pool = pool
        return pool


class _Call:
    """State of one `generate`: what is drawn so far, on the device."""

    def __init__(
        self,
        policy: Policy,
        scheduler: Scheduler,
        pool: PagePool,
        sampling: Sampling,
        seeds: Int[Tensor, " B"],
        prefill_tokens: int,
    ) -> None:
        self._decoder = policy.decoder
        self._scheduler = scheduler
        self._pool = pool
        self._sampling = sampling
        self._pass_tokens = prefill_tokens
        device = pool.keys.device
        shape = (len(seeds), sampling.max_new_tokens)
        self._seeds = seeds.to(device)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)  # [B, C]
        self._logprobs = torch.zeros(shape, device=device)  # [B, C] nats
        self._lengths = torch.zeros(len(seeds), dtype=torch.int64, device=device)  # [B]
        self._ended = [False] * len(seeds)  # by an end-of-sequence token
        self._groups: Groups | None = None
        self.prefill_tokens = 0
        self.steps = 0
        self.row_steps = 0

    def step(self, eos_ids: frozenset[int]) -> None:
        """Admit what fits, then draw one token for every running sequence."""
        decoding = list(self._scheduler.running)
        admitted, prefills = self._scheduler.admit()
        hidden = []
        if decoding:
            hidden.append(self._decode(decoding))  # [decoding, D]
        if admitted:
            self._prefill(prefills)
            hidden.append(torch.stack([_known(s.prompt.hidden) for s in admitted]))
            self._groups = None
        # One head pass serves decoded and new rows: it reads the largest matrix of the model.
        running = decoding + admitted
        rows = torch.tensor([sequence.row for sequence in running]).to(self._seeds.device)  # [b]
        lengths = self._lengths[rows]  # [b]
        logits = self._decoder.logits(torch.cat(hidden))  # [b, V]
        drawn = draw(logits, uniforms(self._seeds[rows], lengths), self._sampling)
        self._tokens[rows, lengths] = drawn.tokens
        self._logprobs[rows, lengths] = drawn.logprobs
        self._lengths[rows] = lengths + 1
        self.steps += 1
        self.row_steps += len(running)
        self._retire(running, drawn.tokens.tolist(), eos_ids)

    def rollouts(self, prompts: Prompts, *, rollout_step: int, sigma: float) -> Rollouts:
        """What was drawn, on the host, cut to the longest completion."""
        lengths = self._lengths.cpu()  # [B]
        longest = int(lengths.max())
        logprobs = self._logprobs[:, :longest].cpu()  # [B, C]
        if not bool(logprobs.isfinite().all()):
            row = int((~logprobs.isfinite()).any(1).nonzero()[0])
            prompt_id = prompts.ids[row // self._sampling.group_size]
            raise FloatingPointError(
                f"a drawn token of {prompt_id} has no finite log-probability (rollout_step="
                f"{rollout_step}, sigma={sigma}): adapters or noise have diverged"
            )
        return Rollouts(
            prompts=prompts,
            group_size=self._sampling.group_size,
            completions=self._tokens[:, :longest].cpu(),
            lengths=lengths,
            sampler_logprobs=logprobs,
            truncated=~torch.tensor(self._ended),
            rollout_step=rollout_step,
            sigma=sigma,
        )

    def _retire(self, running: list[Running], tokens: list[int], eos_ids: frozenset[int]) -> None:
        """Take out the sequences that this step's tokens ended."""
        for sequence, token in zip(running, tokens, strict=True):
            sequence.length += 1
            ended = token in eos_ids
            if ended or sequence.length == self._sampling.max_new_tokens:
                self._ended[sequence.row] = ended
                self._scheduler.finish(sequence)
                self._groups = None

    def _decode(self, running: list[Running]) -> Float[Tensor, "b D"]:
        """Final hidden state of each row's newest token."""
        if self._groups is None:
            self._groups = Groups.of(running, self._seeds.device)
        groups = self._groups
        lengths = self._lengths[groups.rows]  # [b]
        attend = DecodeAttend(self._pool, groups, lengths, max(s.length for s in running))
        tokens = self._tokens[groups.rows, lengths - 1]  # [b]
        hidden: Tensor = self._decoder(tokens, groups.row_lengths + lengths - 1, attend)
        return hidden

    def _prefill(self, prefills: list[Prefill]) -> None:
        """Compute the prompts' missing pages and the hidden state of their last tokens."""
        device = self._seeds.device
        for part in _passes(prefills, self._pass_tokens):
            tokens = torch.tensor([t for p in part for t in p.prompt.tokens[p.start :]])  # [S]
            positions = torch.cat([torch.arange(p.start, len(p.prompt.tokens)) for p in part])
            attend = PrefillAttend(self._pool, part)
            hidden = self._decoder(tokens.to(device), positions.to(device), attend)  # [S, D]
            ends = torch.tensor([len(p.prompt.tokens) - p.start for p in part]).cumsum(0) - 1
            for prefill, last in zip(part, hidden[ends.to(device)], strict=True):
                prefill.prompt.hidden = last
            self.prefill_tokens += len(tokens)


def _passes(prefills: list[Prefill], limit: int) -> Iterator[list[Prefill]]:
    """The prefills in order, in passes of at most `limit` tokens where one alone has no more."""
    part: list[Prefill] = []
    tokens = 0
    for prefill in prefills:
        own = len(prefill.prompt.tokens) - prefill.start
        if part and tokens + own > limit:
            yield part
            part, tokens = [], 0
        part.append(prefill)
        tokens += own
    if part:
        yield part


def _known(hidden: Tensor | None) -> Tensor:
    assert hidden is not None, "a sequence was admitted before its prompt was computed"
    return hidden
