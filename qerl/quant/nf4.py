"""NF4: 16 quantiles of the normal, absmax per 64 weights, double quantisation; 4.127 bits.

``w = NF4_VALUES[code] * absmax``, in fp32. With double quantisation absmax is itself 8 bits,
``absmax = dynamic[byte] * nested_absmax + nested_offset``, with a nested scale per 256 blocks.
Source: QLoRA (arXiv:2305.14314, section 3 and appendix E); dynamic data type of 8-bit optimizers
(arXiv:2110.02861, section 1.3). Bytes, tables and arithmetic agree with bitsandbytes 0.50.2 on the
CPU; names are those of its checkpoints, whose flat codes [N * K / 2, 1] are `codes` reshaped:

* a byte holds the even column in its HIGH nibble, unlike NVFP4 and MXFP4;
* weights are multiplied by 1 / absmax, and a tie takes the lower code;
* the 8-bit code is the one nearest to the value snapped to a grid of 65,536 points on [-1, 1];
* `nested_offset` is the fp32 mean of absmax in the order that torch sums on the device at hand.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from qerl.quant.nibbles import dequantize_rows, pack_high_first, pair_table
from qerl.quant.packed import Layout, PackedWeight, block_amax, check_weights, row_chunks
from qerl.quant.search import MethodName, check_method

BLOCK_SIZE = 64  # weights per absmax along K
NESTED_BLOCK_SIZE = 256  # absmax values per nested scale, over the flattened [N * K / 64]

NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)  # by code; QLoRA (arXiv:2305.14314), appendix E

# Half-way between neighbours, in fp32. A value above `i` of them has code `i`.
NF4_BOUNDS: tuple[float, ...] = tuple(
    ((torch.tensor(NF4_VALUES[:-1]) + torch.tensor(NF4_VALUES[1:])) / 2).tolist()
)


@dataclass(frozen=True, kw_only=True)
class NF4:
    """4-bit NormalFloat, data-free. It has no tensor scale: fused layers need nothing."""

    name: ClassVar[str] = "nf4"
    block_size: ClassVar[int] = BLOCK_SIZE

    double_quant: bool = True
    """Store absmax in 8 bits rather than fp32: 4.127 instead of 4.5 bits a weight (QLoRA)."""

    method: MethodName = field(default="rtn", compare=False)
    """``rtn``: nearest code under the block's absmax. NF4 has no other."""

    def __post_init__(self) -> None:
        check_method(self.method, self.name, ("rtn",))

    @property
    def bits_per_weight(self) -> float:
        if not self.double_quant:
            return 4 + 32 / BLOCK_SIZE
        return 4 + (8 + 32 / NESTED_BLOCK_SIZE) / BLOCK_SIZE

    def layout(self, shape: tuple[int, int]) -> Layout:
        rows, columns = shape
        blocks = (rows, columns // BLOCK_SIZE)
        codes = ((rows, columns // 2), torch.uint8)
        if not self.double_quant:
            return {"codes": codes, "absmax": (blocks, torch.float32)}
        nested = -(-blocks[0] * blocks[1] // NESTED_BLOCK_SIZE)
        return {
            "codes": codes,
            "absmax": (blocks, torch.uint8),
            "nested_absmax": ((nested,), torch.float32),
            "nested_offset": ((), torch.float32),
        }

    def quantize(self, weight: Float[Tensor, "N K"]) -> PackedWeight:
        check_weights([weight], BLOCK_SIZE, self.name)
        weight = weight.detach()
        absmax = block_amax(weight, BLOCK_SIZE, self.name)  # [N, K/64]
        shape = (weight.shape[0], weight.shape[1])
        codes = torch.empty(shape[0], shape[1] // 2, dtype=torch.uint8, device=weight.device)
        for rows in row_chunks(shape, weight.device):
            blocks = weight[rows].float().unflatten(1, (-1, BLOCK_SIZE))  # [n, K/64, 64]
            inverse = 1.0 / absmax[rows].clamp(min=1e-38)  # [n, K/64]; zero blocks must not divide
            codes[rows] = pack_high_first(encode_nf4(blocks * inverse[..., None]).flatten(1))
        tensors = {"codes": codes, "absmax": absmax}
        if self.double_quant:
            tensors |= quantize_absmax(absmax)
        return PackedWeight(format=self, shape=shape, tensors=tensors)

    def quantize_fused(self, weights: Sequence[Float[Tensor, "_ K"]]) -> list[PackedWeight]:
        check_weights(weights, BLOCK_SIZE, self.name)
        return [self.quantize(weight) for weight in weights]

    def dequantize(self, packed: PackedWeight, dtype: torch.dtype) -> Float[Tensor, "N K"]:
        codes = packed.tensors["codes"]  # [N, K/2]
        absmax = self.absmax(packed)  # [N, K/64]
        table = pair_table(NF4_VALUES, False, codes.device)
        return dequantize_rows(codes, lambda rows: absmax[rows], table, dtype)

    def absmax(self, packed: PackedWeight) -> Float[Tensor, "N blocks"]:
        """The fp32 block scales, with the double quantisation undone."""
        stored = packed.tensors["absmax"]  # [N, K/64]
        if not self.double_quant:
            return stored
        scale = packed.tensors["nested_absmax"].repeat_interleave(NESTED_BLOCK_SIZE)
        values = dynamic_values(stored.device)[stored.int()].flatten()  # [N * K/64]
        values = values * scale[: values.numel()] + packed.tensors["nested_offset"]
        return values.view(stored.shape)


def encode_nf4(values: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """The nearest code of each value in [-1, 1]; a tie takes the lower code."""
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    # Counting the bounds below a value needs one byte a weight of scratch and is three times as
    # fast as a binary search on a CPU core (15 bounds, 2^20 weights, torch 2.13).
    for bound in NF4_BOUNDS:
        codes += values > bound
    return codes


def quantize_absmax(absmax: Float[Tensor, "N blocks"]) -> dict[str, Tensor]:
    """`absmax`, `nested_absmax` and `nested_offset`: the block scales in 8 bits."""
    offset = absmax.mean()  # []
    flat = (absmax - offset).flatten()  # [N * blocks]
    padding = -flat.numel() % NESTED_BLOCK_SIZE
    padded = torch.nn.functional.pad(flat, (0, padding)).view(-1, NESTED_BLOCK_SIZE)
    codes, nested = quantize_dynamic(padded)  # [nested, 256], [nested]
    return {
        "absmax": codes.flatten()[: flat.numel()].view(absmax.shape),
        "nested_absmax": nested,
        "nested_offset": offset,
    }


def quantize_dynamic(
    blocks: Float[Tensor, "nested 256"],
) -> tuple[UInt8[Tensor, "nested 256"], Float[Tensor, " nested"]]:
    """8-bit dynamic codes and max |value| of each block."""
    absmax = blocks.abs().amax(1)  # [nested]
    table = dynamic_values(blocks.device)  # [256]
    bounds = (table[:-1] + table[1:]) / 2  # [255]
    scaled = (blocks * (1.0 / absmax)[:, None]).clamp(-1, 1)  # [nested, 256]
    grid = ((scaled + 1) * 0.5 * 65535 + 0.5).floor()  # 0 .. 65535
    codes = torch.bucketize(grid * (2 / 65535) - 1, bounds)
    # A block of zeros divides 0 by 0 above; bitsandbytes gives it code 0.
    return torch.where(absmax[:, None] > 0, codes, 0).to(torch.uint8), absmax


@functools.cache
def dynamic_values(device: torch.device) -> Float[Tensor, "256"]:
    """The signed 8-bit dynamic data type, ascending: 7 decades with 1, 2, 4, ... 64 steps each.

    Decade ``i`` holds the midpoints of 2^i equal parts of [0.1, 1], times 10^(i - 6), with both
    signs; 0 and 1 complete the 256. Asymmetric: the lowest value is -0.993.
    """
    positive = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)  # [2^i + 1]
        positive.append((edges[:-1] + edges[1:]) / 2 * 10 ** (decade - 6))
    values = torch.cat(positive)  # [127]
    return torch.cat([values, -values, torch.tensor([0.0, 1.0])]).sort().values.to(device)
