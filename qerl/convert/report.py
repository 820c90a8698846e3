"""What quantisation did to each linear: SQNR of its weights, relative error of its outputs.

SQNR          = 10 log10(|W|² / |W - W'|²) dB
output error  = |X W'ᵀ - X Wᵀ| / |X Wᵀ|,  over the calibration inputs X, by way of XᵀX
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from qerl.convert.method import (
    GROUPS,
    LayerInputs,
    LayerWeights,
    QuantizedLayer,
    Row,
    sqnr_db,
)
from qerl.quant.awq import output_energy, output_error
from qerl.quant.packed import PackedWeight

VERSION = 1
"""Of the document."""


def linear_rows(
    layer: LayerWeights, linears: Mapping[str, PackedWeight], inputs: LayerInputs | None
) -> list[Row]:
    """One row a linear: ``layer``, ``linear``, ``sqnr_db`` and, with inputs, ``output_error``.

    An SQNR of an exact weight and an error of outputs that are all 0 are None.
    """
    rows: list[Row] = []
    for group, names in GROUPS.items():
        for name in names:
            dense, packed = layer.linear(name), linears[name]
            sqnr = sqnr_db(dense, packed)
            row: dict[str, object] = {"layer": layer.index, "linear": name}
            row["sqnr_db"] = sqnr if math.isfinite(sqnr) else None
            if inputs is not None:
                moment = inputs.second_moment[group]
                energy = output_energy(dense, moment)
                error = output_error(dense, packed, moment)
                row["output_error"] = math.sqrt(error / energy) if energy else None
            rows.append(row)
    return rows


def layer_rows(
    layer: LayerWeights, quantized: QuantizedLayer, inputs: LayerInputs | None
) -> list[Row]:
    """The rows of a quantised layer, with output errors where there are inputs."""
    rows = list(quantized.rows)
    if inputs is not None and not all("output_error" in row for row in rows):
        return linear_rows(layer, quantized.linears, inputs)
    return rows


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Means over all linears, and the worst of them; None and infinite values are left out."""
    figures: dict[str, float] = {}
    for measure, unit, worst in (("sqnr", "_db", min), ("output_error", "", max)):
        found = [row.get(measure + unit) for row in rows]
        values = [float(v) for v in found if isinstance(v, int | float) and math.isfinite(v)]
        if values:
            figures[f"{measure}_mean{unit}"] = fmean(values)
            figures[f"{measure}_worst{unit}"] = worst(values)
    return figures


def document(
    rows: Sequence[Row], *, model: str, format: str, method: str, **facts: Any
) -> dict[str, Any]:
    """The report as a JSON object: schema version, what was done, summary, a row a linear."""
    return {
        "schema": VERSION,
        "kind": "quantisation",
        "model": model,
        "format": format,
        "method": method,
        **facts,
        "summary": summary(rows),
        "rows": [dict(row) for row in rows],
    }
