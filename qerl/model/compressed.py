"""What compressed-tensors calls things: the tensors of a packed linear, and its config, both ways.

==================  =============================  ============================================
here                compressed-tensors             relation
==================  =============================  ============================================
``codes``           ``weight_packed``              the same bytes; low nibble = even column
``block_scale``     ``weight_scale``               the same bytes: E4M3, or E8M0 for MXFP4
``tensor_scale``    ``weight_global_scale`` [1]    NVFP4 only; each is the reciprocal of the other
==================  =============================  ============================================

A linear that is not quantised stores ``weight``. Source: compressed-tensors 0.20.1, formats
``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized``.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.model.shards import module_names
from qerl.quant.e2m1 import E2M1_MAX
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nvfp4 import E4M3_MAX, NVFP4
from qerl.quant.packed import Format, PackedWeight

METHOD = "compressed-tensors"
"""``quant_method`` of the config."""

VERSION = "0.20.1"
"""The release whose config is written."""

FORMATS: Mapping[str, Format] = {
    "nvfp4-pack-quantized": NVFP4(),
    "mxfp4-pack-quantized": MXFP4(),
}

_FORMAT_NAMES = {format.name: name for name, format in FORMATS.items()}

PARTS: Mapping[str, Mapping[str, str]] = {
    "nvfp4": {
        "codes": "weight_packed",
        "block_scale": "weight_scale",
        "tensor_scale": "weight_global_scale",
    },
    "mxfp4": {"codes": "weight_packed", "block_scale": "weight_scale"},
    "bf16": {"weight": "weight"},
}
"""Names of a linear's stored tensors: format, then ours to theirs."""

_WEIGHTS: Mapping[str, Mapping[str, Any]] = {
    "nvfp4": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": "torch.float8_e4m3fn",
    },
    "mxfp4": {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    },
}
"""The ``weights`` of a config group: the presets NVFP4A16 and MXFP4A16."""


def stored(packed: PackedWeight) -> dict[str, Tensor]:
    """The tensors of a linear as compressed-tensors names them, without the linear's own name.

    Raises:
        ValueError: for a format that compressed-tensors does not store.
    """
    names = _parts(packed.format)
    tensors = {theirs: packed.tensors[ours] for ours, theirs in names.items()}
    if "weight_global_scale" in tensors:
        scale = tensors["weight_global_scale"]
        tensors["weight_global_scale"] = global_scale(scale).reshape(1)
    return tensors


def packed(
    tensors: Mapping[str, Tensor], format: Format, shape: tuple[int, int] | None = None
) -> PackedWeight:
    """The weight that `stored` tensors hold.

    Args:
        tensors: of one linear, by names without the linear's own; others than those of the format
            are left aside.
        format: NVFP4, MXFP4 or BF16.
        shape: (N, K) that the weight must have; None takes that of the tensors.

    Raises:
        ValueError: for missing tensors and for shapes or dtypes that are not the format's.
    """
    names = _parts(format)
    absent = [theirs for theirs in names.values() if theirs not in tensors]
    if absent:
        stores = ", ".join(names.values())
        raise ValueError(f"no {', '.join(absent)}: {format.name} stores {stores}")
    own = {ours: tensors[theirs] for ours, theirs in names.items()}
    if "tensor_scale" in own:
        own["tensor_scale"] = tensor_scale(own["tensor_scale"])
    if shape is None:
        rows, columns = own["weight" if format.name == "bf16" else "codes"].shape
        shape = (rows, columns if format.name == "bf16" else 2 * columns)
    return PackedWeight(
        format=format, shape=shape, tensors={ours: t.contiguous() for ours, t in own.items()}
    )


def tensor_scale(global_scale: Float[Tensor, "*one"]) -> Float[Tensor, ""]:
    """1 / ``weight_global_scale``, the factor of the whole matrix.

    Raises:
        ValueError: for several values, another dtype, or one that is no positive finite number.
    """
    if global_scale.numel() != 1 or global_scale.dtype != torch.float32:
        raise ValueError(
            f"weight_global_scale {list(global_scale.shape)} {global_scale.dtype}: a linear has "
            "one in float32"
        )
    value = global_scale.reshape(())
    if not (value.isfinite() and value > 0):
        raise ValueError(f"weight_global_scale {value.item()}: a positive finite number is needed")
    return 1.0 / value


def global_scale(tensor_scale: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """``weight_global_scale``: an fp32 g with 1 / g = `tensor_scale`, where there is one.

    Where two have that reciprocal, it is the one that compressed-tensors makes of the largest |w|
    in bf16 or fp16, g = 448 * 6 / |w|. A scale of other making may have none; then g is nearest.
    """
    nearest = 1.0 / tensor_scale  # []
    above = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
    below = torch.nextafter(nearest, torch.zeros_like(nearest))
    found = [g for g in (nearest, above, below) if bool(1.0 / g == tensor_scale)]
    made = [g for g in found if bool(_from_half_precision(g) == g)]
    return (made or found or [nearest])[0]


def _from_half_precision(g: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """The g of the |w| nearest to that of `g` among numbers with 11 significant bits."""
    bits = (E4M3_MAX * E2M1_MAX / g).view(torch.int32) + (1 << 12)  # 13 of 24 bits are dropped
    # As NVFP4 and compressed-tensors divide; torch makes it a product with the reciprocal.
    return E4M3_MAX * E2M1_MAX / (bits & -(1 << 13)).view(torch.float32)


def quantization_config(format: Format, ignore: Collection[str]) -> dict[str, Any]:
    """``quantization_config`` of a ``config.json``: 4-bit weights, activations as they are.

    Args:
        format: of every linear that is not in `ignore`.
        ignore: names of linears that are stored dense, for example ``lm_head``; an entry
            ``re:<pattern>`` names all that match.

    Raises:
        ValueError: for a format that compressed-tensors does not store packed.
    """
    if format.name not in _WEIGHTS:
        raise ValueError(f"format {format.name}: {METHOD} packs {', '.join(_WEIGHTS)}")
    name = _FORMAT_NAMES[format.name]
    return {
        "quant_method": METHOD,
        "version": VERSION,
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": dict(_WEIGHTS[format.name]),
                "input_activations": None,
                "output_activations": None,
                "format": name,
            }
        },
        "ignore": sorted(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
    }


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether an ``ignore`` or ``targets`` list names the module: exactly, or by ``re:``."""
    return any(
        re.match(pattern[3:], name) if pattern.startswith("re:") else pattern == name
        for pattern in patterns
    )


def _parts(format: Format) -> Mapping[str, str]:
    if format.name not in PARTS:
        raise ValueError(
            f"format {format.name}: {METHOD} stores {', '.join(PARTS)}; choose one of these"
        )
    return PARTS[format.name]


_ASIDE = {
    "input_global_scale": "scales of activations, which stay in the compute dtype",
    "input_scale": "scales of activations, which stay in the compute dtype",
    "output_scale": "scales of activations, which stay in the compute dtype",
    "q_scale": "scales of the KV cache, which stays in the compute dtype",
    "k_scale": "scales of the KV cache, which stays in the compute dtype",
    "v_scale": "scales of the KV cache, which stays in the compute dtype",
}


@dataclass(frozen=True, kw_only=True)
class CompressedTensors:
    """A checkpoint of compressed-tensors, as its config describes it."""

    format: Format
    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    maker: ClassVar[str] = METHOD

    def is_dense(self, module: str) -> bool:
        """Whether no target names the linear, or the ignore list does."""
        targeted = "Linear" in self.targets or matches(module, self.targets)
        return not targeted or "Linear" in self.ignore or matches(module, self.ignore)

    def parts(self) -> tuple[str, ...]:
        """Codes and scales."""
        return tuple(PARTS[self.format.name].values())

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> PackedWeight:
        """The weight of one linear."""
        return packed(tensors, self.format, shape)

    def spare(self, tensor: str) -> str | None:
        """Scales of activations and of the KV cache."""
        return _ASIDE.get(tensor.rpartition(".")[2])


def read_config(config: Mapping[str, Any]) -> CompressedTensors:
    """What a ``quantization_config`` says.

    Raises:
        ValueError: for formats other than NVFP4 and MXFP4, several at once, weights that are not
            compressed, and rotations or sparsity.
        AttributeError, TypeError, re.error: for settings of other types than the library writes.
    """
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise ValueError(f"{METHOD} with quantization_status={status}: only compressed is read")
    rotations = (config.get("transform_config") or {}).get("config_groups")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if rotations or sparsity != "dense":
        what = f"sparsity {sparsity}" if sparsity != "dense" else "transform_config"
        raise ValueError(f"{METHOD} with {what}: not implemented; take a checkpoint without it")
    groups = (config.get("config_groups") or {}).values()
    groups = [group for group in groups if group.get("weights")]
    formats = {_group_format(group, config): None for group in groups}
    if len(formats) != 1:
        found = ", ".join(format.name for format in formats) or "none"
        raise ValueError(f"{METHOD} with weights in {found}: exactly one format is read")
    targets = tuple(name for group in groups for name in module_names(group, "targets"))
    ignore = module_names(config, "ignore")
    for name in targets + ignore:
        if name.startswith("re:"):
            re.compile(name[3:])
    return CompressedTensors(format=next(iter(formats)), targets=targets, ignore=ignore)


def _group_format(group: Mapping[str, Any], config: Mapping[str, Any]) -> Format:
    """The format of a config group's weights."""
    name = str(group.get("format") or config.get("format"))
    if name not in FORMATS:
        raise ValueError(f"{METHOD} format={name}: {', '.join(FORMATS)} are read")
    format = FORMATS[name]
    weights = group["weights"]
    for key in ("num_bits", "type", "group_size", "symmetric"):
        wanted = _WEIGHTS[format.name][key]
        if weights.get(key, wanted) != wanted:
            raise ValueError(f"{METHOD} {name} with {key}={weights[key]}: {wanted} is read")
    return format
