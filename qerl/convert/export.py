"""What a run leaves, as others load it: its packed base, its adapter, or both merged in bf16.

    merged = round_bf16(W + (alpha / rank) B A),  W the dequantised weight, the sum in fp32

Rounding is to 8 significant bits, and an adapter moves a weight by less than that more often than
not: how much of the update is lost is measured for every linear and stands in the report.
"""

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from qerl.convert.job import Stage
from qerl.convert.method import LINEAR_NAMES, LayerInputs, LayerWeights, QuantizedLayer, Row
from qerl.convert.unfinished import Unfinished
from qerl.model import toy
from qerl.model.linear import LoRAConfig
from qerl.model.load import full_spec
from qerl.model.packing import check_quant, linear_name, read_packing
from qerl.model.reader import FUSED, Reader
from qerl.model.shards import Entry
from qerl.model.source import Source
from qerl.model.spec import Geometry
from qerl.quant.packed import Format, PackedWeight

_COPY_BYTES = 1 << 24
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class TrainedWeights:
    """A checkpoint as a run computes with it: linears packed and unpacked again, in fp32."""

    def __init__(self, source: Source, format: Format, device: torch.device) -> None:
        """Nothing but headers is read.

        Args:
            source: of the run.
            format: of its linears.
            device: where they are packed and unpacked.

        Raises:
            ValueError: the source holds another format.
        """
        packing = read_packing(source.config())
        check_quant(source.name, packing, format, source.folder())
        self._spec = full_spec(source)
        self._format = format
        self._weights = source.weights()
        self._stored = frozenset(self._weights.names())
        self._reader = Reader(source.name, self._weights, device, packing)
        self._shapes = {name: shape for name, shape, _ in toy.tensors(self._spec)}
        self._linears = {
            f"{linear_name(layer, name)}.weight": (layer, name)
            for layer in range(self._spec.layers)
            for name in self._spec.linear_shapes()
        }
        self._group: dict[tuple[int, str], PackedWeight] = {}

    def names(self) -> Sequence[str]:
        """Every tensor of the model."""
        return list(self._shapes)

    def entry(self, name: str) -> Entry:
        """What a tensor is."""
        shape = self._shapes[name]
        if name in self._linears:
            return Entry(shape=shape, dtype=torch.float32, place=self._reader.name)
        if name in self._stored:
            return self._weights.entry(name)
        return Entry(shape=shape, dtype=torch.bfloat16, place=self._reader.name)

    def get(self, name: str) -> Tensor:
        """One tensor, on the device."""
        shape = self._shapes[name]
        if name in self._linears:
            return self._packed(*self._linears[name]).dequantize(torch.float32)
        if name in self._stored:
            return self._reader.stored(name, shape)
        rows, columns = shape
        return self._reader.matrix(name.removesuffix(".weight"), (rows, columns), torch.bfloat16)

    def fingerprint(self) -> str:
        """SHA-256 of the checkpoint's, and of how it is packed."""
        return hashlib.sha256(f"{self._weights.fingerprint()} {self._format}".encode()).hexdigest()

    def _packed(self, layer: int, name: str) -> PackedWeight:
        """A linear; those that share its input are kept for the next calls."""
        if (layer, name) not in self._group:
            names = next(group for group in FUSED if name in group)
            shapes = [self._spec.linear_shapes()[each] for each in names]
            packed = self._reader.linears(layer, names, shapes, self._format)
            self._group = {(layer, each): w for each, w in zip(names, packed, strict=True)}
        return self._group[layer, name]


class TrainedSource:
    """A source with `TrainedWeights`; everything else is the source's own."""

    def __init__(self, source: Source, format: Format, device: torch.device) -> None:
        """Nothing is read here; arguments as of `TrainedWeights`."""
        self.name = source.name
        self._source = source
        self._format = format
        self._device = device

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The source's."""
        return self._source.tokenizer()

    def config(self) -> PretrainedConfig:
        """The source's."""
        return self._source.config()

    def generation_eos_ids(self) -> tuple[int, ...]:
        """The source's."""
        return self._source.generation_eos_ids()

    def geometry(self) -> Geometry:
        """The source's."""
        return self._source.geometry()

    def folder(self) -> Path | None:
        """The source's."""
        return self._source.folder()

    def weights(self) -> TrainedWeights:
        """The weights that the run computed with."""
        return TrainedWeights(self._source, self._format, self._device)


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Adds an adapter to the weights of a layer and rounds the sum once, to bf16."""

    sha256: str
    """Of the adapter's file."""

    lora: LoRAConfig

    matrices: InitVar[Mapping[str, Tensor]]
    """By the policy's names: ``layers.0.q_proj.lora_a`` [R, K], ``.lora_b`` [N, R]; fp32."""

    name: ClassVar[str] = "merge"
    calibrated: ClassVar[bool] = False

    def __post_init__(self, matrices: Mapping[str, Tensor]) -> None:
        object.__setattr__(self, "_matrices", matrices)

    def quantize(
        self, layer: LayerWeights, format: Format, inputs: LayerInputs | None = None
    ) -> QuantizedLayer:
        """The layer in bf16, and for each linear what rounding took from its update."""
        linears, rows = {}, []
        for name in LINEAR_NAMES:
            weight = layer.linear(name)
            update = self._update(layer.index, name.rpartition(".")[2], weight)
            linears[name] = format.quantize(weight if update is None else weight + update)
            if update is not None:
                merged = linears[name].dequantize(torch.float32)
                rows.append({"layer": layer.index, "linear": name, **_loss(weight, update, merged)})
        return QuantizedLayer(index=layer.index, linears=linears, others=layer.others(), rows=rows)

    def _update(self, layer: int, name: str, weight: Tensor) -> Float[Tensor, "N K"] | None:
        """(alpha / rank) B A on the device of the weight; None where the linear has no adapter."""
        matrices: Mapping[str, Tensor] = self._matrices  # type: ignore[attr-defined]
        prefix = f"layers.{layer}.{name}"
        if f"{prefix}.lora_a" not in matrices:
            return None
        a, b = (matrices[f"{prefix}.{part}"].to(weight).float() for part in ("lora_a", "lora_b"))
        return (b @ a).mul_(self.lora.scale)


def _loss(
    weight: Float[Tensor, "N K"], update: Float[Tensor, "N K"], merged: Float[Tensor, "N K"]
) -> dict[str, float]:
    """Sums of squares of the update and of its rounding, and how many weights do not move."""
    rounding = merged - weight - update
    return {
        "update_squared": float(update.square().sum(dtype=torch.float64)),
        "rounding_squared": float(rounding.square().sum(dtype=torch.float64)),
        "unmoved": int((merged == weight.bfloat16().float()).sum()),
        "weights": weight.numel(),
    }


def lost(rows: Sequence[Row]) -> tuple[float, float]:
    """RMS of the rounding over that of the update, and the share of weights that do not move.

    Both over all linears with an adapter; the first is infinite for an adapter of zeros.
    """
    sums = {
        key: sum(float(str(row[key])) for row in rows)
        for key in ("update_squared", "rounding_squared", "unmoved", "weights")
    }
    update, rounding = sums["update_squared"], sums["rounding_squared"]
    share = (rounding / update) ** 0.5 if update else float("inf")
    return share, sums["unmoved"] / max(sums["weights"], 1)


def check_adapter(
    folder: Path, lora: LoRAConfig, matrices: Mapping[str, Tensor], geometry: Geometry
) -> None:
    """Raise unless an adapter has the matrices that its settings and the model ask for.

    Raises:
        ValueError: naming folder and matrix: missing, left over, of another shape, or not finite.
    """
    wanted = {}
    for layer in range(geometry.layers):
        for name in lora.targets:
            N, K = geometry.linear_shapes()[name]
            wanted[f"layers.{layer}.{name}.lora_a"] = (lora.rank, K)
            wanted[f"layers.{layer}.{name}.lora_b"] = (N, lora.rank)
    there = {name: tuple(matrix.shape) for name, matrix in matrices.items()}
    wrong = sorted(n for n in wanted.keys() | there.keys() if wanted.get(n) != there.get(n))
    if wrong:
        raise ValueError(
            f"{folder}: {wrong[0]} is {there.get(wrong[0], 'missing')}, the model has "
            f"{wanted.get(wrong[0], 'no such matrix')} ({len(wrong)} differ); name the adapter of "
            "this model"
        )
    for name, matrix in matrices.items():
        if not bool(matrix.isfinite().all()):
            raise ValueError(f"{folder}: {name} holds NaN or Inf; the run diverged")


def copy_packed(
    folder: Path, out: Path, progress: Callable[[Stage], None] = lambda stage: None
) -> int:
    """Copy a folder of packed weights file by file; `out` appears when all are there.

    Returns:
        Bytes copied.

    Raises:
        ValueError: `out` exists, or the disk has no room.
    """
    if out.exists():
        raise ValueError(f"out={out} exists; choose another out= or remove it")
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix not in _PICKLES)
    sizes = {path: path.stat().st_size for path in files}
    total, done = sum(sizes.values()), 0
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < total:
        raise ValueError(
            f"out={out}: {total / 1e9:.2f} GB to write, {free / 1e9:.2f} GB free; make room, or "
            "choose out= on another disk"
        )
    with Unfinished(out, {"copy": str(folder.resolve())}) as work:
        work.take_up()
        for path, size in sizes.items():
            with path.open("rb") as source, (work.folder / path.name).open("wb") as target:
                shutil.copyfileobj(source, target, _COPY_BYTES)
            done += size
            progress(Stage(label=path.name, done=done, total=total, found=False))
        work.publish()
    return total
