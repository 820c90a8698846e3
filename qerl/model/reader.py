"""Takes tensors out of a checkpoint: checks them, packs them, and notes which were used."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from qerl.model.packing import Packing, linear_name
from qerl.model.source import Weights
from qerl.quant.bf16 import BF16
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import WEIGHT_DTYPES, Format, PackedWeight

logger = logging.getLogger(__name__)

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)
"""Linears that read the same input. Quantised here, they share a tensor scale, so that an engine
may fuse them; packed by others, each keeps its own."""

_CHUNK = 1 << 24  # weights looked at together


class Reader:
    """A checkpoint on its way to a device."""

    def __init__(
        self,
        name: str,
        weights: Weights,
        device: torch.device,
        packing: Packing | None = None,
    ) -> None:
        """Nothing is read yet.

        Args:
            name: of the source, for messages.
            weights: its checkpoint.
            device: where tensors go, and where dense linears are quantised.
            packing: how linears are stored; None where all are dense.
        """
        self.name = name
        self.packing = packing
        self._weights = weights
        self._all = frozenset(weights.names())
        self._left = set(self._all)
        self._device = device

    def stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor on the device, in the dtype of the checkpoint.

        Raises:
            ValueError: naming tensor and file where it is missing, of another shape, no weight, or
                not finite.
        """
        tensor = self._shaped(name, shape)
        check_finite(self._weights.entry(name).place, name, tensor)
        return tensor

    def _shaped(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As `stored`; values are left to whoever packs them."""
        if name not in self._all:
            raise ValueError(f"{self.name}: the checkpoint has no tensor {name}")
        entry = self._weights.entry(name)
        if entry.shape != shape:
            raise ValueError(
                f"{entry.place}: {name} is {list(entry.shape)}, the config says {list(shape)}; "
                "bring config and weights of one model"
            )
        if entry.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{entry.place}: {name} is {entry.dtype}, weights are float32, bfloat16 or "
                "float16; take another export of the model"
            )
        return self._take(name).to(self._device)

    def matrix(self, module: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Embedding or head, dense in `dtype`, also where the checkpoint has it packed."""
        if not self._is_packed(module):
            return self.stored(f"{module}.weight", shape).to(dtype)
        logger.info("%s: %s is packed; it is held dense", self.name, module)
        return self._packed(module, shape).dequantize(dtype)

    def linears(
        self, layer: int, names: Sequence[str], shapes: Sequence[tuple[int, int]], format: Format
    ) -> list[PackedWeight]:
        """Linears that share an input: as they are stored, else quantised together.

        Raises:
            ValueError: naming tensor and file where the checkpoint is not what its config says, or
                holds weights that the format cannot pack.
        """
        modules = [linear_name(layer, name) for name in names]
        if self.packing is None:
            return self._quantized(modules, shapes, format)
        return [
            self._linear(module, shape, self.packing, format)
            for module, shape in zip(modules, shapes, strict=True)
        ]

    def check_all_used(self, *, tied: bool) -> None:
        """Raise if a tensor of the checkpoint has no place in the model."""
        # Some exports repeat a tied head, and old ones store the rotary table.
        spare = {"lm_head.weight"} if tied else set()
        aside: Counter[str] = Counter()
        left = []
        for name in sorted(self._left - spare):
            reason = self.packing.spare(name) if self.packing is not None else None
            if reason is not None:
                aside[reason] += 1
            elif not name.endswith("rotary_emb.inv_freq"):
                left.append(name)
        for reason, count in aside.items():
            logger.info("%s: %d tensors left aside: %s", self.name, count, reason)
        if left:
            raise ValueError(
                f"{self.name}: {len(left)} tensors have no place in the model, first {left[0]} in "
                f"{self._weights.entry(left[0]).place}"
            )

    def _quantized(
        self, modules: Sequence[str], shapes: Sequence[tuple[int, int]], format: Format
    ) -> list[PackedWeight]:
        """Dense linears under one tensor scale."""
        dense = [
            self._shaped(f"{module}.weight", shape)
            for module, shape in zip(modules, shapes, strict=True)
        ]
        try:
            return format.quantize_fused(dense)
        except ValueError:
            for module, weight in zip(modules, dense, strict=True):
                self._named(f"{module}.weight", partial(format.quantize, weight))
            raise

    def _linear(
        self, module: str, shape: tuple[int, int], packing: Packing, format: Format
    ) -> PackedWeight:
        """One linear of a packed checkpoint."""
        if packing.is_dense(module):
            self._check_stored(module, packed=False)
            weight = self._shaped(f"{module}.weight", shape)
            return self._named(f"{module}.weight", partial(BF16().quantize, weight))
        self._check_stored(module, packed=True)
        packed = self._packed(module, shape)
        if isinstance(format, NVFP4) and format.power_of_two_scale:
            scale = packed.tensors["tensor_scale"]
            if bool(torch.frexp(scale).mantissa != 0.5):
                raise ValueError(
                    f"quant.power_of_two_scale=true: {module} in {self.name} has the tensor scale "
                    f"{scale.item():.6g}; set quant.power_of_two_scale=false"
                )
        return packed

    def _check_stored(self, module: str, *, packed: bool) -> None:
        """Raise unless the checkpoint stores a linear as its config says."""
        if packed == self._is_packed(module):
            return
        there = sorted(name for name in self._all if name.startswith(f"{module}.weight"))
        if not there or self.packing is None:
            return  # the missing tensor is named where it is read
        raise ValueError(
            f"{self._weights.entry(there[0]).place}: {module} is stored "
            f"{'dense' if packed else 'packed'}, but the config of {self.packing.maker} "
            f"{'does not leave' if packed else 'leaves'} it dense; bring config and weights of one "
            "model"
        )

    def _is_packed(self, module: str) -> bool:
        """Whether the checkpoint has scales for a linear."""
        if self.packing is None:
            return False
        own = [part for part in self.packing.parts() if part != "weight"]
        return any(f"{module}.{part}" in self._all for part in own)

    def _packed(self, module: str, shape: tuple[int, int]) -> PackedWeight:
        """A packed linear on the device."""
        assert self.packing is not None
        packing, tensors = self.packing, {}
        for part in packing.parts():
            name = f"{module}.{part}"
            if name not in self._all:
                raise ValueError(
                    f"{self.name}: the checkpoint has no tensor {name}, which {packing.maker} "
                    f"stores for {packing.format.name}"
                )
            tensors[part] = self._take(name)

        def read() -> PackedWeight:
            packed = packing.read(shape, tensors)
            _check_scales(packed)
            return packed

        return self._named(f"{module}.{packing.parts()[0]}", read).to(self._device)

    def _named(self, tensor: str, make: Callable[[], PackedWeight]) -> PackedWeight:
        """What `make` gives; its errors with file and tensor."""
        try:
            return make()
        except ValueError as error:
            raise ValueError(f"{self._weights.entry(tensor).place}: {tensor}: {error}") from None

    def _take(self, name: str) -> Tensor:
        self._left.discard(name)
        return self._weights.get(name)


def check_finite(place: str, name: str, tensor: Tensor) -> None:
    """Raise for a tensor with NaN or Inf, naming its place, its name and the first such value."""
    for at, chunk in enumerate(tensor.flatten().split(_CHUNK)):
        wrong = ~chunk.isfinite()
        if wrong.any():
            first = at * _CHUNK + int(wrong.nonzero()[0])
            index = [int(i) for i in torch.unravel_index(torch.tensor(first), tensor.shape)]
            raise ValueError(
                f"{place}: {name} is {float(chunk[wrong][0])} at {index}; bring the file again, or "
                "another checkpoint"
            )


def _check_scales(packed: PackedWeight) -> None:
    """Raise for scales that are NaN, infinite or negative: no format makes them."""
    for name, tensor in packed.tensors.items():
        if tensor.dtype == torch.uint8:
            is_e8m0 = packed.format.name == "mxfp4" and name == "block_scale"
            wrong = is_e8m0 and bool((tensor == 255).any())  # its NaN
        else:
            values = tensor.float()
            wrong = not bool(values.isfinite().all() and (values >= 0).all())
        if wrong:
            raise ValueError(
                f"{name} holds NaN, infinite or negative values; the checkpoint is damaged"
            )
