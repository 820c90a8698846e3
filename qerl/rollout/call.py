"""One `generate` in progress: what it has drawn, how prompts are computed, and eager decoding."""

from collections.abc import Iterator
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qerl.model.policy import Policy
from qerl.rollout.attend import DecodeAttend, Groups, PrefillAttend
from qerl.rollout.pages import PagePool
from qerl.rollout.sampler import draw, uniforms
from qerl.rollout.scheduler import Prefill, Scheduler, Sequence
from qerl.types import Prompts, Rollouts, Sampling


class Call(Protocol):
    """What the engine asks of a call in progress."""

    prefill_tokens: int
    """Prompt tokens that went through the model."""

    steps: int
    """Decode steps, prefills among them."""

    row_steps: int
    """Live sequences, summed over the steps."""

    def step(self) -> None:
        """Draw some tokens; sequences that end leave the scheduler."""
        ...

    def rollouts(self, prompts: Prompts, *, rollout_step: int, sigma: float) -> Rollouts:
        """What was drawn."""
        ...


class Drawing:
    """What every call holds: results on the device, and prompts that go through the decoder."""

    _flash = False

    def __init__(
        self,
        policy: Policy,
        scheduler: Scheduler,
        pool: PagePool,
        sampling: Sampling,
        seeds: Int[Tensor, " B"],
        prefill_tokens: int,
        eos_ids: frozenset[int],
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
        self._eos_ids = frozenset() if sampling.ignore_eos else eos_ids
        self.prefill_tokens = 0
        self.steps = 0
        self.row_steps = 0

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

    def _prefill(self, prefills: list[Prefill]) -> None:
        """Compute the prompts' missing pages and the hidden state of their last tokens."""
        device = self._seeds.device
        for part in _passes(prefills, self._pass_tokens):
            tokens = torch.tensor([t for p in part for t in p.prompt.tokens[p.start :]])  # [S]
            positions = torch.cat([torch.arange(p.start, len(p.prompt.tokens)) for p in part])
            attend = PrefillAttend(self._pool, part, flash=self._flash)
            ends = torch.tensor([len(p.prompt.tokens) - p.start for p in part]).cumsum(0) - 1
            inputs = (tokens.to(device), positions.to(device), attend)
            hidden = self._last_hidden(*inputs, ends.to(device))  # [prompts, D]
            for prefill, last in zip(part, hidden, strict=True):
                prefill.prompt.hidden = last
            self.prefill_tokens += len(tokens)

    def _last_hidden(
        self,
        tokens: Int[Tensor, " S"],
        positions: Int[Tensor, " S"],
        attend: PrefillAttend,
        ends: Int[Tensor, " P"],
    ) -> Float[Tensor, "P D"]:
        """Final hidden state of the tokens at `ends`, by fused kernels where they run."""
        decoder, size = self._decoder, self._decoder.spec.head_dim
        if (
            decoder.device.type == "cuda"
            and decoder.dtype == torch.bfloat16
            and not size & size - 1
        ):
            from qerl.rollout.prefill import prefill_hidden  # triton, where nothing else needs it

            return prefill_hidden(decoder, tokens, positions, attend, ends)
        hidden: Tensor = decoder(tokens, positions, attend)  # [S, D]
        return hidden[ends]


class EagerCall(Drawing):
    """Every operation launched as it comes: any device, any format, any cut of the candidates."""

    _groups: Groups | None = None

    def step(self) -> None:
        """Admit what fits, then draw one token for every running sequence."""
        decoding = list(self._scheduler.running)
        admitted, prefills = self._scheduler.admit()
        hidden = []
        if decoding:
            hidden.append(self._decode(decoding))  # [decoding, D]
        if admitted:
            self._prefill(prefills)
            hidden.append(torch.stack([known(s.prompt.hidden) for s in admitted]))
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
        self._retire(running, drawn.tokens.tolist())

    def _retire(self, running: list[Sequence], tokens: list[int]) -> None:
        """Take out the sequences that this step's tokens ended."""
        for sequence, token in zip(running, tokens, strict=True):
            sequence.length += 1
            ended = token in self._eos_ids
            if ended or sequence.length == self._sampling.max_new_tokens:
                self._ended[sequence.row] = ended
                self._scheduler.finish(sequence)
                self._groups = None

    def _decode(self, running: list[Sequence]) -> Float[Tensor, "b D"]:
        """Final hidden state of each row's newest token."""
        if self._groups is None:
            self._groups = Groups.of(running, self._seeds.device)
        groups = self._groups
        lengths = self._lengths[groups.rows]  # [b]
        attend = DecodeAttend(self._pool, groups, lengths, max(s.length for s in running))
        tokens = self._tokens[groups.rows, lengths - 1]  # [b]
        hidden: Tensor = self._decoder(tokens, groups.row_lengths + lengths - 1, attend)
        return hidden


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


def known(hidden: Tensor | None) -> Tensor:
    """The hidden state of a prompt that has been computed."""
    assert hidden is not None, "a sequence was admitted before its prompt was computed"
    return hidden
