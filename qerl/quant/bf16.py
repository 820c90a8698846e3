"""BF16: the identity format, 16 bits a weight; the baseline behind the same interface."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.quant.packed import Layout, PackedWeight, check_dtype, check_weights


@dataclass(frozen=True, kw_only=True)
class BF16:
    """Weights as bf16. Packing and unpacking bf16 weights copies nothing."""

    name: ClassVar[str] = "bf16"
    block_size: ClassVar[int] = 1
    bits_per_weight: ClassVar[float] = 16.0

    def layout(self, shape: tuple[int, int]) -> Layout:
        return {"weight": (shape, torch.bfloat16)}

    def quantize(self, weight: Float[Tensor, "N K"]) -> PackedWeight:
        """Round to bf16, ties to even. A contiguous bf16 `weight` is kept, not copied."""
        check_weights([weight], self.block_size, self.name)
        stored = weight.detach().to(torch.bfloat16).contiguous()  # [N, K]
        low, high = torch.aminmax(stored)  # NaN propagates
        if not (low.isfinite() and high.isfinite()):
            raise ValueError(
                f"weights in [{low.item()}, {high.item()}]: {self.name} packs finite weights below "
                "3.4e38; check the checkpoint"
            )
        return PackedWeight(
            format=self, shape=(stored.shape[0], stored.shape[1]), tensors={"weight": stored}
        )

    def quantize_fused(self, weights: Sequence[Float[Tensor, "_ K"]]) -> list[PackedWeight]:
        check_weights(weights, self.block_size, self.name)
        return [self.quantize(weight) for weight in weights]

    def dequantize(self, packed: PackedWeight, dtype: torch.dtype) -> Float[Tensor, "N K"]:
        """The weights in `dtype`; for bf16 the stored tensor itself."""
        check_dtype(dtype)
        return packed.tensors["weight"].to(dtype)
