"""Our engine: the policy's own weights over paged keys and values, with continuous batching.

All P * G sequences of a step share one batch: each distinct prompt is computed once, rows leave
the batch when they finish, and waiting sequences take their places. There is no copy of any
weight, so there is nothing to synchronise: sampler and trainer cannot be different policies.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qerl.kernels.launch import is_hopper
from qerl.model.layers import RMSNorm
from qerl.model.policy import Policy
from qerl.rollout.call import Call, EagerCall
from qerl.rollout.engine import Progress, RolloutStats, check_idle, check_request
from qerl.rollout.pages import PagePool, page_bytes
from qerl.rollout.sampler import sequence_seeds
from qerl.rollout.scheduler import Scheduler
from qerl.types import Prompts, Rollouts, Sampling

if TYPE_CHECKING:
    from qerl.rollout.graph import Graphs

CallParts = tuple[Policy, Scheduler, PagePool, Sampling, Tensor, int]


class NativeEngine:
    """Samples with the very tensors that are trained."""

    name = "native"

    def __init__(
        self,
        policy: Policy,
        *,
        max_sequences: int = 64,
        page_size: int | None = None,
        kv_budget_gib: float = 4.0,
        max_context: int | None = None,
        prefill_tokens: int = 8192,
        eos_ids: Sequence[int] | None = None,
        graphs: bool | None = False,
    ) -> None:
        """Take no memory yet; the first call does.

        Args:
            policy: whose adapters and noisy norms are read at every call.
            max_sequences: rows of the decode batch.
            page_size: tokens of a key/value page; also the grain at which prompts share. None
                takes 128 with decode graphs, whose attention reads so many keys a step, else 16.
            kv_budget_gib: most memory for keys and values, in GiB. A call takes no more than it
                can use.
            max_context: most tokens of prompt and completion; None takes the model's own limit.
            prefill_tokens: most prompt tokens in one pass, unless one prompt alone has more.
            eos_ids: ids that end a completion; None takes those of the model's config.
            graphs: replay whole decode steps as CUDA graphs; the weights (nvfp4, mxfp4, bf16, or
                dense copies of a policy that keeps them) are laid as the kernels read them. None:
                where the device is a Hopper GPU and the format allows it. True on a CPU runs the
                same steps uncaptured, over copies of the weights: for tests.

        Raises:
            ValueError: a size below 1, a context beyond the model's, or `graphs` where the
                kernels cannot read the weights, the heads or the pages.
        """
        limit = policy.spec.max_positions
        if max_sequences < 1:
            raise ValueError(f"max_sequences={max_sequences}: at least 1 row")
        if page_size is not None and page_size < 1:
            raise ValueError(f"page_size={page_size}: at least 1 token")
        self._policy = policy
        self._max_sequences = max_sequences
        self._graphs = self._find_graphs(graphs, page_size)
        self._page_size = page_size or (128 if self._graphs else 16)
        self._budget_bytes = int(kv_budget_gib * 2**30)
        self._max_context = limit if max_context is None else max_context
        self._prefill_tokens = prefill_tokens
        self._eos_ids = frozenset(policy.spec.eos_ids if eos_ids is None else eos_ids)
        if self._max_context > limit:
            raise ValueError(f"max_context={max_context}: the model's limit is {limit} positions")
        self._pool: PagePool | None = None
        self._busy = False
        self.stats: RolloutStats | None = None

    @property
    def copies(self) -> bool:
        """With decode graphs, the adapters: bf16 and stacked. Otherwise nothing."""
        return self._graphs is not None

    @property
    def norms(self) -> Sequence[RMSNorm]:
        """The policy's own norms, which this engine reads."""
        return self._policy.noisy_norms

    @property
    def pool(self) -> PagePool | None:
        """Key/value memory; None until the first call and after `release`."""
        return self._pool

    def sync(self) -> None:
        """Nothing to keep: every call reads the policy's adapters as they are."""
        check_idle(self._busy)

    def release(self) -> None:
        """Free the key/value memory; the next call takes it again."""
        check_idle(self._busy)
        self._drop_pool()

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
            max_sequences=self._rows(sampling),
            own_pages=own_pages,
        )
        seeds = sequence_seeds(seed, rollout_step, prompts.ids, sampling.group_size)
        parts = (self._policy, scheduler, pool, sampling, seeds, self._prefill_tokens)
        self._busy = True
        try:
            call = self._call(parts, prompts)
            self._run(call, scheduler, progress)
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

    def _find_graphs(self, wanted: bool | None, page_size: int | None) -> "Graphs | None":
        """Decode graphs, where they are wanted and can be had."""
        policy = self._policy
        on_hopper = policy.decoder.device.type == "cuda" and is_hopper(policy.decoder.device)
        if not (on_hopper if wanted is None else wanted):
            return None
        from qerl.rollout.graph import Graphs  # triton, where nothing else needs it

        size = 128 if page_size is None else page_size
        found = Graphs.of(policy, self._max_sequences, size)
        if found is None and wanted:
            raise ValueError(
                f"graphs=true: page_size={size} and Dh={policy.spec.head_dim} must be powers of "
                "two, pages of 16 or more, weights bf16 or whole tiles of nvfp4, mxfp4 or nf4 "
                "(N % 32 == 0, K % 128 == 0; or trainer.compute.shadow=true), compute in bf16; "
                "or graphs=null"
            )
        return found

    def _served(self, sampling: Sampling) -> "Graphs | None":
        """The graphs, unless the candidates are cut, which only the eager sampler does."""
        return self._graphs if sampling.top_k == 0 and sampling.top_p == 1 else None

    def _rows(self, sampling: Sampling) -> int:
        """Most sequences that run at a time."""
        graphs = self._served(sampling)
        return min(self._max_sequences, graphs.rows) if graphs else self._max_sequences

    def _call(self, parts: "CallParts", prompts: Prompts) -> Call:
        """A call in its first state, by graphs where they serve."""
        graphs = self._served(parts[3])
        if graphs is None:
            return EagerCall(*parts, self._eos_ids)
        from qerl.rollout.graph import GraphCall

        return GraphCall(*parts, self._eos_ids).attach(graphs, prompts)

    def _run(self, call: Call, scheduler: Scheduler, progress: Progress | None) -> None:
        """Draw tokens until every sequence is finished."""
        total = scheduler.unfinished
        # no_grad, not inference_mode: tensors that the model may cache on the way stay usable in
        # training.
        with torch.no_grad():
            while scheduler.unfinished:
                before = scheduler.unfinished
                call.step()
                if progress is not None and scheduler.unfinished < before:
                    progress(total - scheduler.unfinished, total)

    def _drop_pool(self) -> None:
        self._pool = None
        if self._graphs is not None:
            self._graphs.release()  # captured steps hold the pool's addresses

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
            self._drop_pool()  # freed before its successor is allocated
            pool = PagePool(
                spec, pages=pages, page_size=size, dtype=decoder.dtype, device=decoder.device
            )
            self._pool = pool
        return pool
