"""NF4 in tile order: bits, fragments and the order of scales, without a GPU."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from qerl.kernels import fragments, layout, layout_nf4
from qerl.kernels.w4a16 import w4a16
from qerl.kernels.w4a16_gemv import w4a16_reference
from qerl.quant.nf4 import NF4, NF4_VALUES
from qerl.quant.nvfp4 import NVFP4

LEVELS = torch.tensor(NF4_VALUES).bfloat16()


def signed(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def test_byte_permutes_look_up_every_code_at_every_place() -> None:
    code = torch.arange(16)[:, None, None]
    place = torch.arange(8)[None, :, None]
    nibbles = torch.where(torch.arange(8) == place, code, 15 - code)  # [16, 8, 8]
    words = signed((nibbles << (4 * torch.arange(8))).sum(-1))
    assert torch.equal(layout_nf4.unpack_word(words), LEVELS[nibbles])


def test_prmt_replicates_signs_and_reads_four_nibbles_of_its_selector() -> None:
    found = layout_nf4.prmt(0x80FF7F01, 0x00C08122, 0xFFFF0000 | 0xD4B3)
    assert int(found) == 0xFF22FF80  # sign of byte 5, byte 4, sign of byte 3, byte 3


def run_asm(words: torch.Tensor) -> torch.Tensor:
    """`fragments.unpack_nf4` executed line by line on int64 words: eight bf16 a word."""
    source = Path(str(fragments.__file__)).read_text()
    tables = re.findall(r"xor\.b32 \$\d, z, (0x[0-9A-F]+)", source)
    body = source[source.index("def unpack_nf4") :]
    body = body[: body.index('"=h,=h')]
    held: dict[str, torch.Tensor] = {"$8": words & 0xFFFFFFFF}
    held |= {f"${9 + i}": torch.tensor(int(word, 16)) for i, word in enumerate(tables)}

    def value(name: str) -> torch.Tensor:
        return held[name] if name in held else torch.tensor(int(name, 0))

    found: dict[int, torch.Tensor] = {}
    for line in re.findall(r"^\s+((?:and|shl|shr|prmt|lop3|mov)\..*);$", body, re.MULTILINE):
        name, rest = line.split(" ", 1)
        into, *given = re.split(r",\s*(?![^{]*\})", rest)
        if name == "mov.b32":
            found[int(re.findall(r"\d+", into)[0])] = value(given[0])
            continue
        a, b, *more = (value(text) for text in given)
        if name == "and.b32":
            held[into] = a & b
        elif name in ("shl.b32", "shr.b32"):
            held[into] = (a << b if name == "shl.b32" else a >> b) & 0xFFFFFFFF
        elif name == "prmt.b32":
            held[into] = layout_nf4.prmt(a, b, more[0])
        else:
            mask, table = more  # bit 4 a + 2 b + c of the table is the result
            assert name == "lop3.b32"
            out = torch.zeros_like(words)
            for i in range(8):
                if int(table) >> i & 1:
                    terms = [v if i >> p & 1 else ~v for v, p in ((a, 2), (b, 1), (mask, 0))]
                    out = out | (terms[0] & terms[1] & terms[2])
            held[into] = out & 0xFFFFFFFF
    pairs = torch.stack([found[i] for i in (0, 2, 4, 6)], -1)
    return pairs.to(torch.int32).view(torch.bfloat16)


def test_the_kernels_asm_does_what_its_twin_does() -> None:
    words = torch.randint(0, 2**32, (4096,))
    assert torch.equal(run_asm(words), layout_nf4.unpack_word(words))


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("shape", [(32, 128), (96, 384), (192, 1536)])
def test_tiles_are_the_formats_own_weights_and_give_them_back(
    shape: tuple[int, int], double: bool
) -> None:
    packed = NF4(double_quant=double).quantize(torch.randn(shape))
    tiled = layout_nf4.tile(packed)
    codes, absmax = layout_nf4.untile(tiled)
    assert torch.equal(codes, packed.tensors["codes"])
    assert torch.equal(absmax, packed.format.absmax(packed))  # type: ignore[attr-defined]
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(layout_nf4.dequantize_reference(tiled, dtype), packed.dequantize(dtype))
    assert tiled.nbytes == shape[0] * shape[1] * 4.5 / 8


def test_a_lanes_words_are_its_fragments_and_its_four_floats_their_scales() -> None:
    packed = NF4(double_quant=False).quantize(torch.randn(64, 256))
    tiled = layout_nf4.tile(packed)
    pair = torch.stack((packed.tensors["codes"] >> 4, packed.tensors["codes"] & 15), -1)
    dense = LEVELS[pair.flatten(1).long()]  # [64, 256]
    absmax = packed.tensors["absmax"]  # [64, 4]
    for tile, block, b, lane in [(0, 0, 0, 0), (1, 3, 1, 31), (0, 2, 1, 13), (1, 1, 0, 22)]:
        r, c = lane // 4, lane % 4
        rows = [32 * tile + 16 * b + r, 32 * tile + 16 * b + r + 8]
        four = tiled.words[tile, block].view(2, 32, 4)[b, lane]  # one 16-byte load
        unpacked = layout_nf4.unpack_word(four).view(2, 16)  # h, column
        columns = slice(64 * block + 16 * c, 64 * block + 16 * c + 16)
        assert torch.equal(unpacked, dense[rows, columns])
        floats = tiled.absmax[tile, block // 2].view(2, 8, 2, 2)[b, r, block % 2]  # h
        assert torch.equal(floats, absmax[rows, block])


def test_the_specification_scales_sums_of_blocks() -> None:
    tiled = layout_nf4.random_nf4((64, 256), "cpu")
    x = torch.randn(3, 256)
    codes, absmax = layout_nf4.untile(tiled)
    levels = LEVELS[torch.stack((codes >> 4, codes & 15), -1).flatten(1).long()].float()
    sums = torch.einsum("mbk,nbk->mnb", x.view(3, 4, 64), levels.view(64, 4, 64))
    torch.testing.assert_close(w4a16_reference(x, tiled), (sums * absmax).sum(-1))
    portable = x @ layout_nf4.dequantize_reference(tiled).float().T
    torch.testing.assert_close(w4a16(x, tiled), portable)


def test_what_is_not_whole_tiles_is_refused() -> None:
    with pytest.raises(ValueError, match="K % 128"):
        layout_nf4.tile(NF4().quantize(torch.randn(32, 576)))
    with pytest.raises(ValueError, match="nf4"):
        layout_nf4.tile(NVFP4().quantize(torch.randn(32, 128)))
    with pytest.raises(ValueError, match="tile"):
        layout_nf4.TiledNF4((64, 256), *layout_nf4.random_nf4((64, 128), "cpu").parts())
    with pytest.raises(ValueError, match="nf4"):
        layout.from_packed(NF4().quantize(torch.randn(32, 128)))
