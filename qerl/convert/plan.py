"""What a conversion will write, byte for byte, before it reads a weight.

The sizes of packed weights follow from shapes alone, so the plan of a conversion is known from the
headers of its checkpoint: which tensor lies where in which file, how much disk it takes, and every
fault that a header can show. A shard holds whole parts (the embedding, a decoder layer, final norm
and head), so that an interrupted conversion goes on at a layer.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from qerl.convert.method import LINEAR_NAMES
from qerl.model import compressed, toy
from qerl.model.shards import DTYPES, SINGLE, Entry
from qerl.model.source import Weights
from qerl.model.spec import ModelSpec
from qerl.quant.packed import WEIGHT_DTYPES, Format, check_shape

_DTYPE_ORDER = {dtype: (rank, name) for rank, (name, dtype) in enumerate(DTYPES.items())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor of the output."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tensors that are read, converted and written together."""

    label: str
    """For a person: ``embedding``, ``layer 7`` or ``head``."""

    prefix: str
    """What the names of a layer's tensors begin with; empty elsewhere."""

    layer: int | None
    """Index of the decoder layer; None for parts that stay dense."""

    reads: Mapping[str, Entry]
    """Tensors of the checkpoint by their full names."""

    tensors: tuple[Stored, ...]
    """Tensors of the output, by their full names."""

    @property
    def weights(self) -> int:
        """Weights that are read."""
        return sum(prod(entry.shape) for entry in self.reads.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the output's data."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A file of the output: its name, header and where each tensor's data begins."""

    file: str
    parts: tuple[Part, ...]
    header: bytes
    offsets: Mapping[str, int]
    """Of each tensor's data, from the start of the file."""
    nbytes: int
    """Of the whole file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All files with weights."""

    shards: tuple[Shard, ...]

    @property
    def weights(self) -> int:
        """Weights that are read."""
        return sum(part.weights for shard in self.shards for part in shard.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(shard.nbytes for shard in self.shards)

    def weight_map(self) -> dict[str, str]:
        """File of every tensor."""
        return {name: shard.file for shard in self.shards for name in sorted(shard.offsets)}


def make_plan(
    name: str, spec: ModelSpec, weights: Weights, format: Format, shard_bytes: int
) -> Plan:
    """The plan of a conversion.

    Args:
        name: of the source, for messages.
        spec: of the model.
        weights: its checkpoint, of which only entries are looked at.
        format: of the linears.
        shard_bytes: a file takes no further part that would carry its data beyond this.

    Raises:
        ValueError: naming file and tensor: a tensor is missing, left over, of the wrong shape or
            dtype, or does not divide into the format's blocks.
    """
    parts = list(_parts(name, spec, weights, format))
    groups: list[list[Part]] = [[]]
    for part in parts:
        if groups[-1] and sum(p.nbytes for p in groups[-1]) + part.nbytes > shard_bytes:
            groups.append([])
        groups[-1].append(part)
    total = len(groups)
    names = [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    if total == 1:
        names = [SINGLE]
    return Plan(shards=tuple(_shard(n, group) for n, group in zip(names, groups, strict=True)))


def _parts(name: str, spec: ModelSpec, weights: Weights, format: Format) -> Iterator[Part]:
    """The parts in the order of the forward pass."""
    shapes = {tensor: shape for tensor, shape, _ in toy.tensors(spec)}
    entries = _entries(name, weights, shapes, tied=spec.tied)
    embedding = "model.embed_tokens.weight"
    yield _dense_part("embedding", entries, [embedding])
    rest = [tensor for tensor in shapes if not tensor.startswith("model.layers.")]
    for index in range(spec.layers):
        prefix = f"model.layers.{index}."
        reads = {n: entry for n, entry in entries.items() if n.startswith(prefix)}
        tensors: list[Stored] = []
        for full, entry in reads.items():
            inner = full.removeprefix(prefix)
            if inner.removesuffix(".weight") in LINEAR_NAMES:
                tensors += _packed(full.removesuffix("weight"), entry, format)
            else:
                tensors.append(Stored(name=full, shape=entry.shape, dtype=entry.dtype))
        yield Part(
            label=f"layer {index}",
            prefix=prefix,
            layer=index,
            reads=reads,
            tensors=tuple(tensors),
        )
    rest.remove(embedding)
    yield _dense_part("head", entries, rest)


def _dense_part(label: str, entries: Mapping[str, Entry], names: Sequence[str]) -> Part:
    reads = {name: entries[name] for name in names}
    tensors = [Stored(name=n, shape=e.shape, dtype=e.dtype) for n, e in reads.items()]
    return Part(label=label, prefix="", layer=None, reads=reads, tensors=tuple(tensors))


def _packed(prefix: str, entry: Entry, format: Format) -> list[Stored]:
    """The stored tensors of a linear."""
    shape = (entry.shape[0], entry.shape[1])
    try:
        check_shape(shape, format.block_size, format.name)
    except ValueError as error:
        raise ValueError(f"{entry.place}: {prefix}weight: {error}") from None
    names = compressed.PARTS[format.name]
    return [
        # A scale of the whole tensor is stored with one axis.
        Stored(name=prefix + names[ours], shape=inner or (1,), dtype=dtype)
        for ours, (inner, dtype) in format.layout(shape).items()
    ]


def _entries(
    name: str, weights: Weights, shapes: Mapping[str, tuple[int, ...]], *, tied: bool
) -> dict[str, Entry]:
    """What the checkpoint has for every tensor of the model; refused where that does not fit."""
    there = set(weights.names())
    absent = [tensor for tensor in shapes if tensor not in there]
    if absent:
        raise ValueError(
            f"{name}: the checkpoint has no tensor {absent[0]} ({len(absent)} in all); "
            "its config or its index belongs to another model"
        )
    # Some exports repeat a tied head, and old ones store the rotary table.
    spare = {"lm_head.weight"} if tied else set()
    left = sorted(n for n in there - set(shapes) - spare if not n.endswith("rotary_emb.inv_freq"))
    if left:
        raise ValueError(
            f"{name}: {len(left)} tensors have no place in the model, first {left[0]} in "
            f"{weights.entry(left[0]).place}; its config or its index belongs to another model"
        )
    entries = {}
    for tensor, shape in shapes.items():
        entry = entries[tensor] = weights.entry(tensor)
        if entry.shape != shape:
            raise ValueError(
                f"{entry.place}: {tensor} is {list(entry.shape)}, the config says {list(shape)}; "
                "bring config and weights of one model"
            )
        if entry.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{entry.place}: {tensor} is {entry.dtype}, weights are float32, bfloat16 or "
                "float16; take the original checkpoint, not one that is quantised already"
            )
    return entries


def _shard(file: str, parts: Sequence[Part]) -> Shard:
    """Header and offsets as safetensors' own writer gives them: wide dtypes first, then by name."""
    tensors = [tensor for part in parts for tensor in part.tensors]
    tensors.sort(key=lambda tensor: (_DTYPE_ORDER[tensor.dtype][0], tensor.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, at = {}, 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _DTYPE_ORDER[tensor.dtype][1],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        starts[tensor.name] = at
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    front = 8 + len(text)
    return Shard(
        file=file,
        parts=tuple(parts),
        header=len(text).to_bytes(8, "little") + text,
        offsets={name: front + start for name, start in starts.items()},
        nbytes=front + at,
    )
