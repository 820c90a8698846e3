"""bitsandbytes' NF4: names of a linear's tensors as transformers saves them, and their config.

===================  ==========================================  ================================
here                 bitsandbytes                                relation
===================  ==========================================  ================================
``codes``            ``weight`` [N K / 2, 1]                     the same bytes
``absmax``           ``weight.absmax`` [N K / 64]                the same bytes
``nested_absmax``    ``weight.nested_absmax``                    the same, with double quantisation
``nested_offset``    in ``weight.quant_state.bitsandbytes__nf4`` the same number, as JSON
===================  ==========================================  ================================

``weight.quant_map`` and ``weight.nested_quant_map`` are tables that must be those of
`qerl.quant.nf4`. Source: bitsandbytes 0.50, ``QuantState.as_dict(packed=True)``.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qerl.model.shards import module_names
from qerl.quant.nf4 import BLOCK_SIZE, NESTED_BLOCK_SIZE, NF4, NF4_VALUES, dynamic_values
from qerl.quant.packed import PackedWeight

METHOD = "bitsandbytes"
"""``quant_method`` of the config."""

_STATE = "weight.quant_state.bitsandbytes__nf4"
_PLAIN = ("weight", "weight.absmax", "weight.quant_map", _STATE)
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


@dataclass(frozen=True, kw_only=True)
class BitsAndBytes:
    """A 4-bit checkpoint of transformers with bitsandbytes, as its config describes it."""

    format: NF4

    skip: tuple[str, ...]
    """``llm_int8_skip_modules``: modules that are dense."""

    maker: ClassVar[str] = METHOD

    def is_dense(self, module: str) -> bool:
        """Whether an entry is the linear, a module around it, a pattern of it or its last part."""
        # As transformers 5.24 decides, `should_convert_module`.
        boundary = r"(?:(?<=\.)|(?=\.|$))"
        return any(
            re.match(rf"(?:{entry}){boundary}", module) or module.endswith(entry)
            for entry in self.skip
        )

    def parts(self) -> tuple[str, ...]:
        """Codes, scales, tables and the state that says how to read them."""
        return _PLAIN + _NESTED if self.format.double_quant else _PLAIN

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> PackedWeight:
        """The weight of one linear."""
        state = _read_state(tensors[_STATE])
        _check_state(state, shape, double_quant=self.format.double_quant)
        _check_table("quant_map", tensors["weight.quant_map"], torch.tensor(NF4_VALUES))
        rows, blocks = shape[0], shape[1] // BLOCK_SIZE
        # Under FSDP the bytes are stored as numbers of a wider dtype.
        codes = tensors["weight"].contiguous().flatten().view(torch.uint8)
        absmax = tensors["weight.absmax"]
        if codes.numel() != rows * shape[1] // 2 or absmax.numel() != rows * blocks:
            raise ValueError(
                f"weight of {codes.numel()} bytes, absmax of {absmax.numel()} values: a weight "
                f"{list(shape)} has {rows * shape[1] // 2} and {rows * blocks}"
            )
        own = {
            "codes": codes.view(rows, shape[1] // 2),
            "absmax": absmax.contiguous().view(rows, blocks),
        }
        if self.format.double_quant:
            table = dynamic_values(torch.device("cpu"))
            _check_table("nested_quant_map", tensors["weight.nested_quant_map"], table)
            own["nested_absmax"] = tensors["weight.nested_absmax"].contiguous()
            own["nested_offset"] = torch.tensor(state["nested_offset"], dtype=torch.float32)
        return PackedWeight(format=self.format, shape=shape, tensors=own)

    def spare(self, tensor: str) -> str | None:
        """Nothing: every tensor has its use."""
        return None


def _read_state(stored: Tensor) -> Mapping[str, Any]:
    """A linear's own record, which is JSON in bytes."""
    try:
        state = json.loads(bytes(stored.tolist())) if stored.dtype == torch.uint8 else None
    except ValueError:  # neither JSON nor text
        state = None
    if not isinstance(state, dict):
        raise ValueError(
            f"quant_state {list(stored.shape)} {stored.dtype}: no JSON object in uint8; "
            "bring the file again"
        )
    return state


def _check_state(state: Mapping[str, Any], shape: tuple[int, int], *, double_quant: bool) -> None:
    """Raise unless a linear's own record says what the config and the model say."""
    wanted: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": BLOCK_SIZE,
        "shape": list(shape),
        "nested_blocksize": NESTED_BLOCK_SIZE if double_quant else None,
        "nested_dtype": "float32" if double_quant else None,
    }
    for key, value in wanted.items():
        if state.get(key) != value:
            raise ValueError(f"quant_state {key}={state.get(key)}: {value} is read")


def _check_table(name: str, table: Tensor, wanted: Tensor) -> None:
    if table.shape != wanted.shape or not torch.equal(table.float(), wanted):
        raise ValueError(f"{name} is not the table of NF4 with these values; only that is read")


def read_config(config: Mapping[str, Any]) -> BitsAndBytes:
    """What a ``quantization_config`` says.

    Raises:
        ValueError: for 8-bit weights and for FP4.
        TypeError, re.error: for skipped modules that are no list of patterns.
    """
    kind = config.get("bnb_4bit_quant_type", "fp4")
    if not (config.get("load_in_4bit") or config.get("_load_in_4bit")):
        raise ValueError(f"{METHOD} without load_in_4bit: only 4-bit weights are read")
    if kind != "nf4":
        raise ValueError(f"{METHOD} bnb_4bit_quant_type={kind}: nf4 is read")
    skip = module_names(config, "llm_int8_skip_modules")
    for entry in skip:
        re.compile(entry)
    return BitsAndBytes(
        format=NF4(double_quant=bool(config.get("bnb_4bit_use_double_quant", False))),
        skip=skip,
    )
