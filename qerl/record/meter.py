"""Meters: peak memory, elapsed time on the device, tokens per second.

On a GPU, memory is what torch's allocator holds for this process; on a CPU, the resident set of
the process. Times on a GPU lie between two CUDA events, so that work still queued counts where it
belongs; waiting for the second event is the only synchronisation.
"""

import math
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from qerl.record.provenance import GIB

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory of this process, in GiB (2^30 bytes)."""

    peak_gib: float
    """Most that was in use: allocated on the GPU, resident on a CPU."""

    current_gib: float

    reserved_gib: float | None
    """Most that torch's CUDA allocator held, free blocks included; None on a CPU."""

    host_peak_gib: float
    """Most resident memory of the process on the host."""


def memory_use(device: torch.device | str = "cpu") -> MemoryUse:
    """Peaks since the process started or, on a GPU, since `reset_peak`."""
    host_peak = host_peak_bytes() / GIB
    device = torch.device(device)
    if device.type != "cuda":
        current = psutil.Process().memory_info().rss / GIB
        peak = max(host_peak, current)
        return MemoryUse(
            peak_gib=peak, current_gib=current, reserved_gib=None, host_peak_gib=host_peak
        )
    return MemoryUse(
        peak_gib=torch.cuda.max_memory_allocated(device) / GIB,
        current_gib=torch.cuda.memory_allocated(device) / GIB,
        reserved_gib=torch.cuda.max_memory_reserved(device) / GIB,
        host_peak_gib=host_peak,
    )


def reset_peak(device: torch.device | str) -> None:
    """Start the device's peak at what is in use; a CPU's peak is the process's and stays."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def host_peak_bytes() -> int:
    """Most resident memory of this process so far."""
    # Linux keeps the high-water mark of the program here; getrusage also counts its parent's
    # size at the fork, which a small program started by a large one would report as its own.
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Stopwatch:
    """``with Stopwatch(device) as watch: ...`` then ``watch.seconds``."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.seconds = math.nan
        self._device = torch.device(device)
        self._start = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def __enter__(self) -> "Stopwatch":
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                self._events = (
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                )
                self._events[0].record()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._events is None:
            self.seconds = time.perf_counter() - self._start
            return
        with torch.cuda.device(self._device):
            self._events[1].record()
            self._events[1].synchronize()
        self.seconds = self._events[0].elapsed_time(self._events[1]) / 1000


def tok_per_s(tokens: int, seconds: float) -> float:
    """Tokens per second; NaN for no time at all."""
    return tokens / seconds if seconds > 0 else math.nan
