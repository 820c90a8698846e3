"""The methods beyond round to nearest: mse without data, awq and gptq with calibration inputs.

AWQ's channel scales cost nothing when the model runs: the operation before a linear takes 1 / s.

=============  ==================================  ==========================================
group          its inputs are divided in           exact because
=============  ==================================  ==========================================
q/k/v          the weight of input_layernorm       a norm's weight multiplies its output
gate/up        that of post_attention_layernorm    the same
down           rows of up_proj                     down reads silu(gate) * up, linear in up
o              rows of v_proj, and its bias        attention is linear in the values
=============  ==================================  ==========================================

With grouped queries one row of v_proj feeds several inputs of o_proj: they share one scale. A norm
keeps its dtype in the checkpoint, so s is taken to be exactly what the rounded norm makes of it.

What this means for adaptive quantisation noise: AQN adds N(0, sigma²) to the weights of exactly
these norms. After folding, a norm weight is g / s and the columns behind it are W s, so the same
sigma acts on input channel k as noise of s_k sigma would have before: the salient channels, which
AWQ scales up, hear more of it, and the noise relative to the norm's weight grows by s_k. Schedules
of sigma that were tuned on round-to-nearest checkpoints do not carry over unseen. The other methods
leave every norm as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.convert.method import (
    GROUPS,
    LayerInputs,
    LayerWeights,
    Method,
    QuantizedLayer,
    Rtn,
)
from qerl.convert.report import linear_rows
from qerl.quant.awq import AwqSettings, channel_scale, pack_for_inputs
from qerl.quant.gptq import GptqSettings, gptq
from qerl.quant.packed import Format, PackedWeight
from qerl.quant.search import BlockScaled

_NORMS = {"q/k/v": "input_layernorm.weight", "gate/up": "post_attention_layernorm.weight"}


def _packed(
    layer: LayerWeights, linears: Mapping[str, PackedWeight], inputs: LayerInputs | None
) -> QuantizedLayer:
    """A layer whose linears alone have changed, with its rows of the report."""
    return QuantizedLayer(
        index=layer.index,
        linears=linears,
        others=layer.others(),
        rows=linear_rows(layer, linears, inputs),
    )


@dataclass(frozen=True, kw_only=True)
class Mse:
    """Block scales of the least squared error of the weights; see `qerl.quant.search`."""

    name: ClassVar[str] = "mse"
    calibrated: ClassVar[bool] = False

    def quantize(
        self, layer: LayerWeights, format: Format, inputs: LayerInputs | None = None
    ) -> QuantizedLayer:
        """The layer, each group under one tensor scale; `inputs` only add to the report."""
        searched = block_scaled(format, self.name)
        linears: dict[str, PackedWeight] = {}
        for names in GROUPS.values():
            dense = [layer.linear(name) for name in names]
            linears |= zip(names, searched.quantize_scaled(dense, search=True), strict=True)
        return _packed(layer, linears, inputs)


@dataclass(frozen=True, kw_only=True)
class Gptq:
    """Codes that compensate each other on calibration inputs; see `qerl.quant.gptq`."""

    name: ClassVar[str] = "gptq"
    calibrated: ClassVar[bool] = True

    settings: GptqSettings = field(default_factory=GptqSettings)

    def quantize(
        self, layer: LayerWeights, format: Format, inputs: LayerInputs | None
    ) -> QuantizedLayer:
        """The layer; H of each group is that of the dense layer behind quantised ones."""
        scaled, inputs = block_scaled(format, self.name), _needed(inputs, self.name)
        linears: dict[str, PackedWeight] = {}
        for group, names in GROUPS.items():
            dense = [layer.linear(name) for name in names]
            packed = gptq(dense, inputs.second_moment[group], scaled, self.settings)
            linears |= zip(names, packed, strict=True)
        return _packed(layer, linears, inputs)


@dataclass(frozen=True, kw_only=True)
class Awq:
    """Scaled input channels under searched block scales; see `qerl.quant.awq`."""

    name: ClassVar[str] = "awq"
    calibrated: ClassVar[bool] = True

    settings: AwqSettings = field(default_factory=AwqSettings)

    def quantize(
        self, layer: LayerWeights, format: Format, inputs: LayerInputs | None
    ) -> QuantizedLayer:
        """The layer with its scales folded into norms, v_proj and up_proj.

        The report is of the folded layer: what is stored against what it stands for.
        """
        scaled, inputs = block_scaled(format, self.name), _needed(inputs, self.name)
        scales = {
            group: channel_scale(
                [layer.linear(name) for name in names],
                _shared(inputs.mean_abs[group], layer, inputs)
                if group == "o"
                else inputs.mean_abs[group],
                inputs.second_moment[group],
                scaled,
                self.settings,
            )
            for group, names in GROUPS.items()
        }
        folded, scales = fold(layer, scales, inputs.head_dim)
        after = divided(inputs, scales)
        linears: dict[str, PackedWeight] = {}
        for group, names in GROUPS.items():
            dense = [folded.linear(name) for name in names]
            packed = pack_for_inputs(dense, after.second_moment[group], scaled, self.settings)
            linears |= zip(names, packed, strict=True)
        return QuantizedLayer(
            index=layer.index,
            linears=linears,
            others=folded.others(),
            rows=linear_rows(folded, linears, after),
        )


METHODS: Mapping[str, Method] = {m.name: m for m in (Rtn(), Mse(), Awq(), Gptq())}
"""Each method with the settings of its paper, by its name in ``quant.method``."""


def fold(
    layer: LayerWeights, scales: Mapping[str, Float[Tensor, " K"]], head_dim: int
) -> tuple[LayerWeights, dict[str, Tensor]]:
    """The same function with every group's inputs divided by its scale; linears in fp32.

    Args:
        layer: dense.
        scales: by a name of `GROUPS`; those of ``o`` equal for inputs from one row of v_proj.
        head_dim: Dh.

    Returns:
        The layer, and the scales as the rounded norms have them.
    """
    tensors = dict(layer.tensors)
    exact = dict(scales)
    for group, name in _NORMS.items():
        norm = tensors[name]
        tensors[name] = (norm.float() / scales[group]).to(norm.dtype)
        # A weight of 0 shuts its channel, whatever the scale.
        kept = tensors[name].float()
        exact[group] = torch.where(kept == 0, 1.0, norm.float() / kept)
    for group, names in GROUPS.items():
        for name in names:
            tensors[f"{name}.weight"] = layer.linear(name).float() * exact[group]
    value = _per_value_row(scales["o"], len(layer.linear("self_attn.v_proj")), head_dim)
    for name, scale in (("self_attn.v_proj", value), ("mlp.up_proj", scales["down"])):
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] / scale[:, None]
        bias = tensors.get(f"{name}.bias")
        if bias is not None:
            tensors[f"{name}.bias"] = (bias.float() / scale).to(bias.dtype)
    return LayerWeights(index=layer.index, tensors=tensors), exact


def divided(inputs: LayerInputs, scales: Mapping[str, Float[Tensor, " K"]]) -> LayerInputs:
    """The statistics of x / s."""
    return LayerInputs(
        tokens=inputs.tokens,
        second_moment={
            group: moment / torch.outer(scales[group], scales[group])
            for group, moment in inputs.second_moment.items()
        },
        mean_abs={group: mean / scales[group] for group, mean in inputs.mean_abs.items()},
        head_dim=inputs.head_dim,
    )


def block_scaled(format: Format, method: str) -> BlockScaled:
    """`format` as one with block scales to choose.

    Raises:
        ValueError: it has none.
    """
    if not isinstance(format, BlockScaled):
        raise ValueError(
            f"quant.method={method}: {format.name} has no method but rtn; choose quant=nvfp4 or "
            f"quant=mxfp4 for {method}"
        )
    return format


def _needed(inputs: LayerInputs | None, method: str) -> LayerInputs:
    if inputs is None:
        raise ValueError(f"quant.method={method}: needs calibration inputs; quant.method=mse none")
    return inputs


def _shared(
    mean_abs: Float[Tensor, " K"], layer: LayerWeights, inputs: LayerInputs
) -> Float[Tensor, " K"]:
    """Mean |x| of o_proj's inputs, averaged over the query heads that read one value head."""
    rows = len(layer.linear("self_attn.v_proj"))
    heads = mean_abs.view(rows // inputs.head_dim, -1, inputs.head_dim)  # [Hk, H / Hk, Dh]
    return heads.mean(1, keepdim=True).expand_as(heads).flatten()


def _per_value_row(scale: Float[Tensor, " K"], rows: int, head_dim: int) -> Float[Tensor, " rows"]:
    """The scale of each row of v_proj; that of the first query head which reads it."""
    heads = scale.view(rows // head_dim, -1, head_dim)  # [Hk, H / Hk, Dh]
    if not torch.equal(heads, heads[:, :1].expand_as(heads)):
        raise ValueError(
            "awq scales of o_proj differ between query heads of one value head: they are folded "
            "into its row of v_proj, so make them equal"
        )
    return heads[:, 0].flatten()
