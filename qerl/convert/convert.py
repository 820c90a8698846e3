"""A checkpoint becomes a folder of packed weights, one decoder layer at a time.

    read a layer -> (statistics of its inputs) -> codes and scales -> a shard, at planned offsets

At most one layer and its packed weights are in memory. A shard is written in place, flushed to the
disk and entered in a journal with its checksum; a conversion that was stopped, by a signal or by a
full disk, goes on at the first shard that is not in the journal and ends with the bytes of one that
was not stopped.
"""

import errno
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from qerl.convert.companions import (
    REPORT,
    check_companions,
    read_report,
    write_checksums,
    write_companions,
    write_report,
)
from qerl.convert.job import Converted, Job, Stage
from qerl.convert.method import (
    LINEAR_NAMES,
    Calibration,
    LayerWeights,
    QuantizedLayer,
    Row,
)
from qerl.convert.plan import Part, Plan, Shard, make_plan
from qerl.convert.report import document, layer_rows
from qerl.convert.unfinished import Unfinished, sha256
from qerl.model import compressed
from qerl.model.load import full_spec
from qerl.model.reader import check_finite
from qerl.model.shards import raw
from qerl.model.source import Weights
from qerl.quant.packed import Format

_SPARE_BYTES = 64 << 20  # config, tokenizer, report, journal
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

Json = Any


def convert(job: Job, progress: Callable[[Stage], None] = lambda stage: None) -> Converted:
    """Convert, or go on where an earlier call was stopped.

    Raises:
        ValueError: naming file and tensor where the checkpoint is at fault, and the settings that
            differ from those of the work that is there.
        OSError: the disk is full or cannot be written; what is finished stays.
    """
    check_companions(job.source)
    spec, weights = full_spec(job.source), job.source.weights()
    plan = make_plan(job.source.name, spec, weights, job.format, job.shard_bytes)
    with Unfinished(job.out, job.settings(weights)) as work:
        if work.is_published():
            return _converted(job, plan, read_report(job.out), found=True)
        finished = work.take_up()
        _check_disk(job.out, plan, finished)
        try:
            entries = _Conversion(job, plan, weights, work, progress).run(finished)
            rows = [row for entry in entries for row in entry["rows"]]
            write_companions(work.folder, job.source, spec, plan, job.format)
            write_report(work.folder, _report(job, rows))
            if job.draw is not None:
                job.draw(rows, (work.folder / REPORT).with_suffix(".png"))
            known = {entry["file"]: entry["sha256"] for entry in entries}
            write_checksums(work.folder, work.settings, known)
            work.publish()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise OSError(
                error.errno,
                f"{error.filename or work.place}: {error.strerror}; what is finished stays in "
                f"{work.place}, make room and give the same command again",
            ) from error
    return _converted(job, plan, rows, found=False)


class _Conversion:
    """The walk through the parts."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        weights: Weights,
        work: Unfinished,
        progress: Callable[[Stage], None],
    ) -> None:
        self._job = job
        self._plan = plan
        self._weights = weights
        self._work = work
        self._progress = progress
        self._calibration: Calibration | None = None
        self._done = 0

    def run(self, finished: Sequence[Mapping[str, Json]]) -> list[Mapping[str, Json]]:
        """Make every shard that is not `finished`; the journal's entries of all."""
        there = {entry["file"]: entry for entry in finished}
        waiting = [shard for shard in self._plan.shards if shard.file not in there]
        layers = any(part.layer is not None for shard in waiting for part in shard.parts)
        if layers and self._job.calibration is not None:
            self._calibration = self._job.calibration()
        entries = []
        for shard in self._plan.shards:
            entry = there.get(shard.file)
            if entry is None:
                entry = self._make(shard)
                self._work.add(entry)
            else:
                for part in shard.parts:
                    self._pass_by(shard, part)
            entries.append(entry)
        return entries

    def _make(self, shard: Shard) -> dict[str, Json]:
        """Write a shard and wait for the disk; its entry."""
        path = self._work.folder / shard.file
        rows: list[Row] = []
        with path.open("wb") as file:
            file.write(shard.header)
            for part in shard.parts:
                for name, tensor in self._convert(part, rows).items():
                    file.seek(shard.offsets[name])
                    file.write(raw(tensor))
                self._show(part, found=False)
            file.flush()
            os.fsync(file.fileno())
        return {
            "file": shard.file,
            "bytes": shard.nbytes,
            "sha256": sha256(path),
            "rows": [dict(row) for row in rows],
        }

    def _convert(self, part: Part, rows: list[Row]) -> dict[str, Tensor]:
        """The tensors of a part as they are stored."""
        dense = {name: self._read(part, name) for name in part.reads}
        if part.layer is None:
            for name, tensor in dense.items():
                check_finite(part.reads[name].place, name, tensor)
            return dense
        layer = LayerWeights(
            index=part.layer,
            tensors={n.removeprefix(part.prefix): t for n, t in dense.items()},
        )
        for name, tensor in layer.others().items():
            check_finite(part.reads[part.prefix + name].place, part.prefix + name, tensor)
        try:
            inputs = self._calibration.inputs(layer) if self._calibration else None
            quantized = self._job.method.quantize(layer, self._job.format, inputs)
        except ValueError:
            for name, tensor in dense.items():  # nothing but a weight knows its file
                check_finite(part.reads[name].place, name, tensor)
            raise
        if self._calibration is not None:
            self._calibration.advance(quantized)
        rows += layer_rows(layer, quantized, inputs)
        tensors = {part.prefix + name: tensor for name, tensor in quantized.others.items()}
        for name, packed in quantized.linears.items():
            for inner, tensor in compressed.stored(packed).items():
                tensors[f"{part.prefix}{name}.{inner}"] = tensor
        _check_planned(part, tensors)
        return tensors

    def _read(self, part: Part, name: str) -> Tensor:
        tensor = self._weights.get(name)
        entry = part.reads[name]
        if (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
            raise ValueError(f"{entry.place}: {name} has changed while it was being converted")
        return tensor.to(self._job.device)

    def _pass_by(self, shard: Shard, part: Part) -> None:
        """A part that is written already; calibration tokens still go through it."""
        if self._calibration is not None and part.layer is not None:
            path = self._work.folder / shard.file
            self._calibration.advance(read_layer(path, part, self._job.format, self._job.device))
        self._show(part, found=True)

    def _show(self, part: Part, *, found: bool) -> None:
        self._done += part.weights
        self._progress(
            Stage(label=part.label, done=self._done, total=self._plan.weights, found=found)
        )


def read_layer(path: Path, part: Part, format: Format, device: torch.device) -> QuantizedLayer:
    """A decoder layer out of a shard that was written by its plan."""
    others: dict[str, Tensor] = {}
    linears: dict[str, dict[str, Tensor]] = {}
    with safe_open(path, framework="pt") as opened:
        for stored in part.tensors:
            inner = stored.name.removeprefix(part.prefix)
            tensor = opened.get_tensor(stored.name).clone().to(device)
            linear, _, name = inner.rpartition(".")
            if linear in LINEAR_NAMES and name != "bias":
                linears.setdefault(linear, {})[name] = tensor
            else:
                others[inner] = tensor
    assert part.layer is not None
    return QuantizedLayer(
        index=part.layer,
        linears={name: compressed.packed(tensors, format) for name, tensors in linears.items()},
        others=others,
    )


def _check_disk(out: Path, plan: Plan, finished: Sequence[Mapping[str, Json]]) -> None:
    """Refuse to begin what the disk has no room for."""
    needed = plan.nbytes - sum(entry["bytes"] for entry in finished) + _SPARE_BYTES
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise ValueError(
            f"out={out}: {needed / 1e9:.2f} GB to write, {free / 1e9:.2f} GB free; make room, or "
            "choose out= on another disk"
        )


def _check_planned(part: Part, tensors: Mapping[str, Tensor]) -> None:
    """The method must give what the plan has room for."""
    planned = {stored.name: (stored.shape, stored.dtype) for stored in part.tensors}
    made = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    wrong = sorted(n for n in planned.keys() | made.keys() if planned.get(n) != made.get(n))
    if wrong:
        raise ValueError(
            f"{wrong[0]}: the method made {made.get(wrong[0])}, planned is {planned.get(wrong[0])};"
            " a method keeps names, shapes and dtypes"
        )


def _report(job: Job, rows: Sequence[Row]) -> dict[str, Json]:
    """The document of the whole conversion."""
    return document(rows, model=job.source.name, format=job.format.name, method=job.method.name)


def _converted(job: Job, plan: Plan, rows: Sequence[Row], *, found: bool) -> Converted:
    return Converted(
        folder=job.out, rows=rows, weights=plan.weights, nbytes=plan.nbytes, found=found
    )
