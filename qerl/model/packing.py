"""How a checkpoint that others quantised stores its linears, read from its config.

Which linears are packed is the checkpoint's own choice (``ignore``, ``exclude_modules``,
``llm_int8_skip_modules``); those it leaves dense stay dense here too. Every linear keeps its own
tensor scale, also where linears read the same input. Activations are never quantised: a policy and
its sampler compute with them in the compute dtype, whatever the config says of them.
"""

import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PretrainedConfig

from qerl.model import bnb, compressed, modelopt
from qerl.model.shards import CHECKSUMS, json_object
from qerl.model.spec import LINEARS, Geometry
from qerl.quant.bf16 import BF16
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format, PackedWeight


class Packing(Protocol):
    """How the linears of a quantised checkpoint are stored."""

    @property
    def maker(self) -> str:
        """The library whose names these are."""
        ...

    @property
    def format(self) -> Format:
        """Of the packed linears."""
        ...

    def is_dense(self, module: str) -> bool:
        """Whether the config leaves a linear as it was, by its full name without ``.weight``."""
        ...

    def parts(self) -> tuple[str, ...]:
        """The tensors of a packed linear, by their names after the linear's own and a dot."""
        ...

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> PackedWeight:
        """The weight [N, K] that the tensors of `parts` hold.

        Raises:
            ValueError: where they are of other shapes, dtypes or tables than the format's.
        """
        ...

    def spare(self, tensor: str) -> str | None:
        """Why a tensor, by its full name, has no use here; None where it has one."""
        ...


_MAKERS: Mapping[str, Callable[[Mapping[str, Any]], Packing]] = {
    compressed.METHOD: compressed.read_config,
    modelopt.METHOD: modelopt.read_config,
    bnb.METHOD: bnb.read_config,
}

_AGAIN = "bring config.json again"


def read_packing(config: PretrainedConfig) -> Packing | None:
    """How the linears of a checkpoint are stored; None where they are dense.

    Raises:
        ValueError: for a quantisation that is not read here, or settings of other types than
            its library writes.
    """
    settings = config.to_dict().get("quantization_config")
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise ValueError(f"quantization_config={settings!r} is no table of settings; {_AGAIN}")
    method = str(settings.get("quant_method"))
    if method not in _MAKERS:
        raise ValueError(
            f"checkpoint quantised by quant_method={method}: {', '.join(_MAKERS)} are read; "
            "take one of these, or the original bf16 weights"
        )
    try:
        return _MAKERS[method](settings)
    except (AttributeError, TypeError, re.error) as error:
        # values of another type than the library writes; each reader checks those it knows
        own = f", or {modelopt.CONFIG_FILE} where that holds it" * (method == modelopt.METHOD)
        raise ValueError(
            f"quantization_config of {method} is not as its library writes it "
            f"({type(error).__name__}: {error}); {_AGAIN}{own}"
        ) from error


def check_quant(
    name: str, packing: Packing | None, format: Format, folder: Path | None = None
) -> None:
    """Raise unless ``quant=`` is what the checkpoint holds.

    Args:
        name: of the source.
        packing: of its checkpoint.
        format: that ``quant=`` gives.
        folder: of the checkpoint, where it may say by which method it was made.

    Raises:
        ValueError: naming both, and the override that works.
    """
    if packing is None:
        return
    holds = f"{name} holds {packing.format.name} of {packing.maker}"
    if packing.format.name != format.name:
        raise ValueError(
            f"quant={format.name}: {holds}, and is not quantised again; set quant="
            f"{packing.format.name}, or bring the original bf16 weights"
        )
    theirs, ours = packing.format, format
    if isinstance(theirs, NF4) and isinstance(ours, NF4) and theirs != ours:
        has = "in 8 bits" if theirs.double_quant else "in fp32"
        raise ValueError(
            f"quant.double_quant={str(ours.double_quant).lower()}: {holds} with absmax {has}; "
            f"set quant.double_quant={str(theirs.double_quant).lower()}"
        )
    made = _made(folder)
    method = made.get("method", {}).get("name")
    if isinstance(ours, NVFP4 | MXFP4) and method not in (None, ours.method):
        raise ValueError(
            f"quant.method={ours.method}: {holds}, packed by {method}; set quant.method={method}"
        )
    power = made.get("format", {}).get("power_of_two_scale")
    if isinstance(ours, NVFP4) and power not in (None, ours.power_of_two_scale):
        raise ValueError(
            f"quant.power_of_two_scale={str(ours.power_of_two_scale).lower()}: {holds}, packed "
            f"with {str(power).lower()}; set quant.power_of_two_scale={str(power).lower()}"
        )


def _made(folder: Path | None) -> Mapping[str, Any]:
    """The settings by which scripts/quantize.py made a folder; none for all others."""
    if folder is None or not (folder / CHECKSUMS).is_file():
        return {}
    settings = (json_object(folder / CHECKSUMS) or {}).get("settings")
    return settings if isinstance(settings, dict) else {}  # others may have such a file too


def linear_format(module: str, packing: Packing | None, format: Format) -> Format:
    """The format in which one linear is held."""
    return BF16() if packing is not None and packing.is_dense(module) else format


def linear_bytes(geometry: Geometry, packing: Packing | None, format: Format) -> int:
    """Bytes of all linears of a model, scales included."""
    total = 0
    for layer in range(geometry.layers):
        for name, shape in geometry.linear_shapes().items():
            held = linear_format(linear_name(layer, name), packing, format)
            total += sum(prod(size) * dtype.itemsize for size, dtype in held.layout(shape).values())
    return total


def linear_name(layer: int, name: str) -> str:
    """The full name of a linear in a checkpoint, for example of ``q_proj``."""
    block = "self_attn" if LINEARS.index(name) < LINEARS.index("gate_proj") else "mlp"
    return f"model.layers.{layer}.{block}.{name}"
