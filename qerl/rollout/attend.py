"""Attention over pages: the `Attend` arguments with which the decoder samples.

`PrefillAttend` writes whole prompt parts and lets each attend to its own past. `DecodeAttend`
writes one token a row and attends in two parts under one softmax,

    softmax([q Kᵀ of the prompt, q Kᵀ of the own tokens]) [V of the prompt; V of the own tokens]

where a prompt's keys and values are read once for all rows of its group. Each object is built for
one pass of the decoder, holds every index the layers need, and changes nothing but the pool's
contents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qerl.model.cascade import Part, flash_forward
from qerl.rollout.pages import PagePool
from qerl.rollout.scheduler import Prefill
from qerl.rollout.scheduler import Sequence as Running


class PrefillAttend:
    """Causal attention of prompt parts, each after the pages that come before it."""

    def __init__(self, pool: PagePool, prefills: Sequence[Prefill], *, flash: bool = False) -> None:
        """Index the parts of one prefill pass.

        Args:
            pool: holds the pages of every prompt up to its end.
            prefills: parts that lie end to end on the token axis. A part may follow pages which
                another part of the same pass fills, since a layer writes before it reads.
            flash: one variable-length flash call for all parts; CUDA and 16-bit dtypes only.
        """
        self._pool = pool
        device, size = pool.keys.device, pool.page_size
        offsets = torch.arange(size)
        self._parts: list[tuple[slice, Tensor, Tensor | None]] = []
        slots = []
        end = 0
        for prefill in prefills:
            length = len(prefill.prompt.tokens)
            pages = torch.tensor(prefill.prompt.pages())
            context = (pages[:, None] * size + offsets).flatten()[:length]  # [length] slots
            own = length - prefill.start
            slots.append(context[prefill.start :])
            mask = None
            if prefill.start:
                seen = torch.arange(prefill.start, length)[:, None]  # [own, 1]
                mask = (torch.arange(length) <= seen).to(device)  # [own, length]
            self._parts.append((slice(end, end + own), context.to(device), mask))
            end += own
        self._slots = torch.cat(slots).to(device)  # [S]
        self._flash = None
        if flash:
            self._flash = _flash_part(prefills, [context for _, context, _ in self._parts], device)

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "S H Dh"],
        k: Float[Tensor, "S Hk Dh"],
        v: Float[Tensor, "S Hk Dh"],
    ) -> Float[Tensor, "S H Dh"]:
        """Keep k and v of `layer`; mix the values each query may see."""
        keys, values = self._pool.layer_slots(layer)  # [Hk, slots, Dh]
        keys.index_copy_(1, self._slots, k.transpose(0, 1))
        values.index_copy_(1, self._slots, v.transpose(0, 1))
        if self._flash is not None:
            if self._flash.key_rows is not None:
                context = self._flash.key_rows
                k = keys.index_select(1, context).transpose(0, 1)  # [tokens, Hk, Dh]
                v = values.index_select(1, context).transpose(0, 1)
            return flash_forward(q, k, v, self._flash)[0]
        out = torch.empty_like(q)
        for rows, context, mask in self._parts:
            if mask is None:
                key, value = k[rows].transpose(0, 1), v[rows].transpose(0, 1)
            else:
                key, value = keys.index_select(1, context), values.index_select(1, context)
            mixed = scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None],  # [1, H, own, Dh]
                key[None],  # [1, Hk, length, Dh]
                value[None],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            out[rows] = mixed[0].transpose(0, 1)
        return out


def _flash_part(prefills: Sequence[Prefill], contexts: list[Tensor], device: torch.device) -> Part:
    """All parts as one variable-length flash call, whose causal mask ends at each last key."""
    own = [len(prefill.prompt.tokens) - prefill.start for prefill in prefills]
    whole = [len(prefill.prompt.tokens) for prefill in prefills]

    def ends(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

    return Part(
        query_rows=None,
        key_rows=torch.cat(contexts) if own != whole else None,
        query_ends=ends(own),
        key_ends=ends(whole),
        longest_query=max(own),
        longest_key=max(whole),
        causal=True,
    )


@dataclass(frozen=True, slots=True)
class Groups:
    """The running rows and the prompts they share, as tensors. Valid while no row comes or goes.

    U prompts run; rows of a prompt are neighbours, at most W of them.
    """

    rows: Int[Tensor, " B"]
    """b of each running row in the order of the caller."""

    prompt_pages: Int[Tensor, "U m"]
    """Pages of each prompt; 0 where it has fewer than the longest."""

    prompt_lengths: Int[Tensor, " U"]
    """Tokens of each prompt."""

    row_lengths: Int[Tensor, " B"]
    """Tokens of each row's prompt."""

    own_pages: Int[Tensor, "B n"]
    """Pages of each row for the tokens it generates."""

    spread: Int[Tensor, " UW"] | None
    """Row at each place of the [U, W] grid, repeated where a group has fewer than W; None where
    the grid is the rows as they are."""

    places: Int[Tensor, " B"] | None
    """Place of each row in that grid."""

    @classmethod
    def of(cls, running: Sequence[Running], device: torch.device) -> "Groups":
        """The tensors of the sequences that run, in their order."""
        prompts = list({id(s.prompt): s.prompt for s in running}.values())
        index = {id(prompt): u for u, prompt in enumerate(prompts)}
        members: list[list[int]] = [[] for _ in prompts]
        for row, sequence in enumerate(running):
            members[index[id(sequence.prompt)]].append(row)
        width = max(len(rows) for rows in members)
        spread = [row for rows in members for row in rows + rows[:1] * (width - len(rows))]
        even = spread == list(range(len(running)))
        places = [u * width + i for u, rows in enumerate(members) for i in range(len(rows))]
        longest = max(len(prompt.chain) for prompt in prompts)
        tables = [p.pages() + [0] * (longest - len(p.chain)) for p in prompts]

        def tensor(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device)

        return cls(
            rows=tensor([sequence.row for sequence in running]),
            prompt_pages=tensor(tables),
            prompt_lengths=tensor([len(prompt.tokens) for prompt in prompts]),
            row_lengths=tensor([len(sequence.prompt.tokens) for sequence in running]),
            own_pages=tensor([sequence.pages for sequence in running]),
            spread=None if even else tensor(spread),
            places=None if even else tensor(places),
        )


class DecodeAttend:
    """Attention of one new token a row to its prompt and to its own earlier tokens."""

    def __init__(
        self, pool: PagePool, groups: Groups, lengths: Int[Tensor, " B"], longest: int
    ) -> None:
        """Index one decode pass.

        Args:
            pool: holds the pages.
            groups: of the running rows.
            lengths: own tokens of each row, the one that this pass writes included.
            longest: the largest of `lengths`, known to the host.
        """
        self._pool = pool
        self._groups = groups
        size = pool.page_size
        kv_heads, total = pool.keys.shape[1:3]
        heads = torch.arange(kv_heads, device=pool.keys.device)[:, None, None] * total
        own = groups.own_pages[:, : -(-longest // size)]  # [B, n]
        self._own = (heads + own).flatten()  # [Hk * B * n] rows of `layer_pages`
        self._prompt = (heads + groups.prompt_pages).flatten()  # [Hk * U * m]
        last = (lengths - 1)[:, None]  # [B, 1]
        self._slots = (own.gather(1, last // size) * size + last % size).squeeze(1)  # [B]
        self._own_mask = _hide(lengths, own.shape[1] * size, kv_heads)
        self._prompt_mask = _hide(
            groups.prompt_lengths, groups.prompt_pages.shape[1] * size, kv_heads
        )

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "B H Dh"],
        k: Float[Tensor, "B Hk Dh"],
        v: Float[Tensor, "B Hk Dh"],
    ) -> Float[Tensor, "B H Dh"]:
        """Keep k and v of `layer`; mix the values each query may see."""
        slot_keys, slot_values = self._pool.layer_slots(layer)  # [Hk, slots, Dh]
        slot_keys[:, self._slots] = k.transpose(0, 1)
        slot_values[:, self._slots] = v.transpose(0, 1)
        keys, values = self._pool.layer_pages(layer)
        (B, H, Dh), Hk = q.shape, k.shape[1]
        scale = Dh**-0.5
        grouped = q.view(B, Hk, H // Hk, Dh).transpose(0, 1)  # [Hk, B, g, Dh], g = H / Hk

        def read(pages: Tensor, index: Tensor, count: int) -> Tensor:
            return _wide(pages.index_select(0, index)).view(count, -1, Dh)  # [count, tokens, Dh]

        U = self._groups.prompt_pages.shape[0]
        asked = self._to_grid(grouped).reshape(Hk * U, -1, Dh)  # [Hk U, W g, Dh]
        prompt_keys = read(keys, self._prompt, Hk * U)
        prompt_scores = torch.baddbmm(
            self._prompt_mask, _wide(asked), prompt_keys.transpose(1, 2), alpha=scale
        )  # [Hk U, W g, Tp]
        own_keys = read(keys, self._own, Hk * B)
        own_scores = torch.baddbmm(
            self._own_mask,
            _wide(grouped.reshape(Hk * B, -1, Dh)),
            own_keys.transpose(1, 2),
            alpha=scale,
        )  # [Hk B, g, To]
        Tp = prompt_scores.shape[-1]
        by_row = self._to_rows(prompt_scores.view(Hk, -1, H // Hk, Tp)).reshape(Hk * B, -1, Tp)
        p = torch.cat([by_row, own_scores], -1).softmax(-1)  # [Hk B, g, Tp + To]
        p_prompt = self._to_grid(p[..., :Tp].view(Hk, B, -1, Tp)).reshape(Hk * U, -1, Tp)
        mixed = torch.bmm(p_prompt, read(values, self._prompt, Hk * U))  # [Hk U, W g, Dh]
        by_row = self._to_rows(mixed.view(Hk, -1, H // Hk, Dh)).reshape(Hk * B, -1, Dh)
        out = torch.baddbmm(by_row, p[..., Tp:], read(values, self._own, Hk * B))  # [Hk B, g, Dh]
        return out.view(Hk, B, -1, Dh).transpose(0, 1).reshape(B, H, Dh).to(q.dtype)

    def _to_grid(self, x: Tensor) -> Tensor:
        """Rows to the places of the [U, W] grid: [Hk, B, ...] to [Hk, U W, ...]."""
        return x if self._groups.spread is None else x.index_select(1, self._groups.spread)

    def _to_rows(self, x: Tensor) -> Tensor:
        """The inverse of `_to_grid`, without its padding."""
        return x if self._groups.places is None else x.index_select(1, self._groups.places)


def _wide(x: Tensor) -> Tensor:
    """fp32, in which scores and mixtures are computed whatever the cache holds."""
    return x.float()


def _hide(lengths: Tensor, width: int, kv_heads: int) -> Float[Tensor, "HkB 1 T"]:
    """What to add to scores: 0 before each length, -inf from there on; fp32, once a head."""
    slots = torch.arange(width, device=lengths.device)
    hidden = (slots >= lengths[:, None]).repeat(kv_heads, 1)  # [Hk * B, T]
    return torch.zeros(hidden.shape, device=slots.device).masked_fill_(hidden, -torch.inf)[:, None]
