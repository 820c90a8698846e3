"""Forest attention by flash kernels: no mask, no padding, no copied keys.

The keys of a query lie in its own segment and in one ancestor at each depth. Attention over each
such part is one variable-length flash call; with o_i and l_i the output and log-sum-exp of part i,

    l = log Σ exp l_i,    o = Σ exp(l_i - l) o_i

is the attention over all of them. The backward of a part is the flash backward with the whole's o
and l in place of its own: p = exp(q k - l) is then the true probability, and the gradients of the
parts add up. A shared prompt's keys are read once for all its completions.

Source: decomposition, Hydragen (arXiv:2402.05099), section 3.1; backward, ring attention
(arXiv:2310.01889). For CUDA and 16-bit dtypes, which is what the kernels take.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qerl.types import Segment


@dataclass(frozen=True, slots=True)
class Part:
    """One flash call: queries and keys in groups that lie end to end."""

    query_rows: Int[Tensor, " nq"] | None
    """Rows in S of the queries; None for all rows in order. No row twice."""

    key_rows: Int[Tensor, " nk"] | None
    """Rows in S of the keys; None for all rows in order. No row twice."""

    query_ends: Int[Tensor, " groups+1"]
    """Cumulative queries of the groups, from 0. int32."""

    key_ends: Int[Tensor, " groups+1"]
    """Cumulative keys of the groups, from 0. int32."""

    longest_query: int
    longest_key: int

    causal: bool
    """Query i of a group sees keys 0..i; else all keys of the group."""


def parts_of(segments: Sequence[Segment], device: torch.device | str) -> list[Part]:
    """Each segment against itself, then against its ancestor at depth 0, 1, ..."""
    rows = [torch.arange(s.start, s.start + s.length) for s in segments]
    depth: list[int] = []
    for segment in segments:
        depth.append(0 if segment.parent is None else depth[segment.parent] + 1)
    parts = [_part(rows, rows, True, device)]
    for level in range(max(depth)):
        below: dict[int, list[Tensor]] = {}
        for index in range(len(segments)):
            if depth[index] > level:
                above = index
                while depth[above] > level:
                    parent = segments[above].parent
                    assert parent is not None
                    above = parent
                below.setdefault(above, []).append(rows[index])
        queries = [torch.cat(chunks) for chunks in below.values()]
        parts.append(_part(queries, [rows[i] for i in below], False, device))
    return parts


def _part(
    queries: list[Tensor], keys: list[Tensor], causal: bool, device: torch.device | str
) -> Part:
    def ends(groups: list[Tensor]) -> Tensor:
        lengths = torch.tensor([0, *(len(group) for group in groups)])
        return lengths.cumsum(0).to(device, torch.int32)

    return Part(
        query_rows=None if causal else torch.cat(queries).to(device),
        key_rows=None if causal else torch.cat(keys).to(device),
        query_ends=ends(queries),
        key_ends=ends(keys),
        longest_query=max(len(group) for group in queries),
        longest_key=max(len(group) for group in keys),
        causal=causal,
    )


def cascade_attention(
    q: Float[Tensor, "S H Dh"],
    k: Float[Tensor, "S Hk Dh"],
    v: Float[Tensor, "S Hk Dh"],
    parts: Sequence[Part],
) -> Float[Tensor, "S H Dh"]:
    """Attention over the union of the parts, in the dtype of `q`; the first covers every query."""
    out: Tensor = _Cascade.apply(q, k, v, parts)  # type: ignore[no-untyped-call]
    return out


def _take(x: Tensor, rows: Tensor | None, dim: int = 0) -> Tensor:
    return x if rows is None else x.index_select(dim, rows)


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part]) -> Tensor:
        first, *others = parts
        out, lse = flash_forward(q, k, v, first)  # [S, H, Dh], [H, S]
        for part in others:
            rows = part.query_rows
            assert rows is not None
            keys, values = _take(k, part.key_rows), _take(v, part.key_rows)
            o, l_new = flash_forward(_take(q, rows), keys, values, part)
            l_old = lse.index_select(1, rows)  # [H, nq]
            total = torch.logaddexp(l_old, l_new)
            kept, added = (l_old - total).exp(), (l_new - total).exp()  # [H, nq]
            mixed = out.index_select(0, rows) * kept.T[..., None]  # [nq, H, Dh] fp32
            mixed.addcmul_(o, added.T[..., None])
            out.index_copy_(0, rows, mixed.to(out.dtype))
            lse.index_copy_(1, rows, total)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.parts = parts
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        first, *others = ctx.parts
        dq, dk, dv = flash_backward(grad, (q, k, v), out, lse, first)
        for part in others:
            rows, key_rows = part.query_rows, part.key_rows
            inputs = (_take(q, rows), _take(k, key_rows), _take(v, key_rows))
            dq_part, dk_part, dv_part = flash_backward(
                _take(grad, rows), inputs, _take(out, rows), _take(lse, rows, 1).contiguous(), part
            )
            dq.index_add_(0, rows, dq_part)  # rows are distinct: the order of sums is fixed
            dk.index_add_(0, key_rows, dk_part)
            dv.index_add_(0, key_rows, dv_part)
        return dq, dk, dv, None


def flash_forward(q: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """Output [nq, H, Dh] and log-sum-exp [H, nq] (fp32) of one part."""
    result = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        part.query_ends,
        part.key_ends,
        part.longest_query,
        part.longest_key,
        0.0,
        part.causal,
        return_debug_mask=False,
    )
    return result[0], result[1]


def flash_backward(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, part: Part
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [nq, H, Dh], k and v [nk, Hk, Dh] through one part."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad,
        *inputs,
        out,
        lse,
        part.query_ends,
        part.key_ends,
        part.longest_query,
        part.longest_key,
        0.0,
        part.causal,
        no_dropout,
        torch.empty(0, device=grad.device),
    )
    return dq, dk, dv
