"""What converting a large checkpoint takes: seconds, weights per second and peak memory.

The checkpoint is random and drawn tensor by tensor while it is read, in the true geometry of a
model. Every conversion runs in a fresh process, whose largest resident size the kernel reports
(VmHWM of ``/proc/self/status``), shared libraries and everything else included.
"""

import multiprocessing
import resource
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.convert.convert import convert
from qerl.convert.job import Converted, Job, Stage
from qerl.convert.methods import METHODS
from qerl.convert.report import summary
from qerl.model.random_source import RandomSource, RandomWeights, geometry_spec
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format

GIB = 2**30
_FORMATS: dict[str, Format] = {"nvfp4": NVFP4(), "mxfp4": MXFP4()}


class TimedWeights(RandomWeights):
    """Random weights that know how much CPU time drawing them took."""

    seconds = 0.0

    def get(self, name: str) -> Tensor:
        """One tensor."""
        started = time.process_time()
        tensor = super().get(name)
        self.seconds += time.process_time() - started
        return tensor


class TimedSource(RandomSource):
    """A random checkpoint whose `drawn` weights can be asked for their time."""

    def weights(self) -> TimedWeights:
        """The same object at every call."""
        return self.drawn

    @cached_property
    def drawn(self) -> TimedWeights:
        """The weights."""
        return TimedWeights(self._spec, self._device, self._seed)


@dataclass(frozen=True, kw_only=True)
class ConvertBench:
    """Whole conversions of random checkpoints, one after the other."""

    geometries: Sequence[str] = ("32b",)
    """Keys of `timing.GEOMETRIES`."""

    formats: Sequence[str] = ("nvfp4",)

    methods: Sequence[str] = ("rtn",)
    """Data-free ones."""

    layers: int | None = None
    """The first so many decoder layers; None for all. Embedding and head are always there."""

    folder: str = "out/bench/convert"
    """Holds a folder while it is measured; removed afterwards."""

    shard_gb: float = 2.0

    threads: int = 1
    """Of torch."""

    limit_gib: float = 24.0
    """A conversion that takes more fails the bench."""

    device: str = field(default="cpu")

    def run(self, rows: list[dict[str, Any]]) -> None:
        """Append one row a conversion to `rows`; raises where one passes `limit_gib`."""
        for geometry in self.geometries:
            for format in self.formats:
                for method in self.methods:
                    rows.append(self._measure(geometry, format, method))

    def _measure(self, geometry: str, format: str, method: str) -> dict[str, Any]:
        out = Path(self.folder) / f"{geometry}-{format}-{method}"
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(out.with_name(out.name + ".partial"), ignore_errors=True)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(_convert, (self, geometry, format, method, out))
        shutil.rmtree(out)
        if row["peak_rss_gib"] > self.limit_gib:
            raise RuntimeError(f"{out.name}: {row['peak_rss_gib']} GiB, above {self.limit_gib}")
        return row


def _convert(
    bench: ConvertBench, geometry: str, format: str, method: str, out: Path
) -> dict[str, Any]:
    """One conversion, in a process of its own."""
    torch.set_num_threads(bench.threads)
    spec = geometry_spec(geometry, bench.layers)
    source = TimedSource(spec, bench.device)
    job = Job(
        source=source,
        format=_FORMATS[format],
        method=METHODS[method],
        out=out,
        shard_bytes=int(bench.shard_gb * 10**9),
    )
    before = _peak_gib()
    peaks: list[float] = []

    def note(stage: Stage) -> None:
        peaks.append(_peak_gib())

    started, busy = time.perf_counter(), time.process_time()
    done = convert(job, note)
    seconds, cpu = time.perf_counter() - started, time.process_time() - busy
    return {
        "section": "convert",
        "geometry": geometry,
        "format": format,
        "method": method,
        "layers": spec.layers,
        "threads": bench.threads,
        **_figures(done, seconds, cpu, source.drawn.seconds),
        "start_rss_gib": round(before, 3),
        "embedding_rss_gib": round(peaks[0], 3),
        "first_layer_rss_gib": round(peaks[1], 3),
        "last_layer_rss_gib": round(peaks[-2], 3),
        "peak_rss_gib": round(_peak_gib(), 3),
        "maxrss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 3),
    }


def _figures(done: Converted, seconds: float, cpu: float, drawn: float) -> dict[str, float]:
    """Sizes, and times: of the clock, which other processes share, and of the CPU."""
    return {
        "weights": done.weights,
        "written_gb": round(done.nbytes / 1e9, 3),
        "seconds": round(seconds, 1),
        "cpu_s": round(cpu, 1),
        "drawing_cpu_s": round(drawn, 1),
        "mweights_per_s": round(done.weights / seconds / 1e6, 2),
        "mweights_per_cpu_s_without_drawing": round(done.weights / (cpu - drawn) / 1e6, 2),
        "sqnr_mean_db": round(summary(done.rows)["sqnr_mean_db"], 3),
    }


def _peak_gib() -> float:
    """The largest resident size of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / GIB
    raise RuntimeError("no VmHWM in /proc/self/status: the peak is measured on Linux only")
