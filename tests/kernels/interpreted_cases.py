"""Plain Triton kernels on CPU tensors, for `test_interpreted.py`: run with TRITON_INTERPRET=1.

In fp32: the interpreter's dots and casts of bf16 are not those of a GPU. Prints a JSON object,
case name to "ok" or a traceback.
"""

import json
import sys
import traceback

import torch
from torch import Tensor

from qerl.kernels import (
    advance,
    dequant,
    layout,
    layout_nf4,
    lora,
    nf4,
    norm,
    paged_attention,
    parts,
    rope,
    rotate,
    sample,
    swiglu,
)
from qerl.quant.nf4 import NF4

M = 5  # odd on purpose


def close(found: Tensor, want: Tensor, bound: float = 1e-6) -> None:
    error = float((found.double() - want.double()).norm() / want.double().norm())
    assert error < bound, f"relative error {error}"


def all_parts(n: int) -> list[parts.Parts]:
    """Nothing cut, everything cut, the tail cut."""
    cuts = ((n, 0), (0, 3), (n // 4, 2))
    return [
        parts.Parts(torch.randn(M, n), torch.randn(max(1, split * M * (n - first))), first, split)
        for first, split in cuts
    ]


def adapter(*widths: int, columns: int = 64, rows: int = M) -> lora.Adapter:
    ranks = 16 * len(widths)
    partials, counters = lora.Adapter.scratch(rows, ranks, "cpu")
    return lora.Adapter(
        stacked=torch.randn(ranks, columns),
        b=torch.randn(sum(widths), 16),
        widths=widths,
        a=torch.full((rows, ranks), float("nan")),
        partials=partials,
        counters=counters,
    )


def case_dequantize_is_bitwise_the_format() -> None:
    for n, k in ((192, 576), (80, 256), (32, 1536)):
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
        scales = torch.randint(0, 127, (n, k // 16), dtype=torch.uint8)
        tiled = layout.tile(codes, layout.from_e4m3(scales), torch.tensor(0.0037))
        rows, cols = tiled.padded
        for blocks in (2, 4):
            if cols % (64 * blocks) == 0:
                out = torch.full((n, k), float("nan"))
                grid = (cols // (64 * blocks), rows // 32)
                dequant._dequantize_kernel[grid](*tiled.parts(), out, n, k, cols // 64, KB=blocks)
                assert torch.equal(out, layout.dequantize_reference(tiled, torch.float32))


def case_nf4_tiles_are_bitwise_the_format() -> None:
    for n, k in ((64, 384), (32, 512)):
        packed = NF4().quantize(torch.randn(n, k))
        tiled = layout_nf4.tile(packed)
        out = torch.full((n, k), float("nan"))
        nf4.dequantize_tiles(tiled, out)
        assert torch.equal(out, packed.dequantize(torch.float32))


def case_nf4_is_bitwise_the_format() -> None:
    nf4.runs_kernels = lambda x: True
    for double in (True, False):
        packed = NF4(double_quant=double).quantize(torch.randn(96, 192))
        out = torch.full((96, 192), float("nan"))
        nf4.dequantize_nf4(packed, out)
        assert torch.equal(out, packed.dequantize(torch.float32))


def case_norm_adds_parts() -> None:
    norm.runs_kernels = lambda x: True
    weight = torch.randn(576)
    for some in [*all_parts(576), None]:
        for order in ("natural", "mma"):
            residual, out = torch.randn(M, 576), torch.full((M + 3, 576), 7.0)
            kept, want = norm.add_rms_norm_reference(some, residual, weight, 1e-6, order=order)
            norm.add_rms_norm(some, residual, weight, 1e-6, out, order=order, pdl=0)
            close(out[:M], want)
            close(residual, kept)
            assert bool((out[M:] == 7).all()), "rows past M were written"


def case_advance_equals_its_reference() -> None:
    advance.runs_kernels = lambda x: True
    some = advance.Rows.allocate(7, 3, 40, torch.device("cpu"))
    some.own_pages.copy_(torch.randperm(21).view(7, 3) + 1)
    some.lengths.copy_(torch.tensor([0, 1, 15, 16, 39, 5, 5]))
    some.caps.fill_(40)
    some.prompt_lengths.copy_(torch.arange(7) * 3)
    some.live.copy_(torch.tensor([1, 1, 1, 1, 1, 0, 1]))
    for ends in ([-1], [8, 9]):
        tokens = torch.tensor([3, 9, 4, 8, 5, 9, 6])
        every = torch.arange(7)
        found, want = some.take(every), some.take(every)
        for _ in range(2):
            advance.advance(found, tokens, torch.rand(7), torch.tensor(ends), 16, pdl=0)
            advance.advance_reference(want, tokens, found.logprobs.amax(1), torch.tensor(ends), 16)
        for name in advance.Rows.__dataclass_fields__:
            if name != "logprobs":
                assert torch.equal(getattr(found, name), getattr(want, name)), name
        assert found.live.tolist() == (
            [1, 1, 1, 1, 0, 0, 1] if ends == [-1] else [1, 0, 1, 0, 0, 0, 1]
        )


def case_silu_mul_adds_parts() -> None:
    swiglu.runs_kernels = lambda x: True
    for some in all_parts(1152):
        for order in ("natural", "mma"):
            out = torch.full((M, 576), float("nan"))
            swiglu.silu_mul(some, out, order=order, pdl=0)
            close(out, swiglu.silu_mul_reference(some, order=order))


def case_gate_mul_multiplies_in_place() -> None:
    swiglu.runs_kernels = lambda x: True
    gate, up = torch.randn(M, 1111) * 4, torch.randn(M, 1111)
    want = swiglu.gate_mul_reference(gate, up)
    assert swiglu.gate_mul_(gate, up) is gate
    close(gate, want)


def case_rotate_turns_and_norms_heads() -> None:
    rotate.runs_kernels = lambda x: True
    angles = torch.rand(M, 1, 32) * 6
    for heads in (1, 6, 40):
        for weight in (None, torch.rand(64)):
            x = torch.randn(M, heads, 64)
            want = rotate.rotate_reference(x, angles.cos(), angles.sin(), weight)
            assert rotate.rotate_(x, angles.cos(), angles.sin(), weight) is x
            close(x, want)


def case_rope_rotates_and_stores() -> None:
    rope.runs_kernels = lambda x: True
    h, hk, d = 6, 2, 64
    n = (h + 2 * hk) * d
    angles = torch.rand(100, d // 2) * 6
    for some in all_parts(n):
        for weight in (None, torch.rand(d)):
            heads = rope.Heads(
                heads=h,
                kv_heads=hk,
                head_dim=d,
                cos=angles.cos(),
                sin=angles.sin(),
                bias=torch.randn(n) if weight is None else None,
                q_norm=weight,
                k_norm=weight,
            )
            places = (torch.randint(0, 100, (M,)), torch.randperm(64)[:M])
            pages = (torch.zeros(hk, 64, d), torch.zeros(hk, 64, d))
            q = torch.full((M, h, d), float("nan"))
            rope.rope_and_store(some, heads, places, q, pages, pdl=0)
            want_q, want_k, want_v = rope.rope_reference(some, heads, places[0])
            close(q, want_q)
            close(pages[0][:, places[1]], want_k.transpose(0, 1))
            close(pages[1][:, places[1]], want_v.transpose(0, 1))
            assert int(pages[0].abs().sum(2).count_nonzero()) == hk * M, "other slots changed"


def case_expand_adds_each_member_to_its_columns() -> None:
    lora.runs_kernels = lambda x: True
    for widths in ((576,), (100, 200), (130, 64, 61)):  # borders inside column tiles
        low_rank = adapter(*widths)
        y, x = torch.randn(M, sum(widths)), torch.randn(M, 64)
        want = y + low_rank.added(x @ low_rank.stacked.T)
        close(lora.add_adapter(y, x, low_rank, pdl=0), want)


def case_shrink_sums_its_parts_in_order() -> None:
    lora.runs_kernels = lambda x: True
    for k, m in ((576, 5), (192, 17), (1664, 5)):
        x, low_rank = torch.randn(m, k), adapter(32, 32, 32, columns=k, rows=m)
        for order in ("natural", "mma"):
            low_rank.a.fill_(float("nan"))
            given = layout.mma_order(x) if order == "mma" else x
            out = lora.shrink(given, low_rank, order=order, pdl=0)
            close(out, x @ low_rank.stacked.T)
            assert not low_rank.counters.any(), "counters are not back at zero"
        if m <= 16:
            low_rank.partials.fill_(float("nan"))
            lora.shrink_parts(x, low_rank, pdl=0)
            parts = low_rank.partials[: low_rank.parts * m * 48].view(-1, 48, m)
            close(parts.sum(0).T, x @ low_rank.stacked.T)


def case_attention_reads_shared_prompts_and_own_pages() -> None:
    paged_attention.runs_kernels = lambda x: True
    b, h, hk, d, size = 5, 6, 2, 32, 16
    pages = (torch.randn(hk, 40 * size, d), torch.randn(hk, 40 * size, d))
    q, free = torch.randn(b, h, d), torch.randperm(40)
    own, lengths = free[:15].view(5, 3), torch.tensor([1, 17, 48, 33, 16])
    none = torch.empty(0, 1, dtype=torch.int64)
    shared = paged_attention.Tables(
        free[15:23].view(2, 4),
        torch.tensor([50, 17]),
        torch.tensor([[0, 2, 4], [3, 1, -1]]),
        own,
        lengths,
    )
    alone = paged_attention.Tables(none, none[:, 0], none, own, lengths)
    for tables in (shared, alone):
        want = paged_attention.paged_attention_reference(q, pages, tables, size).flatten(1)
        for processors, order in ((16, "natural"), (16, "mma"), (1, "mma")):
            cut = paged_attention.Cut.allocate(
                b, tables.members.shape[0], (h, hk, d), "cpu", processors
            )
            out = torch.full((b, h * d), float("nan"))
            paged_attention.paged_attention(q, pages, tables, size, cut, out, order=order, pdl=0)
            close(out, layout.mma_order(want) if order == "mma" else want)


def case_sample_draws_what_the_reference_draws() -> None:
    sample.runs_kernels = lambda x: True
    b, v = 4, 9000  # two whole chunks and a part
    logits = torch.randn(b, v) * 2
    seeds, positions = torch.randint(-(2**62), 2**62, (b,)), torch.arange(b)
    for temperature in (1.0, 0.7, 0.0):
        if temperature == 0.7:
            logits[:, 4096:8192] = float("-inf")  # a whole chunk that cannot be drawn
        found = sample.Draws.allocate(b, v, "cpu")
        sample.sample(logits, seeds, positions, temperature, found, pdl=0)
        want = sample.sample_reference(logits, seeds, positions, temperature)
        assert torch.equal(found.tokens, want[0])
        close(found.logprobs, want[1])
        close(found.logsumexp, want[2])
        close(found.entropy, want[3])


def main() -> None:
    torch.set_num_threads(1)
    results = {}
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            torch.manual_seed(0)
            try:
                case()
                results[name] = "ok"
            except Exception:  # reported to the test of that name
                results[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
