"""NVFP4: E2M1 codes, an E4M3 scale per 16 weights, an FP32 scale per tensor; 4.5 bits a weight.

``w = value(code) * (block_scale * tensor_scale)``, in fp32. Source: NVFP4 of QeRL
(arXiv:2510.11696, Eq. 6), stored as compressed-tensors stores ``nvfp4-pack-quantized``:

=================  ==========================  ==============================================
here               compressed-tensors          relation
=================  ==========================  ==============================================
``codes``          ``weight_packed``           the same bytes; low nibble = even column
``block_scale``    ``weight_scale``            the same bytes
``tensor_scale``   ``weight_global_scale``     tensor_scale = 1 / weight_global_scale, rounded
=================  ==========================  ==============================================

compressed-tensors keeps the inverse, ``g = 448 * 6 / max |W|``, and divides by it. Here the scale
multiplies, as in ModelOpt's ``weight_scale_2``: kernels multiply, and a fused layer takes the
largest of its members' scales (compressed-tensors: the smallest g). Codes are chosen with g itself,
so codes and block scales are compressed-tensors' own for fp32 weights. It rounds ``amax / 6`` and
g to the dtype of the weights; here bf16 weights are read as fp32, which keeps g exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from qerl.quant.e2m1 import E2M1_MAX, E2M1_VALUES, encode_e2m1
from qerl.quant.nibbles import dequantize_rows, pack_low_first, pair_table
from qerl.quant.packed import Layout, PackedWeight, block_amax, check_weights, row_chunks
from qerl.quant.search import (
    E4M3_BOUNDS,
    E4M3_OFFSETS,
    MethodName,
    check_data_free,
    check_method,
    search_bytes,
)

BLOCK_SIZE = 16  # weights per scale along K
E4M3_MAX = 448.0  # largest finite float8_e4m3fn

# A block scale that rounds to 0 is stored as this. Its block then rounds to 0: amax / 6 is at most
# 2^-10 of the tensor scale, so amax is under 0.05 of this step. Value of compressed-tensors 0.11
# and 0.20.1 (quantization/utils/helpers.py, `_get_dtype_eps`).
ZERO_BLOCK_SCALE = 0.125


@dataclass(frozen=True, kw_only=True)
class NVFP4:
    """NVFP4, packed by round to nearest or under searched block scales."""

    name: ClassVar[str] = "nvfp4"
    block_size: ClassVar[int] = BLOCK_SIZE
    bits_per_weight: ClassVar[float] = 4 + 8 / BLOCK_SIZE

    power_of_two_scale: bool = False
    """Round the tensor scale up to a power of two. A weight is then value * block_scale * 2^e with
    at most 6 significant bits: bf16 holds every dequantised weight exactly. Costs up to one of the
    18 binades that the block scales span, and nothing else. Off in published checkpoints."""

    method: MethodName = field(default="rtn", compare=False)
    """How `quantize` chooses block scales: ``rtn`` or ``mse`` (`search`). ``awq`` and ``gptq`` need
    calibration data and are refused here; scripts/quantize.py takes them."""

    def __post_init__(self) -> None:
        check_method(self.method, self.name)

    def layout(self, shape: tuple[int, int]) -> Layout:
        rows, columns = shape
        return {
            "codes": ((rows, columns // 2), torch.uint8),
            "block_scale": ((rows, columns // BLOCK_SIZE), torch.float8_e4m3fn),
            "tensor_scale": ((), torch.float32),
        }

    def quantize(self, weight: Float[Tensor, "N K"]) -> PackedWeight:
        return self.quantize_fused([weight])[0]

    def quantize_fused(self, weights: Sequence[Float[Tensor, "_ K"]]) -> list[PackedWeight]:
        """Pack `weights` under the tensor scale of the largest |w| among them."""
        check_data_free(self.method, self.name)
        return self.quantize_scaled(weights, search=self.method == "mse")

    def quantize_scaled(
        self,
        weights: Sequence[Float[Tensor, "_ K"]],
        *,
        search: bool,
        importance: Float[Tensor, " K"] | None = None,
    ) -> list[PackedWeight]:
        """As `search.BlockScaled` says; the tensor scale is that of round to nearest either way."""
        check_weights(weights, BLOCK_SIZE, self.name)
        amaxes = [block_amax(weight.detach(), BLOCK_SIZE, self.name) for weight in weights]
        inverse = self._inverse_scale(torch.stack([amax.max() for amax in amaxes]).max())  # []
        packed = []
        for weight, amax in zip(weights, amaxes, strict=True):
            scale = _nearest_scale(amax, inverse)  # [N, K/16]
            if search:
                scale = _searched_scale(weight.detach(), amax, scale, inverse, importance)
            packed.append(self._pack(weight.detach(), scale, inverse))
        return packed

    def steps(self, packed: PackedWeight) -> Float[Tensor, "N blocks"]:
        """Block scale times tensor scale, fp32."""
        return packed.tensors["block_scale"].float() * packed.tensors["tensor_scale"]

    def dequantize(self, packed: PackedWeight, dtype: torch.dtype) -> Float[Tensor, "N K"]:
        codes = packed.tensors["codes"]  # [N, K/2]
        block_scale = packed.tensors["block_scale"]  # [N, K/16]
        tensor_scale = packed.tensors["tensor_scale"]  # []
        table = pair_table(E2M1_VALUES, True, codes.device)
        return dequantize_rows(
            codes, lambda rows: block_scale[rows].float() * tensor_scale, table, dtype
        )

    def _inverse_scale(self, amax: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """G = 448 * 6 / amax, so that the largest block scale is the largest E4M3."""
        inverse = E4M3_MAX * E2M1_MAX / amax  # []
        # For 0, and below 8e-36, it overflows: such a tensor is packed as zeros under scale 1.
        inverse = torch.where(inverse.isfinite(), inverse, 1.0)
        if self.power_of_two_scale:
            # Clearing the mantissa rounds g down, hence the tensor scale up: the block scales
            # shrink and cannot pass 448.
            inverse = (inverse.view(torch.int32) & 0x7F800000).view(torch.float32)
        return inverse

    def _pack(
        self,
        weight: Float[Tensor, "N K"],
        block_scale: Float[Tensor, "N K//16"],
        inverse: Float[Tensor, ""],
    ) -> PackedWeight:
        scale = block_scale.float()  # [N, K/16]
        shape = (weight.shape[0], weight.shape[1])
        codes = torch.empty(shape[0], shape[1] // 2, dtype=torch.uint8, device=weight.device)
        for rows in row_chunks(shape, weight.device):
            step = scale[rows] / inverse  # [n, K/16]
            codes[rows] = _encode(weight[rows], step)
        return PackedWeight(
            format=self,
            shape=shape,
            tensors={
                "codes": codes,
                "block_scale": block_scale,
                "tensor_scale": 1.0 / inverse,
            },
        )


def _nearest_scale(
    amax: Float[Tensor, "N blocks"], inverse: Float[Tensor, ""]
) -> Float[Tensor, "N blocks"]:
    """The E4M3 scale that maps amax to 6."""
    # The order of operations is compressed-tensors': another would round differently. So would
    # a division by a Python number, which CUDA computes as a product with its reciprocal.
    largest = torch.full((), E2M1_MAX, device=amax.device)
    scale = ((amax / largest) * inverse).to(torch.float8_e4m3fn).float()  # [N, K/16]
    return torch.where(scale == 0, ZERO_BLOCK_SCALE, scale).to(torch.float8_e4m3fn)


def _searched_scale(
    weight: Float[Tensor, "N K"],
    amax: Float[Tensor, "N K//16"],
    nearest: Float[Tensor, "N K//16"],
    inverse: Float[Tensor, ""],
    importance: Float[Tensor, " K"] | None,
) -> Float[Tensor, "N K//16"]:
    """The E4M3 scale of the least squared error."""
    byte = torch.arange(256, dtype=torch.uint8, device=weight.device)
    steps = byte.view(torch.float8_e4m3fn).float() / inverse  # [256]
    # Where round to nearest gives a block up, the smallest scale cannot do worse.
    given_up = (amax > 0) & (amax * inverse < E2M1_MAX * 2**-10)  # [N, K/16]
    first = torch.where(given_up, 1, nearest.view(torch.uint8))
    chosen = search_bytes(weight, first, steps, E4M3_OFFSETS, E4M3_BOUNDS, importance)
    return chosen.view(torch.float8_e4m3fn)


def _encode(
    weight: Float[Tensor, "n K"], step: Float[Tensor, "n K//16"]
) -> UInt8[Tensor, "n K//2"]:
    blocks = weight.float().unflatten(1, (-1, BLOCK_SIZE))  # [n, K/16, 16]
    return pack_low_first(encode_e2m1(blocks / step[..., None]).flatten(1))
