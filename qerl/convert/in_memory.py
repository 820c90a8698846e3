"""A policy quantised in memory by any method, for measurements; nothing is written."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Int
from torch import Tensor

from qerl.convert.calibrate import StreamedCalibration, quantized_layer
from qerl.convert.method import GROUPS, LayerWeights, Method, Row
from qerl.convert.report import layer_rows
from qerl.model.decoder import Decoder
from qerl.model.layers import RMSNorm
from qerl.model.load import full_spec
from qerl.model.policy import Policy
from qerl.model.source import Source, Weights
from qerl.quant.packed import Format

_LINEARS = {f"{name}.weight" for names in GROUPS.values() for name in names}


def quantized_policy(
    source: Source,
    format: Format,
    method: Method,
    tokens: Int[Tensor, "n T"] | None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Policy, list[Row]]:
    """The policy without adapters, and the report with a row a linear.

    Args:
        source: of the dense weights.
        format: of the linears.
        method: how codes and scales are chosen.
        tokens: calibration sequences. Data-free methods only report output errors on them.
        device: of the layers and the policy.
        dtype: compute dtype.
        progress: told layers done and all.

    Raises:
        ValueError: a tensor is missing, or a calibrated method gets no tokens.
    """
    spec, weights = full_spec(source), source.weights()
    embed = weights.get("model.embed_tokens.weight").to(device, dtype)
    calibration = None
    if tokens is not None:
        calibration = StreamedCalibration(spec, embed, tokens, dtype=dtype)
    layers, rows = [], list[Row]()
    for index in range(spec.layers):
        dense = layer_weights(weights, index, device)
        inputs = calibration.inputs(dense) if calibration else None
        quantised = method.quantize(dense, format, inputs)
        rows += layer_rows(dense, quantised, inputs)
        if calibration is not None:
            calibration.advance(quantised)
        layers.append(quantized_layer(spec, quantised, dtype))
        progress(index + 1, spec.layers)
    norm = RMSNorm(weights.get("model.norm.weight").to(device), spec.rms_eps)
    head = None if spec.tied else weights.get("lm_head.weight").to(device, dtype)
    return Policy(Decoder(spec, embed, layers, norm, head), None), rows


def layer_weights(weights: Weights, index: int, device: torch.device | str) -> LayerWeights:
    """The dense tensors of a decoder layer, on the device."""
    prefix = f"model.layers.{index}."
    names = [name for name in weights.names() if name.startswith(prefix)]
    tensors: Mapping[str, Tensor] = {
        name.removeprefix(prefix): weights.get(name).to(device) for name in names
    }
    absent = sorted(_LINEARS - tensors.keys())
    if absent:
        raise ValueError(f"layer {index}: the checkpoint has no tensor {prefix}{absent[0]}")
    return LayerWeights(index=index, tensors=tensors)
