"""How packed linears lie in a GPU's memory: in tile order, and side by side where they share x.

Decode multiplies q, k, v at once, and gate, up at once. Their rows lie in one allocation, of which
each linear holds its part as a view: training and decode read the same bytes, and a stacked matrix
costs no memory. On Hopper, NVFP4, MXFP4 and NF4 are held in the order that the decode kernels read
(`TiledWeight`, `TiledNF4`), instead of the checkpoint's, never beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.kernels import layout_nf4
from qerl.kernels.launch import is_hopper
from qerl.kernels.layout import (
    COLS,
    ROWS,
    TiledWeight,
    from_packed,
    returns_whole,
    to_e4m3,
    to_e8m0,
    untile,
)
from qerl.kernels.layout_nf4 import Tiled, TiledNF4
from qerl.quant.packed import Format, PackedWeight, check_dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TiledPacked:
    """A packed weight that lies in tile order; everything else as `PackedWeight`."""

    format: Format

    tiled: Tiled

    kept: Mapping[str, Tensor] = field(default_factory=dict)
    """The checkpoint's tensors that tiles do not give back: NF4's absmax in 8 bits, whose fp32
    values several bytes may share."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.tiled.shape

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Copies of the checkpoint's tensors, made on each use: for hashes and exports."""
        if isinstance(self.tiled, TiledNF4):
            codes, absmax = layout_nf4.untile(self.tiled)
            return {"codes": codes, "absmax": absmax, **self.kept}
        codes, scales = untile(self.tiled)
        if self.format.name == "mxfp4":
            return {"codes": codes, "block_scale": to_e8m0(scales, self.tiled.tensor_scale)}
        return {
            "codes": codes,
            "block_scale": to_e4m3(scales).view(torch.float8_e4m3fn),
            "tensor_scale": self.tiled.tensor_scale[0].clone(),
        }

    @property
    def device(self) -> torch.device:
        return self.tiled.device

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return self.tiled.nbytes + sum(tensor.nbytes for tensor in self.kept.values())

    def dequantize(self, dtype: torch.dtype) -> Float[Tensor, "N K"]:
        """The weights that the bytes stand for, in `dtype`."""
        check_dtype(dtype)
        return self._rows_by_rows().dequantize(dtype)

    def matmul(self, x: Float[Tensor, "S K"]) -> Float[Tensor, "S N"]:
        """The product x Wᵀ, differentiable in x: unpacked by a kernel, used and dropped."""
        from qerl.kernels.dequant import frozen_linear  # triton, where nothing else needs it

        return frozen_linear(x, self.tiled)

    def to(self, device: torch.device | str) -> "TiledPacked | PackedWeight":
        """The same weight on `device`; in the checkpoint's order where that is another one."""
        there = torch.device(device)
        if there.type == self.device.type and there.index in (None, self.device.index):
            return self
        return self._rows_by_rows().to(device)

    def data_ptrs(self) -> dict[str, int]:
        """Address of each stored tensor."""
        stored = dict(zip(self.tiled.names, self.tiled.parts(), strict=True)) | dict(self.kept)
        return {name: tensor.data_ptr() for name, tensor in stored.items()}

    def _rows_by_rows(self) -> PackedWeight:
        return PackedWeight(format=self.format, shape=self.shape, tensors=self.tensors)


Packed = PackedWeight | TiledPacked
"""A frozen weight as it lies in memory."""


def settle(packed: Sequence[Packed], dtype: torch.dtype) -> list[Packed]:
    """Weights that multiply one x, as they shall lie in memory.

    On a CUDA device with bf16 compute, NVFP4, MXFP4 and NF4 go to tile order (Hopper; N % 32 == 0
    and K % 128 == 0, so that nothing is padded), where all take 4.5 bits a weight, and NF4 its
    8-bit absmax beside; bf16 stays as it is; all lie side by side. Everything else stays untouched,
    also linears of which a checkpoint leaves some dense. Each keeps its own tensor scale.
    """
    weights = [weight for weight in packed if isinstance(weight, PackedWeight)]
    if len(weights) < len(packed):
        return list(packed)  # settled already
    first = weights[0]
    if first.device.type != "cuda" or dtype != torch.bfloat16:
        return list(weights)
    if any(weight.format.name != first.format.name for weight in weights):
        return list(weights)
    if is_hopper(first.device) and _whole_tiles(weights) and all(map(_returns, weights)):
        return _tiled(weights)
    if first.format.name == "bf16" and len(weights) > 1:
        stacked = torch.cat([w.tensors["weight"] for w in weights])  # [sum N, K]
        parts = stacked.split([w.shape[0] for w in weights])
        return [
            PackedWeight(format=w.format, shape=w.shape, tensors={"weight": part})
            for w, part in zip(weights, parts, strict=True)
        ]
    return list(weights)


def _whole_tiles(weights: Sequence[PackedWeight]) -> bool:
    return all(w.shape[0] % ROWS == 0 and w.shape[1] % COLS == 0 for w in weights)


def _returns(packed: PackedWeight) -> bool:
    """Whether every byte can be had back from tile order; NF4 keeps what it could not."""
    return packed.format.name == "nf4" or returns_whole(packed)


def _tiled(weights: Sequence[PackedWeight]) -> list[Packed]:
    """Views of one stacked tiled weight: weights of one format, of whole tiles."""
    whole: Tiled
    if weights[0].format.name == "nf4":
        whole = TiledNF4.stack([layout_nf4.tile(weight) for weight in weights])
    else:
        whole = TiledWeight.stack([from_packed(weight) for weight in weights])
    counts = [weight.shape[0] // ROWS for weight in weights]
    parts = zip(*(tensor.split(counts) for tensor in whole.parts()), strict=True)
    return [
        TiledPacked(format=w.format, tiled=whole.of(w.shape, part), kept=_kept(w))
        for w, part in zip(weights, parts, strict=True)
    ]


def _kept(packed: PackedWeight) -> dict[str, Tensor]:
    """Its tensors that tiles do not give back."""
    double = "nested_absmax" in packed.tensors
    return {name: t for name, t in packed.tensors.items() if double and name != "codes"}


def stacked(weights: Sequence[Packed]) -> Tiled | Float[Tensor, "N K"] | None:
    """The one matrix that `settle` laid side by side, as a view; None where they lie apart."""
    if all(isinstance(w, TiledPacked) for w in weights):
        found = [w.tiled for w in weights if isinstance(w, TiledPacked)]
        if len({type(t) for t in found}) > 1:
            return None
        parts = [_joined(some) for some in zip(*(t.parts() for t in found), strict=True)]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            return None
        shape = (sum(w.shape[0] for w in weights), weights[0].shape[1])
        return found[0].of(shape, whole)
    if all(isinstance(w, PackedWeight) and w.format.name == "bf16" for w in weights):
        return _joined([w.tensors["weight"] for w in weights])
    return None


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor of which `parts` are the successive rows, or None."""
    first = parts[0]
    at = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.storage_offset() != at or part.stride() != first.stride():
            return None
        at += part.numel()
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
