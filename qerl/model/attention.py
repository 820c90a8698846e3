"""How queries see keys: the `Attend` argument of the decoder.

Training and sampling differ in nothing else. Training sees a forest of segments in which a shared
prompt is stored once (`ForestAttend`, below); the engine sees a paged KV cache (rollout room).

A token of segment s sees the tokens of s up to itself and every token of every ancestor of s. That
is the causal attention of each full sequence root → … → s, with shared work done once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from qerl.model.cascade import Part, cascade_attention, parts_of
from qerl.types import Segment

MASK_CELLS = 2**24
"""Most cells [b, Lq, Lk] of one bucket: bounds the mask (16 MiB) and what an attention without
a fused kernel would hold per head."""

PADDING_LIMIT = 1.25
"""A bucket closes when its padded cells exceed its true cells by more than this factor."""


class Attend(Protocol):
    """softmax(q kᵀ / sqrt(Dh)) v, with the caller's idea of which keys a query may see."""

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "S H Dh"],
        k: Float[Tensor, "S Hk Dh"],
        v: Float[Tensor, "S Hk Dh"],
    ) -> Float[Tensor, "S H Dh"]:
        """Mix the values of `layer` for each query; q and k carry their rotary embedding."""
        ...


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Segments of similar size that one padded attention call serves."""

    queries: Int[Tensor, "b Lq"]
    """Row in S of each query; padding repeats a row of the same segment."""

    keys: Int[Tensor, "b Lk"]
    """Row in S of each key: ancestors from the root down, then the segment itself."""

    mask: Bool[Tensor, "b 1 Lq Lk"]
    """True where the query sees the key."""


class ForestAttend:
    """Exact attention over the segments of a packed micro-batch, for training and scoring.

    Built once for a micro-batch and used by every layer. On CUDA in 16 bits it runs by parts
    (`cascade`); elsewhere segments of similar size share one padded call.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device | str = "cpu") -> None:
        """Plan the calls; nothing here depends on the layer.

        Args:
            segments: cover the rows 0..S-1 end to end; a parent comes before its children.
            device: where q, k and v will be.

        Raises:
            ValueError: where the segments leave a gap, overlap, are empty or name a later parent.
        """
        _check(segments)
        self._segments = tuple(segments)
        self._device = torch.device(device)

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "S H Dh"],
        k: Float[Tensor, "S Hk Dh"],
        v: Float[Tensor, "S Hk Dh"],
    ) -> Float[Tensor, "S H Dh"]:
        """The same forest for every `layer`."""
        if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16):
            return cascade_attention(q, k, v, self._parts)
        return self._padded(q, k, v)

    @cached_property
    def _parts(self) -> list[Part]:
        return parts_of(self._segments, self._device)

    @cached_property
    def _padded(self) -> "PaddedForest":
        return PaddedForest(self._segments, self._device)


class PaddedForest:
    """Forest attention by padded calls of `scaled_dot_product_attention`, in any dtype.

    Keys of an ancestor are gathered for each segment, and autograd adds their gradients up in the
    shared rows.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device | str) -> None:
        """Index matrices and masks of every bucket; `segments` lie end to end, parents first."""
        self.buckets: list[_Bucket] = []
        home = torch.empty(sum(segment.length for segment in segments), dtype=torch.long)  # [S]
        base = 0  # first row of the bucket in the concatenated padded outputs
        for members in _plan(segments):
            width = max(segments[i].length for i in members)
            self.buckets.append(_bucket(segments, members, device))
            for place, i in enumerate(members):
                start, length = segments[i].start, segments[i].length
                first = base + place * width
                home[start : start + length] = torch.arange(first, first + length)
            base += len(members) * width
        self._home = home.to(device)
        self._in_order = bool((home == torch.arange(base)[: len(home)]).all()) and base == len(home)

    def __call__(
        self, q: Float[Tensor, "S H Dh"], k: Float[Tensor, "S Hk Dh"], v: Float[Tensor, "S Hk Dh"]
    ) -> Float[Tensor, "S H Dh"]:
        """Mixed values of every row."""
        rows = [_attend_bucket(bucket, q, k, v) for bucket in self.buckets]
        out = torch.cat(rows) if len(rows) > 1 else rows[0]  # [padded rows, H, Dh]
        return out if self._in_order else out.index_select(0, self._home)  # [S, H, Dh]


def _attend_bucket(bucket: _Bucket, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One padded call; rows of the bucket end to end, padding included."""
    b, Lq = bucket.queries.shape
    query, key, value = (
        x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)
        for x, rows in ((q, bucket.queries), (k, bucket.keys), (v, bucket.keys))
    )  # [b, H, Lq, Dh], [b, Hk, Lk, Dh]
    mixed = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bucket.mask, enable_gqa=q.shape[1] != k.shape[1]
    )  # [b, H, Lq, Dh]
    return mixed.transpose(1, 2).reshape(b * Lq, *q.shape[1:])


def _check(segments: Sequence[Segment]) -> None:
    """Raise unless the segments lie end to end with parents first."""
    if not segments:
        raise ValueError("no segments: a micro-batch holds at least one")
    end = 0
    for i, segment in enumerate(segments):
        if segment.start != end or segment.length < 1:
            raise ValueError(
                f"segment {i} is rows {segment.start}+{segment.length}: it must start at row {end} "
                "and hold at least 1 token"
            )
        if segment.parent is not None and not 0 <= segment.parent < i:
            raise ValueError(f"segment {i} has parent {segment.parent}: a parent comes before it")
        end += segment.length


def lineage(segments: Sequence[Segment], index: int) -> list[int]:
    """The ancestors of a segment from the root down, and itself at the end."""
    chain = [index]
    while (parent := segments[chain[-1]].parent) is not None:
        chain.append(parent)
    return chain[::-1]


def _plan(segments: Sequence[Segment]) -> list[list[int]]:
    """Split the segments into buckets of similar context and length, in deterministic order."""
    context = [sum(segments[j].length for j in lineage(segments, i)) for i in range(len(segments))]
    order = sorted(range(len(segments)), key=lambda i: (-context[i], -segments[i].length, i))
    buckets: list[list[int]] = []
    true = 0  # cells of the open bucket without padding
    widest = 0  # Lq of the open bucket; Lk is the context of its first member
    for i in order:
        length, cells = segments[i].length, segments[i].length * context[i]
        if buckets:
            bucket = buckets[-1]
            padded = (len(bucket) + 1) * max(widest, length) * context[bucket[0]]
            if padded <= MASK_CELLS and padded <= PADDING_LIMIT * (true + cells):
                bucket.append(i)
                true, widest = true + cells, max(widest, length)
                continue
        buckets.append([i])
        true, widest = cells, length
    return buckets


def _bucket(
    segments: Sequence[Segment], members: Sequence[int], device: torch.device | str
) -> _Bucket:
    """Index matrices and mask of one padded attention call."""
    chains = [
        torch.cat([torch.arange(s.start, s.start + s.length) for s in (segments[j] for j in chain)])
        for chain in (lineage(segments, i) for i in members)
    ]  # [b][context]
    lengths = [segments[i].length for i in members]
    Lq, Lk = max(lengths), max(len(chain) for chain in chains)
    queries = torch.empty(len(members), Lq, dtype=torch.long)
    keys = torch.empty(len(members), Lk, dtype=torch.long)
    mask = torch.zeros(len(members), 1, Lq, Lk, dtype=torch.bool)
    for place, (chain, length) in enumerate(zip(chains, lengths, strict=True)):
        own = len(chain) - length  # keys of ancestors
        # Padding repeats the last token: a finite row whose output nobody reads, and no NaN.
        queries[place] = chain[own + torch.arange(Lq).clamp(max=length - 1)]
        keys[place] = chain[torch.arange(Lk).clamp(max=len(chain) - 1)]
        last_seen = own + torch.arange(Lq).clamp(max=length - 1)  # [Lq]
        mask[place, 0] = torch.arange(Lk) <= last_seen[:, None]
    return _Bucket(queries.to(device), keys.to(device), mask.to(device))
