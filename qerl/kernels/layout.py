"""The one packed layout in memory: 32 x 64 tiles whose 16-byte loads are tensor-core fragments.

A tile of 32 rows and 64 columns is 1024 bytes of codes, ``[2 row blocks][8 r][4 c][2 h][2 q]``
words of 32 bits: lane ``4 r + c`` of a warp reads 16 bytes and owns one whole scale block, columns
``16 c .. 16 c + 15``, of the two rows ``16 b + r`` and ``16 b + r + 8``. That is its part of the
operand A of ``mma.m16n8k16`` and ``wgmma.m64k16`` when the columns of a 64-block are visited in the
order of `mma_order`. Scales lie beside as ``[2 b][8 r][4 c][2 k][2 h]`` bytes per 32 rows and 128
columns (k is the 64-block inside the 128), so a lane reads its four scales in one word.

A word spreads eight E2M1 codes so that, with S = 0x81C081C0,

    w & S,  (w << 6) & S,  rotl(w, 10) & S,  ((w << 4) & 0x81808180) | ((w >> 4) & 0x00400040)

are four pairs of bf16 holding w * 2^-126 in column order: nine integer operations for eight
weights. Scales are unsigned E5M3 with bias 10: ``(b << 4) + 0x7580`` is the bf16 s * 2^118, which
repairs the exponent in the one multiplication: the product is w * s * 2^-8, exact and normal.
E4M3 without its sign, subnormals included, is a subset of E5M3. The format has no zero, so the
codes of a block whose scale is 0 are stored as 0.

Source: the order and the bit tiling were found by search and measured on an H200; every identity
above is checked exhaustively in ``tests/kernels/test_layout.py``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor

from qerl.kernels.tiles import Codes
from qerl.quant.packed import PackedWeight

ROWS = 32  # rows of a tile; N is padded to a multiple with zero blocks
COLS = 128  # columns that share a scale word; K is padded to a multiple with zero blocks
BLOCK = 16  # weights per scale, E2M1 formats

# Bits (sign, e1, e0, m) of column 2 p + e of a group of eight, in the spread word.
_BITS = {
    (0, 0): (15, 8, 7, 6),
    (1, 0): (9, 2, 1, 0),
    (2, 0): (5, 30, 29, 28),
    (3, 0): (11, 4, 3, 10),
    (0, 1): (31, 24, 23, 22),
    (1, 1): (25, 18, 17, 16),
    (2, 1): (21, 14, 13, 12),
    (3, 1): (27, 20, 19, 26),
}
_SPREAD_MASK = 0x81C081C0
E5M3_LARGEST_EXPONENT = 19  # s * 2^118 must stay below the largest bf16
_E5M3_BIAS = 10


class TileOrder:
    """A matrix [N, K] in tile order, whatever its codes: its tensors, moved and joined alike."""

    __slots__ = ()

    codes: ClassVar[Codes]
    """Key of its plans (`tiles`)."""

    names: ClassVar[tuple[str, ...]]
    """Of the stored tensors, whose first axis counts row tiles."""

    shape: tuple[int, int]

    words: Int[Tensor, "T U 256"]

    def parts(self) -> tuple[Tensor, ...]:
        """The stored tensors, in the order of `names`."""
        return tuple(getattr(self, name) for name in self.names)

    @property
    def nbytes(self) -> int:
        """Stored bytes, padding included."""
        return sum(t.numel() * t.element_size() for t in self.parts())

    @property
    def device(self) -> torch.device:
        return self.words.device

    @classmethod
    def of(cls, shape: tuple[int, int], parts: Iterable[Tensor]) -> Self:
        """The matrix [N, K] that stores `parts`, in the order of `names`."""
        make: Callable[..., Self] = cls
        return make(shape, *parts)

    def to(self, device: torch.device | str) -> Self:
        """The same weight on `device`."""
        return self.of(self.shape, (t.to(device) for t in self.parts()))

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> Self:
        """One matrix from several along N (q, k, v; gate, up); N % 32 == 0 but for the last."""
        for weight in weights[:-1]:
            if weight.shape[0] % ROWS:
                raise ValueError(
                    f"N={weight.shape[0]}: stacking needs N % {ROWS} == 0; stack before tile()"
                )
        if len({weight.shape[1] for weight in weights}) != 1:
            raise ValueError(f"K={[w.shape[1] for w in weights]}: stacked weights need one K")
        rows = sum(weight.shape[0] for weight in weights)
        parts = zip(*(weight.parts() for weight in weights), strict=True)
        return cls.of((rows, weights[0].shape[1]), map(torch.cat, parts))


@dataclass(frozen=True, slots=True)
class TiledWeight(TileOrder):
    """A 4-bit matrix [N, K] in tile order. The E2M1 formats share it: NVFP4 and MXFP4."""

    codes: ClassVar[Codes] = "e2m1"

    names: ClassVar[tuple[str, ...]] = ("words", "scales", "tensor_scale")

    shape: tuple[int, int]
    """(N, K) of the matrix itself, without padding."""

    words: Int[Tensor, "T U 256"]
    """int32 [N/32, K/64, 256]: spread codes."""

    scales: Int[Tensor, "T H 64"]
    """int32 [N/32, K/128, 64]: four E5M3 bytes a word."""

    tensor_scale: Float[Tensor, " T"]
    """fp32 [N/32]: the scale of a row tile, so matrices with different scales can be stacked."""

    def __post_init__(self) -> None:
        tiles, halves = -(-self.shape[0] // ROWS), -(-self.shape[1] // COLS)
        want = ((tiles, 2 * halves, 256), (tiles, halves, 64), (tiles,))
        have = tuple(tuple(t.shape) for t in self.parts())
        if have != want:
            raise ValueError(
                f"tiled parts have shapes {have}: {self.shape} needs {want}; use tile()"
            )

    @property
    def padded(self) -> tuple[int, int]:
        """(N, K) rounded up to whole tiles, as the kernels see it."""
        return self.words.shape[0] * ROWS, self.words.shape[1] * 64

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the matmul kernels read."""
        return self.words, self.scales, self.tensor_scale


def to_tiles(words: Int[Tensor, "N W"]) -> Int[Tensor, "T U 256"]:
    """Words of eight codes [N, K/8], row by row, in tile order [N/32, K/64, 256]."""
    tiles, blocks = words.shape[0] // ROWS, words.shape[1] // 8
    words = words.view(tiles, 2, 2, 8, blocks, 4, 2)  # tile, b, h, r, k, c, q
    return words.permute(0, 4, 1, 3, 5, 2, 6).reshape(tiles, blocks, 256).contiguous()


def to_rows(tiled: Shaped[Tensor, "T U *any"]) -> Shaped[Tensor, "N W"]:
    """What stands for the words [T, U, 256], or their columns [T, U, 256, 8], row by row."""
    tiles, blocks = tiled.shape[:2]
    tiled = tiled.view(tiles, blocks, 2, 8, 4, 2, -1)  # tile, k, b, r, c, h, words or columns
    return tiled.permute(0, 2, 5, 3, 1, 4, 6).reshape(tiles * ROWS, -1)


def mma_order(x: Float[Tensor, "M K"]) -> Float[Tensor, "M K"]:
    """Columns of each 64-block in the order in which the wgmma kernel multiplies them.

    Position 16 j + 8 h + 2 c + e holds column 16 c + 4 j + 2 h + e.
    """
    blocks = x.unflatten(-1, (-1, 4, 4, 2, 2))  # [M, K/64, c, j, h, e]
    return blocks.permute(0, 1, 3, 4, 2, 5).flatten(1).contiguous()  # [M, K]


def natural_order(x: Float[Tensor, "M K"]) -> Float[Tensor, "M K"]:
    """Inverse of `mma_order`."""
    blocks = x.unflatten(-1, (-1, 4, 2, 4, 2))  # [M, K/64, j, h, c, e]
    return blocks.permute(0, 1, 4, 2, 3, 5).flatten(1).contiguous()  # [M, K]


def _moves(inverse: bool) -> dict[int, int]:
    """Shift -> mask of the bits that move by it, nibble order to spread order or back."""
    moves: dict[int, int] = {}
    for (pair, element), bits in _BITS.items():
        for source, target in zip((3, 2, 1, 0), bits, strict=True):
            start = 4 * (2 * pair + element) + source
            old, new = (target, start) if inverse else (start, target)
            moves[new - old] = moves.get(new - old, 0) | 1 << old
    return moves


def _signed(mask: int) -> int:
    return mask - (1 << 32) if mask >> 31 else mask


def _permute_bits(words: Int[Tensor, "N W"], inverse: bool) -> Int[Tensor, "N W"]:
    out = torch.zeros_like(words)
    for shift, mask in _moves(inverse).items():
        part = words & _signed(mask)
        if shift >= 0:
            out |= part << shift
        else:  # the arithmetic shift copies the sign; the mask after it drops the copies
            out |= (part >> -shift) & _signed(mask >> -shift)
    return out


def spread(codes: UInt8[Tensor, "N half"]) -> Int[Tensor, "N W"]:
    """Nibble pairs [N, K/2] (low nibble = even column) -> int32 [N, K/8] spread words."""
    return _permute_bits(codes.contiguous().view(torch.int32), inverse=False)


def gather_nibbles(words: Int[Tensor, "N W"]) -> UInt8[Tensor, "N half"]:
    """Inverse of `spread`."""
    return _permute_bits(words, inverse=True).view(torch.uint8)


@cache
def _e5m3_tables() -> tuple[Tensor, Tensor]:
    """E4M3 byte -> E5M3 byte, and back; 255 marks what has no counterpart."""
    table = torch.full((256,), 255, dtype=torch.uint8)
    back = torch.full((256,), 255, dtype=torch.uint8)
    for byte in range(127):  # sign bit set: no scale; 127: NaN
        exponent, mantissa = byte >> 3, byte & 7
        value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        code = 0 if value == 0 else encode_e5m3(value)
        table[byte] = code
        back[code] = byte
    return table, back


def encode_e5m3(value: float) -> int:
    """Byte of a positive value m * 2^k with four significant bits."""
    exponent = 0
    while value >= 2:
        value, exponent = value / 2, exponent + 1
    while value < 1:
        value, exponent = value * 2, exponent - 1
    return ((exponent + _E5M3_BIAS) << 3) + int(value * 8) - 8


def decode_e5m3(scales: UInt8[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """fp32 value of E5M3 bytes by the kernels' own arithmetic: bf16 bits (b << 4) + 0x7580."""
    bits = ((scales.int() << 4) + 0x7580).to(torch.int16)
    return bits.view(torch.bfloat16).float() * 2.0**-118


def pad(x: Tensor, rows: int, cols: int) -> Tensor:
    """`x` [a, b] with zeros appended to whole multiples of `rows` and `cols`."""
    right, below = -x.shape[1] % cols, -x.shape[0] % rows
    return torch.nn.functional.pad(x, (0, right, 0, below)) if right or below else x


def tile(
    codes: UInt8[Tensor, "N half"],
    scales: UInt8[Tensor, "N blocks"],
    tensor_scale: Float[Tensor, "*one"],
) -> TiledWeight:
    """Tile order from nibble pairs and E5M3 bytes, one per 16 columns. 0 marks a zero block.

    Args:
        codes: E2M1 codes, low nibble = even column; [N, K/2].
        scales: unsigned E5M3 (bias 10); [N, K/16].
        tensor_scale: fp32, one element: multiplies the whole matrix.
    """
    n, k = codes.shape[0], codes.shape[1] * 2
    if k % BLOCK:
        raise ValueError(
            f"K={k}: blocks of {BLOCK} need K % {BLOCK} == 0; pad the columns with zeros"
        )
    codes = torch.where((scales > 0).repeat_interleave(BLOCK // 2, 1), codes, 0).to(torch.uint8)
    words = spread(pad(codes, ROWS, COLS // 2))  # [N, K/8]
    tiles, blocks = words.shape[0] // ROWS, words.shape[1] // 8
    scales = pad(scales, ROWS, COLS // BLOCK).view(tiles, 2, 2, 8, blocks // 2, 2, 4)
    return TiledWeight(
        shape=(n, k),
        words=to_tiles(words),
        scales=scales.permute(0, 4, 1, 3, 6, 5, 2)  # tile, kk, b, r, c, k, h
        .reshape(tiles, blocks // 2, 256)
        .contiguous()
        .view(torch.int32),
        tensor_scale=tensor_scale.float().reshape(1).expand(tiles).contiguous(),
    )


def untile(weight: TiledWeight) -> tuple[Tensor, Tensor]:
    """Nibble pairs [N, K/2] and E5M3 bytes [N, K/16]: the inverse of `tile`."""
    (n, k), (rows, cols) = weight.shape, weight.padded
    tiles, blocks = rows // ROWS, cols // 64
    codes = gather_nibbles(to_rows(weight.words))  # [rows, cols/2]
    scales = weight.scales.view(torch.uint8).view(tiles, blocks // 2, 2, 8, 4, 2, 2)
    scales = scales.permute(0, 2, 6, 3, 1, 5, 4).reshape(rows, cols // BLOCK)
    return codes[:n, : k // 2].contiguous(), scales[:n, : k // BLOCK].contiguous()


def from_packed(packed: PackedWeight) -> TiledWeight:
    """An NVFP4 or MXFP4 weight in tile order; the bytes it stands for do not change.

    MXFP4's power-of-two scales become E5M3 under a tensor scale, one byte per 16 weights.

    Raises:
        ValueError: another format, or MXFP4 scales that span more than 18 binades.
    """
    codes = packed.tensors["codes"]
    name = packed.format.name
    if name == "nvfp4":
        scales = from_e4m3(packed.tensors["block_scale"].view(torch.uint8))
        return tile(codes, scales, packed.tensors["tensor_scale"])
    if name == "mxfp4":
        live = _live(codes)  # [N, K/32]
        exponents = torch.where(live, packed.tensors["block_scale"].int(), 0)
        top = exponents.max()
        relative = torch.where(live, exponents - top + E5M3_LARGEST_EXPONENT, 0)
        if bool((relative < live.int()).any()):
            raise ValueError("mxfp4 scales span over 18 binades: quantise as nvfp4 or keep bf16")
        scales = (relative << 3).to(torch.uint8).repeat_interleave(2, 1)  # [N, K/16]
        shift = top.float() - 127 - E5M3_LARGEST_EXPONENT + _E5M3_BIAS
        return tile(codes, scales, torch.exp2(shift))
    raise ValueError(f"format {name}: tiles hold nvfp4 and mxfp4; others dequantise as they are")


def _live(codes: UInt8[Tensor, "N half"]) -> Bool[Tensor, "N blocks"]:
    """Whether a block of 32 holds anything but zeros."""
    return ((codes & 0x77) != 0).unflatten(1, (-1, 16)).any(-1)


def returns_whole(packed: PackedWeight) -> bool:
    """Whether every byte of an E2M1 weight can be had back from tile order.

    NVFP4 where no code stands under a scale of 0. MXFP4 where no block is all zeros, whose scale
    tiles do not keep, and where scales span no more than E5M3's binades.
    """
    codes, name = packed.tensors.get("codes"), packed.format.name
    if codes is None or name not in ("nvfp4", "mxfp4"):
        return False
    if name == "nvfp4":
        dead = packed.tensors["block_scale"].view(torch.uint8) == 0  # [N, K/16]
        return not bool((dead & (codes != 0).unflatten(1, (-1, BLOCK // 2)).any(-1)).any())
    scales = packed.tensors["block_scale"].int()
    narrow = int(scales.max() - scales.min()) < E5M3_LARGEST_EXPONENT
    return narrow and bool(_live(codes).all())


def to_e8m0(
    scales: UInt8[Tensor, "N blocks"], tensor_scale: Float[Tensor, " T"]
) -> UInt8[Tensor, "N halves"]:
    """E8M0 bytes [N, K/32] from the E5M3 bytes [N, K/16] and row tiles that MXFP4 became."""
    exponents = (scales[:, ::2] >> 3).int()
    shift = torch.log2(tensor_scale).round().int().repeat_interleave(ROWS)  # [N padded]
    base = 127 - _E5M3_BIAS + shift[: len(scales), None]
    return (exponents + base).to(torch.uint8)


def from_e4m3(scales: UInt8[Tensor, "N blocks"]) -> UInt8[Tensor, "N blocks"]:
    """E4M3 bytes as E5M3 bytes, exactly. Raises on negative or NaN scales."""
    out = _e5m3_tables()[0].to(scales.device)[scales.int()]
    if bool((out == 255).any()):
        raise ValueError(
            "block_scale holds negative or NaN E4M3 values: scales must be finite, >= 0"
        )
    return out


def to_e4m3(scales: UInt8[Tensor, "N blocks"]) -> UInt8[Tensor, "N blocks"]:
    """E5M3 bytes as E4M3 bytes. Raises where the value has no E4M3 form."""
    out = _e5m3_tables()[1].to(scales.device)[scales.int()]
    if bool((out == 255).any()):
        raise ValueError("scales exceed E4M3: this weight did not come from NVFP4")
    return out


def unpack_word(words: Int[Tensor, "*any"]) -> Float[Tensor, "*any 8"]:
    """The kernels' nine integer operations in torch: eight bf16 values w * 2^-126, column order."""
    rotated = (words << 10) | ((words >> 22) & 0x3FF)
    mask = _signed(_SPREAD_MASK)
    last = ((words << 4) & _signed(0x81808180)) | ((words >> 4) & 0x00400040)
    pairs = torch.stack((words & mask, (words << 6) & mask, rotated & mask, last), -1)
    return pairs.contiguous().view(torch.bfloat16)


def dequantize_reference(weight: TiledWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[N, K] = value * (block scale * tensor scale) in fp32, rounded to `dtype`."""
    (n, k), (rows, cols) = weight.shape, weight.padded
    tiles, blocks = rows // ROWS, cols // 64
    unit = to_rows(unpack_word(weight.words)).unflatten(1, (-1, BLOCK))  # [rows, cols/16, 16]
    scales = weight.scales.view(torch.uint8).view(tiles, blocks // 2, 2, 8, 4, 2, 2)
    scales = scales.permute(0, 2, 6, 3, 1, 5, 4).reshape(rows, cols // BLOCK)
    row_scale = weight.tensor_scale.repeat_interleave(ROWS)[:, None]  # [rows, 1]
    step = decode_e5m3(scales) * row_scale  # [rows, cols/16]
    full = (unit.float() * 2.0**126 * step[..., None]).flatten(1)  # [rows, cols]
    return full[:n, :k].to(dtype)
