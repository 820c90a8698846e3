"""NVIDIA ModelOpt's NVFP4: names of a linear's tensors, and the config beside them.

==================  ==========================  ===============================================
here                ModelOpt                    relation
==================  ==========================  ===============================================
``codes``           ``weight``                  the same bytes [N, K/2]; low nibble = even column
``block_scale``     ``weight_scale``            the same bytes [N, K/16], E4M3
``tensor_scale``    ``weight_scale_2``          the same number: both multiply
==================  ==========================  ===============================================

The config is ``hf_quant_config.json``, in newer releases also the ``quantization_config`` of
``config.json``. Source: nvidia-modelopt 0.47, ``export_hf_checkpoint``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from qerl.model.shards import json_object, module_names
from qerl.quant.nvfp4 import BLOCK_SIZE, NVFP4
from qerl.quant.packed import Format, PackedWeight

METHOD = "modelopt"
"""``quant_method`` of the config."""

CONFIG_FILE = "hf_quant_config.json"

ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ")
"""What is read of ``quant_algo``: the weights are the same in all, AWQ's scales folded in."""

_ACTIVATIONS = "scales of activations, which stay in the compute dtype"
_KV_CACHE = "scales of the KV cache, which stays in the compute dtype"
_ASIDE = {"input_scale": _ACTIVATIONS, "k_scale": _KV_CACHE, "v_scale": _KV_CACHE}


@dataclass(frozen=True, kw_only=True)
class ModelOpt:
    """A checkpoint of ModelOpt, as its config describes it."""

    exclude: tuple[str, ...]
    """Names of modules that are dense, with the wildcards of `fnmatch`."""

    maker: ClassVar[str] = METHOD
    format: ClassVar[Format] = NVFP4()

    def is_dense(self, module: str) -> bool:
        """Whether an entry names the linear or a module around it."""
        return any(
            fnmatchcase(module, pattern) or module.startswith(f"{pattern}.")
            for pattern in self.exclude
        )

    def parts(self) -> tuple[str, ...]:
        """Codes and scales."""
        return ("weight", "weight_scale", "weight_scale_2")

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> PackedWeight:
        """The weight of one linear."""
        scale = tensors["weight_scale_2"]
        if scale.numel() != 1 or scale.dtype != torch.float32:
            raise ValueError(
                f"weight_scale_2 {list(scale.shape)} {scale.dtype}: a linear has one in float32"
            )
        return PackedWeight(
            format=self.format,
            shape=shape,
            tensors={
                "codes": tensors["weight"].contiguous(),
                "block_scale": tensors["weight_scale"].contiguous(),
                "tensor_scale": scale.reshape(()),
            },
        )

    def spare(self, tensor: str) -> str | None:
        """Scales of activations and of the KV cache."""
        last = tensor.rpartition(".")[2]
        if last == "pre_quant_scale":
            raise ValueError(
                f"{tensor}: scales of a linear's input that are not folded into the layer before "
                "it (AWQ, SVDQuant) are not implemented; export without them, or quantise the "
                "original weights here"
            )
        return _ASIDE.get(last)


def config_of(folder: Path) -> dict[str, Any] | None:
    """The ``quantization_config`` that a folder's own file gives; None where there is none.

    Raises:
        ValueError: the file cannot be read.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return None
    settings = (json_object(path) or {}).get("quantization")
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: no quantization with settings; bring the file again")
    return {"quant_method": METHOD, **settings}


def read_config(config: Mapping[str, Any]) -> ModelOpt:
    """What either form of the config says.

    Raises:
        ValueError: for algorithms other than NVFP4.
        TypeError: for excluded modules that are no list of names.
    """
    algorithm = config.get("quant_algo")
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"{METHOD} quant_algo={algorithm}: {', '.join(ALGORITHMS)} are read; take one of "
            "these, or the original bf16 weights"
        )
    size = config.get("group_size") or BLOCK_SIZE
    if size != BLOCK_SIZE:
        raise ValueError(f"{METHOD} {algorithm} with group_size={size}: {BLOCK_SIZE} is read")
    return ModelOpt(exclude=module_names(config, "exclude_modules", "ignore"))
