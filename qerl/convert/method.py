"""Method: how the linears of one decoder layer become packed weights.

A conversion walks through the decoder layer by layer. A data-free method sees the dense tensors of
the layer; a calibrated one also sees statistics of what flows into each group of linears. Linears
of one group read the same input and share a tensor scale, so that an engine may fuse them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.quant.packed import Format, PackedWeight, row_chunks

GROUPS: Mapping[str, tuple[str, ...]] = {
    "q/k/v": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate/up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The linears of a layer by their Hugging Face names inside it, grouped by shared input."""

LINEAR_NAMES = tuple(name for group in GROUPS.values() for name in group)

Row = Mapping[str, object]
"""A line of the report: ``layer``, ``linear`` and what was measured of it, as JSON values."""


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """The dense tensors of one decoder layer."""

    index: int
    """Of the layer, from 0."""

    tensors: Mapping[str, Tensor]
    """By Hugging Face names inside the layer: ``self_attn.q_proj.weight``, also biases, norms."""

    def linear(self, name: str) -> Float[Tensor, "N K"]:
        """The weight of a linear, by a name of `LINEAR_NAMES`."""
        return self.tensors[f"{name}.weight"]

    def others(self) -> dict[str, Tensor]:
        """Everything but the weights of the seven linears: biases and norms."""
        linears = {f"{name}.weight" for name in LINEAR_NAMES}
        return {name: tensor for name, tensor in self.tensors.items() if name not in linears}


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What calibration tokens are when they enter each group of linears of one layer."""

    tokens: int
    """Rows x the statistics are sums or means over."""

    second_moment: Mapping[str, Float[Tensor, "K K"]]
    """XᵀX / tokens, fp32, by a name of `GROUPS`."""

    mean_abs: Mapping[str, Float[Tensor, " K"]]
    """mean |x| per channel, fp32, by a name of `GROUPS`."""

    head_dim: int
    """Dh: which inputs of o_proj come from one row of v_proj follows from it."""


@dataclass(frozen=True, kw_only=True)
class QuantizedLayer:
    """One decoder layer as it is stored."""

    index: int
    """Of the layer, from 0."""

    linears: Mapping[str, PackedWeight]
    """By a name of `LINEAR_NAMES`."""

    others: Mapping[str, Tensor]
    """Biases and norms by Hugging Face names inside the layer; a method may have changed them."""

    rows: Sequence[Row] = field(default=())
    """For the report."""


class Method(Protocol):
    """Chooses codes and scales. Implementations are frozen dataclasses; fields are settings."""

    @property
    def name(self) -> str:
        """The option's name: ``rtn``, ``mse``, ``awq`` or ``gptq``."""
        ...

    @property
    def calibrated(self) -> bool:
        """Whether `quantize` needs `inputs`."""
        ...

    def quantize(
        self, layer: LayerWeights, format: Format, inputs: LayerInputs | None
    ) -> QuantizedLayer:
        """The layer in `format`. Deterministic: the same layer and inputs give the same bytes.

        Raises:
            ValueError: a weight is not finite, of the wrong dtype, or does not divide into blocks.
        """
        ...


class Calibration(Protocol):
    """Carries calibration tokens through the decoder while its layers are quantised."""

    def inputs(self, layer: LayerWeights) -> LayerInputs:
        """Statistics of the tokens inside the dense `layer`, after the layers before it."""
        ...

    def advance(self, layer: QuantizedLayer) -> None:
        """Send the tokens through the quantised layer; called once a layer, in order."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rtn:
    """Round to nearest: every scale from the largest |w| of its block; no data, no search."""

    name: ClassVar[str] = "rtn"
    calibrated: ClassVar[bool] = False

    def quantize(
        self, layer: LayerWeights, format: Format, inputs: LayerInputs | None = None
    ) -> QuantizedLayer:
        """The layer, each group under one tensor scale; `inputs` are not read."""
        linears: dict[str, PackedWeight] = {}
        for names in GROUPS.values():
            packed = format.quantize_fused([layer.linear(name) for name in names])
            linears |= zip(names, packed, strict=True)
        return QuantizedLayer(
            index=layer.index,
            linears=linears,
            others=layer.others(),
            rows=[
                {
                    "layer": layer.index,
                    "linear": name,
                    "sqnr_db": _finite(sqnr_db(layer.linear(name), packed)),
                }
                for name, packed in linears.items()
            ],
        )


def _finite(value: float) -> float | None:
    """None for an exact weight, whose SQNR no JSON number holds."""
    return value if math.isfinite(value) else None


def sqnr_db(dense: Float[Tensor, "N K"], packed: PackedWeight) -> float:
    """Signal to quantisation noise of a weight: 10 log10(sum w² / sum (w - w')²), in dB.

    Returns:
        ``inf`` where the packed weight is exact.
    """
    signal = noise = 0.0
    other = packed.dequantize(torch.bfloat16)
    for rows in row_chunks((dense.shape[0], dense.shape[1]), dense.device):
        w = dense[rows].float()
        signal += float(w.square().sum())
        noise += float((w - other[rows].float()).square().sum())
    return 10 * math.log10(signal / noise) if noise else math.inf
