"""What happens to the rows of a decode batch after a token is drawn, in one small kernel.

Row b keeps its token and log-probability, ends at an end token or at its cap, and learns where the
next step writes: position in its sequence, slot in its pages, number of its own tokens. A row that
has ended stands still until the host takes it out: it writes to page 0, which pads, and sees
nothing.
"""

# Bodies of jitted functions are Triton, not Python: they carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra import cuda as tlc

from qerl.kernels.launch import pdl_options, runs_kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """State of B rows. int64 except where said; n own pages, C the longest completion."""

    seeds: Int[Tensor, " B"]
    """Of each sequence."""

    tokens: Int[Tensor, " B"]
    """Newest token: drawn, not yet fed."""

    lengths: Int[Tensor, " B"]
    """Tokens drawn so far; the counter of the next draw."""

    caps: Int[Tensor, " B"]
    """Most tokens of the completion; at most C."""

    prompt_lengths: Int[Tensor, " B"]

    live: Int[Tensor, " B"]
    """1 while the sequence goes on."""

    ended: Int[Tensor, " B"]
    """1 where an end token, not the cap, ended it."""

    positions: Int[Tensor, " B"]
    """Of the newest token in its sequence."""

    slots: Int[Tensor, " B"]
    """Where the newest token's key and value go."""

    own_lengths: Int[Tensor, " B"]
    """Own tokens that the next step sees, the newest among them; 0 for a row that has ended."""

    own_pages: Int[Tensor, "B n"]

    drawn: Int[Tensor, "B C"]
    """Tokens of the completion; what lies beyond `lengths` means nothing."""

    logprobs: Float[Tensor, "B C"]
    """fp32 nats, as `drawn`."""

    @staticmethod
    def allocate(rows: int, pages: int, longest: int, device: torch.device) -> "Rows":
        """Rows that no sequence takes."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return Rows(
            seeds=zeros(rows),
            tokens=zeros(rows),
            lengths=zeros(rows),
            caps=zeros(rows),
            prompt_lengths=zeros(rows),
            live=zeros(rows),
            ended=zeros(rows),
            positions=zeros(rows),
            slots=zeros(rows),
            own_lengths=zeros(rows),
            own_pages=zeros(rows, pages),
            drawn=zeros(rows, longest),
            logprobs=torch.zeros(rows, longest, device=device),
        )

    def first(self, rows: int) -> "Rows":
        """Views of the first `rows` rows."""
        return Rows(**{f.name: getattr(self, f.name)[:rows] for f in fields(self)})

    def take(self, index: Int[Tensor, " b"]) -> "Rows":
        """Copies of some rows."""
        return Rows(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def put(self, index: Int[Tensor, " b"], rows: "Rows") -> None:
        """Overwrite some rows, in place."""
        for field in fields(self):
            getattr(self, field.name)[index] = getattr(rows, field.name)


def advance_reference(
    rows: Rows,
    tokens: Int[Tensor, " B"],
    logprobs: Float[Tensor, " B"],
    ends: Int[Tensor, " E"],
    page_size: int,
) -> None:
    """The specification: `rows` after drawing `tokens`, in place."""
    live = rows.live.bool()
    index = live.nonzero().squeeze(1)
    rows.drawn[index, rows.lengths[index]] = tokens[index]
    rows.logprobs[index, rows.lengths[index]] = logprobs[index]
    rows.tokens.copy_(torch.where(live, tokens, rows.tokens))
    rows.lengths.add_(rows.live)
    ended = live & torch.isin(tokens, ends)
    live = live & ~ended & (rows.lengths < rows.caps)
    rows.ended.copy_(rows.ended.bool() | ended)
    rows.live.copy_(live)
    last = (rows.lengths - 1).clamp(min=0)
    page = rows.own_pages.gather(
        1, (last // page_size).clamp(max=rows.own_pages.shape[1] - 1)[:, None]
    )
    place = torch.arange(len(last), device=last.device) % page_size
    rows.slots.copy_(torch.where(live, page[:, 0] * page_size + last % page_size, place))
    rows.positions.copy_(rows.prompt_lengths + last)
    rows.own_lengths.copy_(rows.lengths * live)


@triton.jit(do_not_specialize=["C", "pages", "E"])
def _advance_kernel(  # noqa: PLR0913
    token_ptr,
    logprob_ptr,
    ends_ptr,
    tokens_ptr,
    lengths_ptr,
    caps_ptr,
    prompt_lengths_ptr,
    live_ptr,
    ended_ptr,
    positions_ptr,
    slots_ptr,
    own_lengths_ptr,
    own_pages_ptr,
    drawn_ptr,
    logprobs_ptr,
    C,
    pages,
    E,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row."""
    if PDL:
        tlc.gdc_launch_dependents()
        tlc.gdc_wait()
    row = tl.program_id(0)
    live = tl.load(live_ptr + row)
    length = tl.load(lengths_ptr + row)
    token = tl.load(token_ptr + row)
    tl.store(drawn_ptr + row * C + length, token, mask=live > 0)
    tl.store(logprobs_ptr + row * C + length, tl.load(logprob_ptr + row), mask=live > 0)
    tl.store(tokens_ptr + row, token, mask=live > 0)
    length += live
    ended = live * 0
    for e in range(E):
        ended = tl.where(token == tl.load(ends_ptr + e), live, ended)
    tl.store(ended_ptr + row, 1, mask=ended > 0)
    live = tl.where((ended == 0) & (length < tl.load(caps_ptr + row)), live, 0)
    last = tl.maximum(length - 1, 0)
    page = tl.load(own_pages_ptr + row * pages + tl.minimum(last // PAGE, pages - 1))
    tl.store(lengths_ptr + row, length)
    tl.store(live_ptr + row, live)
    tl.store(slots_ptr + row, tl.where(live > 0, page * PAGE + last % PAGE, row % PAGE))
    tl.store(positions_ptr + row, tl.load(prompt_lengths_ptr + row) + last)
    tl.store(own_lengths_ptr + row, length * live)


def advance(
    rows: Rows,
    tokens: Int[Tensor, " B"],
    logprobs: Float[Tensor, " B"],
    ends: Int[Tensor, " E"],
    page_size: int,
    *,
    pdl: int = 1,
) -> None:
    """Take over a drawn token for every row that goes on, in place.

    Args:
        rows: state; every row that goes on has `lengths < caps`.
        tokens: int64, one a row.
        logprobs: fp32, of the tokens.
        ends: int64 ids that end a completion; -1 for none.
        page_size: tokens of a page.
        pdl: programmatic dependent launch.
    """
    if not runs_kernels(tokens):
        advance_reference(rows, tokens, logprobs, ends, page_size)
        return
    _advance_kernel[(len(tokens),)](
        tokens,
        logprobs,
        ends,
        rows.tokens,
        rows.lengths,
        rows.caps,
        rows.prompt_lengths,
        rows.live,
        rows.ended,
        rows.positions,
        rows.slots,
        rows.own_lengths,
        rows.own_pages,
        rows.drawn,
        rows.logprobs,
        rows.drawn.shape[1],
        rows.own_pages.shape[1],
        len(ends),
        PAGE=page_size,
        PDL=pdl,
        num_warps=1,
        **pdl_options(pdl),
    )
