"""MXFP4: E2M1 codes and a power-of-two (E8M0) scale per 32 weights; 4.25 bits a weight.

``w = value(code) * 2^(block_scale - 127)``; every dequantised weight is exact in bf16. Source: OCP
Microscaling Formats (MX) v1.0. The bytes are compressed-tensors' ``mxfp4-pack-quantized``: codes =
``weight_packed`` (low nibble = even column), block_scale = ``weight_scale``.

Departures: OCP's own rule is ``2^(floor(log2 amax) - 2)``, under which amax may reach 8 steps and
saturate at 6. compressed-tensors first rounds amax up to the next power of two where its mantissa
is 1.75 or more, so that it stays below 7 steps; that rule is used here. Where amax is above
1.75 * 2^127 it stores 255, which E8M0 reads as NaN; here the scale stops at 2^125, under which
every code is finite in fp32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from qerl.quant.e2m1 import E2M1_VALUES, encode_e2m1
from qerl.quant.nibbles import dequantize_rows, pack_low_first, pair_table
from qerl.quant.packed import Layout, PackedWeight, block_amax, check_weights, row_chunks
from qerl.quant.search import (
    E8M0_OFFSETS,
    MethodName,
    check_data_free,
    check_method,
    search_bytes,
)

BLOCK_SIZE = 32  # weights per scale along K
E2M1_MAX_EXPONENT = 2  # 4 = 2^2 is the largest power of two among the values
E8M0_LARGEST = 252  # 2^125: 6 * 2^125 is finite in fp32, 4 * 2^126 is not


@dataclass(frozen=True, kw_only=True)
class MXFP4:
    """MXFP4, packed by round to nearest or under searched block scales.

    It has no tensor scale: fused layers need nothing.
    """

    name: ClassVar[str] = "mxfp4"
    block_size: ClassVar[int] = BLOCK_SIZE
    bits_per_weight: ClassVar[float] = 4 + 8 / BLOCK_SIZE

    method: MethodName = field(default="rtn", compare=False)
    """How `quantize` chooses block scales: ``rtn`` or ``mse`` (`search`). ``awq`` and ``gptq`` need
    calibration data and are refused here; scripts/quantize.py takes them."""

    def __post_init__(self) -> None:
        check_method(self.method, self.name)

    def layout(self, shape: tuple[int, int]) -> Layout:
        rows, columns = shape
        return {
            "codes": ((rows, columns // 2), torch.uint8),
            "block_scale": ((rows, columns // BLOCK_SIZE), torch.uint8),
        }

    def quantize(self, weight: Float[Tensor, "N K"]) -> PackedWeight:
        return self.quantize_fused([weight])[0]

    def quantize_fused(self, weights: Sequence[Float[Tensor, "_ K"]]) -> list[PackedWeight]:
        check_data_free(self.method, self.name)
        return self.quantize_scaled(weights, search=self.method == "mse")

    def quantize_scaled(
        self,
        weights: Sequence[Float[Tensor, "_ K"]],
        *,
        search: bool,
        importance: Float[Tensor, " K"] | None = None,
    ) -> list[PackedWeight]:
        """As `search.BlockScaled` says."""
        check_weights(weights, BLOCK_SIZE, self.name)
        packed = []
        for weight in weights:
            scale = encode_e8m0(block_amax(weight.detach(), BLOCK_SIZE, self.name))  # [N, K/32]
            if search:
                steps = decode_e8m0(torch.arange(256, dtype=torch.uint8, device=weight.device))
                bounds = (0, E8M0_LARGEST)
                scale = search_bytes(
                    weight.detach(), scale, steps, E8M0_OFFSETS, bounds, importance
                )
            packed.append(self._pack(weight.detach(), scale))
        return packed

    def steps(self, packed: PackedWeight) -> Float[Tensor, "N blocks"]:
        """The block scales, fp32."""
        return decode_e8m0(packed.tensors["block_scale"])

    def _pack(
        self, weight: Float[Tensor, "N K"], block_scale: UInt8[Tensor, "N K//32"]
    ) -> PackedWeight:
        shape = (weight.shape[0], weight.shape[1])
        codes = torch.empty(shape[0], shape[1] // 2, dtype=torch.uint8, device=weight.device)
        for rows in row_chunks(shape, weight.device):
            blocks = weight[rows].float().unflatten(1, (-1, BLOCK_SIZE))  # [n, K/32, 32]
            step = decode_e8m0(block_scale[rows])[..., None]  # [n, K/32, 1]
            codes[rows] = pack_low_first(encode_e2m1(blocks / step).flatten(1))
        return PackedWeight(
            format=self, shape=shape, tensors={"codes": codes, "block_scale": block_scale}
        )

    def dequantize(self, packed: PackedWeight, dtype: torch.dtype) -> Float[Tensor, "N K"]:
        codes = packed.tensors["codes"]  # [N, K/2]
        block_scale = packed.tensors["block_scale"]  # [N, K/32]
        table = pair_table(E2M1_VALUES, True, codes.device)
        return dequantize_rows(codes, lambda rows: decode_e8m0(block_scale[rows]), table, dtype)


def encode_e8m0(amax: Float[Tensor, "N blocks"]) -> UInt8[Tensor, "N blocks"]:
    """Biased exponent of the block's step: amax is 3.5 to 7 steps, or fewer at 2^-127.

    Args:
        amax: fp32, finite, not negative.
    """
    # Adding 0.25 to the mantissa carries into the exponent from 1.75 on.
    exponent = (amax.view(torch.int32) + (1 << 21)) >> 23  # [N, blocks]
    return (exponent - E2M1_MAX_EXPONENT).clamp(0, E8M0_LARGEST).to(torch.uint8)


def decode_e8m0(block_scale: UInt8[Tensor, "*blocks"]) -> Float[Tensor, "*blocks"]:
    """2^(byte - 127) in fp32; 0 is 2^-127, a subnormal."""
    return block_scale.view(torch.float8_e8m0fnu).float()
