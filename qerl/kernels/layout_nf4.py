"""NF4 in tile order: the words of `layout.TiledWeight` with plain nibbles, absmax in fp32 beside.

A word holds columns ``16 c + 8 q .. + 7`` of a row, nibble i column i, where E2M1 spreads its bits:
a level is looked up by PRMT, whose selectors are nibbles. The 16 levels in bf16 are two planes of
bytes, low and high, of two tables of eight; ``w & 0x77777777`` selects in the tables, bit 3 of a
code between them. That is 21 integer operations for eight weights; `unpack_word` is its twin.

There is one scale a row and 64-block, so the product scales fp32 sums of blocks and not weights:
``y = sum over blocks of absmax * (bf16(level) · x)``. absmax lies as ``[2 b][8 r][2 k][2 h]``
floats per 32 rows and 128 columns (k is the 64-block inside the 128, h the row half): a lane reads
the four of its two rows in 16 bytes. 4.5 bits a weight, as many as NVFP4.

What `dequantize_reference` gives, ``bf16(level * absmax)``, is the format's own and what training
multiplies; the decode product rounds the level and not the weight, by as much.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qerl.kernels.layout import COLS, ROWS, TiledWeight, TileOrder, to_rows, to_tiles
from qerl.kernels.tiles import Codes
from qerl.quant.nf4 import BLOCK_SIZE, NF4, NF4_VALUES
from qerl.quant.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class TiledNF4(TileOrder):
    """An NF4 matrix [N, K] in tile order; N % 32 == 0 and K % 128 == 0."""

    codes: ClassVar[Codes] = "nf4"

    names: ClassVar[tuple[str, ...]] = ("words", "absmax")

    shape: tuple[int, int]
    """(N, K)."""

    words: Int[Tensor, "T U 256"]
    """int32 [N/32, K/64, 256]: nibble i of a word is its column i."""

    absmax: Float[Tensor, "T H 64"]
    """fp32 [N/32, K/128, 64]: [2 b][8 r][2 k][2 h]."""

    def __post_init__(self) -> None:
        check_whole(self.shape)
        tiles, halves = self.shape[0] // ROWS, self.shape[1] // COLS
        want = ((tiles, 2 * halves, 256), (tiles, halves, 64))
        have = tuple(tuple(t.shape) for t in self.parts())
        if have != want:
            raise ValueError(
                f"tiled parts have shapes {have}: {self.shape} needs {want}; use tile()"
            )

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the matmul kernels read; the third, a tensor scale, is not used."""
        return self.words, self.absmax, self.absmax


Tiled = TiledWeight | TiledNF4
"""A 4-bit weight as the decode kernels read it."""


def check_whole(shape: tuple[int, int]) -> None:
    """Raise ValueError unless [N, K] divides into tiles."""
    if shape[0] % ROWS or shape[1] % COLS:
        raise ValueError(
            f"nf4 {shape}: tiles need N % {ROWS} == 0 and K % {COLS} == 0; keep it as it is packed"
        )


def _swap(codes: Tensor) -> Tensor:
    """Bytes with their nibbles exchanged: NF4 keeps the even column in the high one."""
    return (codes << 4) | (codes >> 4)


def tile(packed: PackedWeight) -> TiledNF4:
    """An NF4 weight in tile order, the double quantisation of its absmax undone."""
    if not isinstance(packed.format, NF4):
        raise ValueError(f"format {packed.format.name}: this tiles nf4; see layout.from_packed")
    check_whole(packed.shape)
    tiles, blocks = packed.shape[0] // ROWS, packed.shape[1] // BLOCK_SIZE
    words = _swap(packed.tensors["codes"]).view(torch.int32)  # [N, K/8]
    absmax = packed.format.absmax(packed).view(tiles, 2, 2, 8, blocks // 2, 2)  # .., kk, k
    return TiledNF4(
        shape=packed.shape,
        words=to_tiles(words),
        absmax=absmax.permute(0, 4, 1, 3, 5, 2).reshape(tiles, blocks // 2, 64).contiguous(),
    )


def untile(weight: TiledNF4) -> tuple[Tensor, Tensor]:
    """Checkpoint's codes [N, K/2] and fp32 absmax [N, K/64]: the inverse of `tile`."""
    n, k = weight.shape
    tiles, blocks = n // ROWS, k // BLOCK_SIZE
    codes = _swap(to_rows(weight.words).view(torch.uint8))
    absmax = weight.absmax.view(tiles, blocks // 2, 2, 8, 2, 2).permute(0, 2, 5, 3, 1, 4)
    return codes, absmax.reshape(n, blocks).contiguous()


def random_nf4(shape: tuple[int, int], device: torch.device | str = "cuda") -> TiledNF4:
    """A tiled weight of random codes and plausible absmax, without quantisation: for benches."""
    tiles, halves = shape[0] // ROWS, shape[1] // COLS
    size = (tiles, 2 * halves, 256)
    words = torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32, device=device)
    absmax = torch.rand(tiles, halves, 64, device=device) * 0.04 + 0.02
    return TiledNF4(shape, words, absmax)


def planes() -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Low and high bytes of the bf16 levels, by code, as four words each."""
    levels = torch.tensor(NF4_VALUES).bfloat16().view(torch.uint8).view(16, 2)
    found = []
    for plane in levels.T.tolist():
        words = [
            plane[i] | plane[i + 1] << 8 | plane[i + 2] << 16 | plane[i + 3] << 24
            for i in range(0, 16, 4)
        ]
        found.append((words[0], words[1], words[2], words[3]))
    return found[0], found[1]


def prmt(a: Tensor | int, b: Tensor | int, selector: Tensor | int) -> Tensor:
    """PTX prmt.b32 in int64: nibble i of `selector` picks byte i, or eight copies of its sign."""
    device = next((t.device for t in (a, b, selector) if isinstance(t, Tensor)), None)
    a, b, selector = (torch.as_tensor(t, device=device) for t in (a, b, selector))
    both = a & 0xFFFFFFFF, b & 0xFFFFFFFF
    out = torch.zeros((), dtype=torch.int64, device=device)
    for i in range(4):
        nibble = (selector >> (4 * i)) & 15
        place = 8 * (nibble & 3)
        byte = (torch.where((nibble & 4) > 0, both[1] >> place, both[0] >> place)) & 255
        byte = torch.where((nibble & 8) > 0, (byte >> 7) * 255, byte)
        out = out | byte << (8 * i)
    return out


def unpack_word(words: Int[Tensor, "*any"]) -> Float[Tensor, "*any 8"]:
    """The kernels' 21 integer operations in torch: eight bf16 levels, column order."""
    w = words.long() & 0xFFFFFFFF
    (l0, l1, l2, l3), (h0, h1, h2, h3) = planes()
    selector, shifted = w & 0x77777777, (w << 4) & 0xFFFFFFFF
    pairs = []
    for signs in (0xD9C8, 0xFBEA):
        mask = prmt(shifted, w, signs)  # bit 3 of a code, in every bit of its byte
        low = (prmt(l2, l3, selector) & mask) | (prmt(l0, l1, selector) & ~mask)
        high = (prmt(h2, h3, selector) & mask) | (prmt(h0, h1, selector) & ~mask)
        pairs += [prmt(low, high, 0x5140), prmt(low, high, 0x7362)]
        selector = selector >> 16
    return torch.stack(pairs, -1).to(torch.int32).view(torch.bfloat16)


def dequantize_reference(weight: TiledNF4, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[N, K] = level * absmax in fp32, rounded to `dtype`: the format's own values."""
    tensors = dict(zip(("codes", "absmax"), untile(weight), strict=True))
    plain = NF4(double_quant=False)
    return PackedWeight(format=plain, shape=weight.shape, tensors=tensors).dequantize(dtype)


def multiplied(weight: TiledNF4) -> Float[Tensor, "N K"]:
    """[N, K] fp32 = bf16(level) * absmax: the weights that the decode product stands for."""
    levels = to_rows(unpack_word(weight.words)).float().unflatten(1, (-1, BLOCK_SIZE))
    return (levels * untile(weight)[1][..., None]).flatten(1)
