"""One query per sequence against paged keys and values, GQA, a group's prompt read once.

    softmax([q Kᵀ of the prompt, q Kᵀ of the own tokens] / sqrt(Dh)) [V of the prompt; V own]

A program is one KV head of either (prompt, tile of query rows, part of the prompt) or (sequence,
part of its own tokens); rows of a tile are the query heads of a group's samples. Every part
leaves its maximum, sum and mixed values; a second kernel merges them. Bound by reading K and V
once: 2 Hk Dh 2 bytes a token, prompts once a group.
"""

# Bodies of jitted functions are Triton, not Python: they carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra import cuda as tlc

from qerl.kernels.launch import carve_shared, pdl_options, runs_kernels
from qerl.kernels.layout import mma_order
from qerl.kernels.parts import mma_column


@dataclass(frozen=True, slots=True)
class Tables:
    """Which pages the rows of a batch see. B rows, U prompts (0: nothing is shared)."""

    prompt_pages: Int[Tensor, "U m"]
    """int64: pages of each prompt."""

    prompt_lengths: Int[Tensor, " U"]
    """int64: tokens of each prompt; 0 for a place that no prompt takes."""

    members: Int[Tensor, "U W"]
    """int64: rows of each prompt, -1 where it has fewer than W. A row has at most one prompt, and
    every row has one where U > 0."""

    own_pages: Int[Tensor, "B n"]
    """int64: pages of the tokens that a row does not share."""

    own_lengths: Int[Tensor, " B"]
    """int64: number of those tokens; the query's own is among them."""


def paged_attention_reference(
    q: Float[Tensor, "B H Dh"],
    pages: tuple[Float[Tensor, "Hk slots Dh"], Float[Tensor, "Hk slots Dh"]],
    tables: Tables,
    page_size: int,
) -> Float[Tensor, "B H Dh"]:
    """The specification, a row at a time in fp32; rows that see nothing are 0."""
    keys, values = pages
    out = torch.zeros_like(q)
    offsets = torch.arange(page_size, device=q.device)
    for row in range(q.shape[0]):
        runs = [(tables.own_pages[row], int(tables.own_lengths[row]))]
        for u in (tables.members == row).any(1).nonzero().flatten().tolist():
            runs.insert(0, (tables.prompt_pages[u], int(tables.prompt_lengths[u])))
        slots = torch.cat(
            [(p[:, None] * page_size + offsets).flatten()[:length] for p, length in runs]
        )
        if slots.numel():
            k, v = keys[:, slots].float(), values[:, slots].float()  # [Hk, t, Dh]
            rows = q[row].float().unflatten(0, (keys.shape[0], -1))  # [Hk, G, Dh]
            weights = torch.softmax(rows @ k.mT / math.sqrt(q.shape[2]), -1)
            out[row] = (weights @ v).flatten(0, 1).to(q.dtype)
    return out


@triton.jit(do_not_specialize=["U", "W", "B", "prompt_stride", "own_stride", "TILES", "SP", "SS"])
def _attention_kernel(  # noqa: PLR0913, PLR0915
    q_ptr,
    key_ptr,
    value_ptr,
    head_stride,
    prompt_pages_ptr,
    prompt_lengths_ptr,
    members_ptr,
    own_pages_ptr,
    own_lengths_ptr,
    mixed_ptr,
    stats_ptr,
    out_ptr,
    U,
    W,
    B,
    prompt_stride,
    own_stride,
    scale,
    TILES,
    SP,
    SS,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DIRECT: tl.constexpr,
    MMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Mixed [SP + SS, B, H, D] and stats [SP + SS, B, H, 2] (maximum in log2, sum)."""
    if PDL:
        tlc.gdc_launch_dependents()
        tlc.gdc_wait()
    item = tl.program_id(0)
    kv = tl.program_id(1)
    prompts = U * TILES * SP
    i = tl.arange(0, BM)
    if item < prompts:
        u = item // (TILES * SP)
        rest = item - u * TILES * SP
        part = rest % SP
        parts = SP
        slot = part
        table_ptr = prompt_pages_ptr + u * prompt_stride
        n = tl.load(prompt_lengths_ptr + u).to(tl.int32)
        r = rest // SP * BM + i
        g = r % G
        b = tl.load(members_ptr + u * W + r // G, mask=r // G < W, other=-1).to(tl.int32)
    else:
        rest = item - prompts
        part = rest % SS
        parts = SS
        slot = SP + part
        own = rest // SS
        table_ptr = own_pages_ptr + own * own_stride
        n = tl.load(own_lengths_ptr + own).to(tl.int32)
        g = i % G
        b = tl.where(i < G, own, -1)
    d = tl.arange(0, D)
    c = tl.arange(0, BN)
    head = kv * G + g
    live = b >= 0
    at = (b * (HK * G) + head)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=live[:, None], other=0.0)
    blocks = tl.cdiv(n, BN)
    top = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    PER: tl.constexpr = PAGE // BN
    for j in range(blocks * part // parts, blocks * (part + 1) // parts):
        page = tl.load(table_ptr + j // PER).to(tl.int64)
        first = kv.to(tl.int64) * head_stride + (page * PAGE + (j % PER) * BN) * D
        k = tl.load(key_ptr + first + c[None, :] * D + d[:, None])
        score = tl.dot(q, k, input_precision="ieee") * scale
        score = tl.where((j * BN + c)[None, :] < n, score, -1e30)
        higher = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        shrunk = tl.exp2(top - higher)
        total = total * shrunk + tl.sum(p, 1)
        v = tl.load(value_ptr + first + c[:, None] * D + d[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc * shrunk[:, None], input_precision="ieee")
        top = higher
    if DIRECT:
        y = tl.where(total[:, None] > 0, acc / tl.maximum(total, 1e-30)[:, None], 0.0)
        col = head[:, None] * D + d[None, :]
        if MMA:
            col = mma_column(col)
        place = out_ptr + b[:, None] * (HK * G * D) + col
        tl.store(place, y.to(out_ptr.dtype.element_ty), mask=live[:, None])
    else:
        row = slot * B * (HK * G) + b * (HK * G) + head
        tl.store(mixed_ptr + row[:, None] * D + d[None, :], acc, mask=live[:, None])
        tl.store(stats_ptr + 2 * row, top, mask=live)
        tl.store(stats_ptr + 2 * row + 1, total, mask=live)


@triton.jit(do_not_specialize=["R", "PARTS"])
def _merge_kernel(  # noqa: PLR0913
    mixed_ptr,
    stats_ptr,
    out_ptr,
    R,
    PARTS,
    H: tl.constexpr,
    D: tl.constexpr,
    MMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a (row, head): R = B * H of them."""
    if PDL:
        tlc.gdc_launch_dependents()
        tlc.gdc_wait()
    r = tl.program_id(0)
    d = tl.arange(0, D)
    top = tl.load(stats_ptr + 2 * r)
    for s in range(1, PARTS):
        top = tl.maximum(top, tl.load(stats_ptr + 2 * (s * R + r)))
    total = 0.0
    acc = tl.zeros((D,), tl.float32)
    for s in range(PARTS):
        weight = tl.exp2(tl.load(stats_ptr + 2 * (s * R + r)) - top)
        total += weight * tl.load(stats_ptr + 2 * (s * R + r) + 1)
        acc += weight * tl.load(mixed_ptr + (s * R + r) * D + d)
    y = tl.where(total > 0, acc / tl.maximum(total, 1e-30), 0.0)
    col = (r % H) * D + d
    if MMA:
        col = mma_column(col)
    tl.store(out_ptr + r // H * (H * D) + col, y.to(out_ptr.dtype.element_ty))


@dataclass(frozen=True, slots=True)
class Cut:
    """In how many parts prompts and own tokens are read, and the scratch for them."""

    prompt_parts: int
    own_parts: int
    mixed: Float[Tensor, " X"]
    """fp32: parts * B * H * Dh."""

    stats: Float[Tensor, " Y"]
    """fp32: parts * B * H * 2."""

    keys: int = 64
    """Keys of a step; at most a page."""

    warps: int = 4

    stages: int = 3

    @staticmethod
    def allocate(
        rows: int,
        prompts: int,
        heads: tuple[int, int, int],
        device: torch.device | str = "cuda",
        processors: int = 132,
    ) -> "Cut":
        """Parts that give an SM about two programs, at most 16, and their scratch.

        Args:
            rows: B.
            prompts: U; 0 where nothing is shared.
            heads: (H, Hk, Dh).
            device: where the scratch lies.
            processors: SMs of the GPU.
        """
        h, hk, d = heads
        own = max(1, min(16, 2 * processors // (rows * hk)))
        tiles = -(-rows * h // hk // 16)  # all prompts together
        shared = max(1, min(16, 2 * processors // (tiles * hk))) if prompts else 0
        size = (own + shared) * rows * h if own + shared > 1 else 1
        mixed = torch.empty(size * d, dtype=torch.float32, device=device)
        stats = torch.empty(2 * size, dtype=torch.float32, device=device)
        # Long parts read 128 keys a step, short ones 64: best of 5 shapes at 1 to 256 rows, H200.
        keys, stages = (128, 2) if own == 1 else (64, 3)
        return Cut(shared, own, mixed, stats, keys, 4, stages)


def paged_attention(
    q: Float[Tensor, "B H Dh"],
    pages: tuple[Float[Tensor, "Hk slots Dh"], Float[Tensor, "Hk slots Dh"]],
    tables: Tables,
    page_size: int,
    cut: Cut,
    out: Float[Tensor, "rows HDh"],
    *,
    order: str = "natural",
    pdl: int = 1,
) -> Float[Tensor, "rows HDh"]:
    """Mixed values of every row, heads side by side, in the first B rows of `out`.

    Args:
        q: bf16 (fp32 in tests), rotated.
        pages: keys and values of the layer.
        tables: pages and lengths; lengths may change under a captured graph, shapes may not.
        page_size: tokens of a page, a power of two from 16.
        cut: `Cut.allocate` for (B, U).
        out: bf16, contiguous.
        order: column order of `out`.
        pdl: programmatic dependent launch.
    """
    (b, h, d), hk = q.shape, pages[0].shape[0]
    prompts, width = tables.members.shape
    _check(page_size, d, prompts, cut)
    if not runs_kernels(q):
        mixed = paged_attention_reference(q, pages, tables, page_size).flatten(1)
        out[:b] = mma_order(mixed) if order == "mma" else mixed
        return out
    group = h // hk
    tile = max(16, triton.next_power_of_2(group))
    tiles = triton.cdiv(width * group, tile)
    grid = (prompts * tiles * cut.prompt_parts + b * cut.own_parts, hk)
    kernel = _attention_kernel[grid](
        q,
        *pages,
        pages[0].stride(0),
        tables.prompt_pages,
        tables.prompt_lengths,
        tables.members,
        tables.own_pages,
        tables.own_lengths,
        cut.mixed,
        cut.stats,
        out,
        prompts,
        width,
        b,
        tables.prompt_pages.stride(0),
        tables.own_pages.stride(0),
        math.log2(math.e) / math.sqrt(d),
        tiles,
        cut.prompt_parts,
        cut.own_parts,
        HK=hk,
        G=group,
        D=d,
        PAGE=page_size,
        BM=tile,
        BN=min(cut.keys, page_size),
        DIRECT=cut.prompt_parts + cut.own_parts == 1,
        MMA=order == "mma",
        PDL=pdl,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **pdl_options(pdl),
    )
    if order == "mma":
        carve_shared(kernel)
    return _merged(cut, out, (b * h, h, d), order, pdl)


def _check(page_size: int, d: int, prompts: int, cut: Cut) -> None:
    """Raise where the kernel's tiles cannot hold pages and heads, or `cut` is of other tables."""
    if page_size < 16 or page_size & (page_size - 1) or d & (d - 1):
        raise ValueError(
            f"page_size={page_size}, Dh={d}: powers of two, pages of 16 tokens or more"
        )
    if bool(prompts) != bool(cut.prompt_parts):
        raise ValueError(
            f"U={prompts} with {cut.prompt_parts} prompt parts: use Cut.allocate(B, U)"
        )


def _merged(
    cut: Cut,
    out: Float[Tensor, "rows HDh"],
    sizes: tuple[int, int, int],
    order: str,
    pdl: int,
) -> Float[Tensor, "rows HDh"]:
    """`out` with the parts of every row and head summed; `sizes` are (B * H, H, Dh)."""
    if cut.prompt_parts + cut.own_parts == 1:
        return out  # the attention kernel wrote it
    pairs, h, d = sizes
    kernel = _merge_kernel[(pairs,)](
        cut.mixed,
        cut.stats,
        out,
        pairs,
        cut.prompt_parts + cut.own_parts,
        H=h,
        D=d,
        MMA=order == "mma",
        PDL=pdl,
        num_warps=1,
        **pdl_options(pdl),
    )
    if order == "mma":
        carve_shared(kernel)
    return out
