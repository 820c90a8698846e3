"""PackedWeight: codes and scales, one object for trainer and engine; its byte count.

A format says what the bytes mean, ``w = value(code) * scale(block)``; a packed weight is the bytes.
Blocks run along K, the input axis of ``y = x Wᵀ``, so that one row's scales lie beside each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each stored tensor, by name."""

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What a format reads and what it dequantises to."""

# Weights handled at a time. A CPU chunk's fp32 copy (1 MiB) and its scratch stay in a core's L2
# and L3; a GPU chunk is long enough to hide kernel launches and its scratch stays under 0.5 GiB.
CHUNK_WEIGHTS = {"cpu": 1 << 18, "cuda": 1 << 24}


@runtime_checkable
class Format(Protocol):
    """How weights become bytes and back. Implementations are frozen dataclasses."""

    @property
    def name(self) -> str:
        """The option's name: ``nvfp4``, ``mxfp4``, ``nf4`` or ``bf16``."""
        ...

    @property
    def block_size(self) -> int:
        """Weights per scale along K; 1 where there is no scale."""
        ...

    @property
    def bits_per_weight(self) -> float:
        """Stored bits a weight, scales included; without the few bytes that are per tensor."""
        ...

    def layout(self, shape: tuple[int, int]) -> Layout:
        """The stored tensors of an [N, K] weight. `shape` must divide into blocks."""
        ...

    def quantize(self, weight: Float[Tensor, "N K"]) -> "PackedWeight":
        """Pack one weight, on the device it is on.

        Raises:
            ValueError: `weight` is no finite [N, K] matrix in fp32, bf16 or fp16, or K does not
                divide into blocks.
        """
        ...

    def quantize_fused(self, weights: Sequence[Float[Tensor, "_ K"]]) -> "list[PackedWeight]":
        """Pack weights that one fused matmul reads (q/k/v, gate/up) under one tensor scale.

        A format without a tensor scale packs each on its own.
        """
        ...

    def dequantize(self, packed: "PackedWeight", dtype: torch.dtype) -> Float[Tensor, "N K"]:
        """The weights that the bytes stand for, computed in fp32 and rounded to `dtype`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedWeight:
    """An [N, K] weight as its format stores it. Immutable; compared by identity."""

    format: Format

    shape: tuple[int, int]
    """(N, K) = (output features, input features)."""

    tensors: Mapping[str, Tensor]
    """Codes and scales by the names in `format.layout`; contiguous, all on one device."""

    def __post_init__(self) -> None:
        check_shape(self.shape, self.format.block_size, self.format.name)
        layout = self.format.layout(self.shape)
        if set(self.tensors) != set(layout):
            raise ValueError(
                f"{self.format.name} tensors {sorted(self.tensors)}: exactly {sorted(layout)} are "
                "expected; rename them where they are loaded"
            )
        for name, (shape, dtype) in layout.items():
            tensor = self.tensors[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"{self.format.name} {name} {tuple(tensor.shape)} {tensor.dtype}: a weight "
                    f"{self.shape} stores {shape} {dtype}; reshape it where it is loaded"
                )
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{self.format.name} {name} with strides {tensor.stride()}: kernels read it "
                    "contiguously; call .contiguous() on it"
                )
        devices = sorted({str(tensor.device) for tensor in self.tensors.values()})
        if len(devices) != 1:
            raise ValueError(
                f"{self.format.name} tensors on {devices}: a packed weight lives on one device; "
                "move it whole with .to(device)"
            )

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def dequantize(self, dtype: torch.dtype) -> Float[Tensor, "N K"]:
        """The weights that the bytes stand for, in `dtype`; may alias them if stored as such."""
        return self.format.dequantize(self, dtype)

    def to(self, device: torch.device | str) -> "PackedWeight":
        """The same bytes on `device`; tensors that are there already are not copied."""
        return PackedWeight(
            format=self.format,
            shape=self.shape,
            tensors={name: tensor.to(device) for name, tensor in self.tensors.items()},
        )

    def data_ptrs(self) -> dict[str, int]:
        """Address of each tensor: equal ones prove that two owners share the bytes."""
        return {name: tensor.data_ptr() for name, tensor in self.tensors.items()}


def check_shape(shape: tuple[int, ...], block_size: int, name: str) -> None:
    """Raise ValueError unless `shape` is a non-empty (N, K) whose K divides into blocks."""
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"weight shape {tuple(shape)}: {name} packs non-empty [N, K] matrices; "
            "keep other parameters in bf16"
        )
    if shape[1] % block_size:
        raise ValueError(
            f"K={shape[1]}: {name} needs a multiple of its block of {block_size}; "
            "keep this layer in bf16 (quant=bf16) or pad K"
        )


def check_weights(weights: Sequence[Tensor], block_size: int, name: str) -> None:
    """Raise ValueError unless every weight is a floating [N, K] on one device with one K."""
    if not weights:
        raise ValueError(f"0 weights: {name} needs at least 1 to pack; pass the layer's weights")
    for weight in weights:
        check_shape(weight.shape, block_size, name)
        if weight.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"weight dtype {weight.dtype}: {name} reads float32, bfloat16 or float16; "
                "convert it with .float()"
            )
    widths = sorted({weight.shape[1] for weight in weights})
    devices = sorted({str(weight.device) for weight in weights})
    if len(widths) != 1 or len(devices) != 1:
        raise ValueError(
            f"fused weights with K={widths} on {devices}: they multiply one input, so K and device "
            "are one; fuse only q/k/v or gate/up of one layer"
        )


def check_dtype(dtype: torch.dtype) -> None:
    """Raise ValueError unless `dtype` is one that weights are dequantised to."""
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(
            f"dtype={dtype}: weights are dequantised to float32, bfloat16 or float16; "
            "convert the result yourself for another"
        )


def row_chunks(shape: tuple[int, int], device: torch.device) -> Iterator[slice]:
    """Slices of whole rows, about `CHUNK_WEIGHTS` weights each, that cover [N, K]."""
    rows, columns = shape
    step = max(1, CHUNK_WEIGHTS.get(device.type, CHUNK_WEIGHTS["cpu"]) // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def block_amax(
    weight: Float[Tensor, "N K"], block_size: int, name: str
) -> Float[Tensor, "N blocks"]:
    """Largest |w| of every block along K, fp32.

    Raises:
        ValueError: a weight is NaN or infinite; a scale made from it would spoil its block.
    """
    amax = torch.empty(
        weight.shape[0], weight.shape[1] // block_size, dtype=torch.float32, device=weight.device
    )
    for rows in row_chunks((weight.shape[0], weight.shape[1]), weight.device):
        chunk = weight[rows].float().unflatten(1, (-1, block_size))  # [n, K/block, block]
        torch.amax(chunk.abs(), -1, out=amax[rows])
    finite = amax.isfinite().all(1)  # [N]
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise ValueError(
            f"weight row {row} ({int((~finite).sum())} rows in all) holds NaN or Inf: {name} packs "
            "finite weights; check the checkpoint"
        )
    return amax
