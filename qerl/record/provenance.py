"""Where a measurement comes from: the commit, the versions and the machine."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil
import torch

import qerl
from qerl.record.schema import Commit

GIB = 2**30

_PACKAGES = ("torch", "lightning", "transformers", "peft", "triton", "qerl", "vllm")


def commit(source: Path | None = None) -> Commit | None:
    """The git commit that `source` (by default this package) is checked out from.

    Returns:
        None outside a checkout, without git, and for a copy that the surrounding checkout does
        not track, such as one installed into its virtual environment.
    """
    folder = source or Path(qerl.__file__).parent
    if _git(folder, "ls-files", "--error-unmatch", "--", "__init__.py") is None:
        return None
    sha = _git(folder, "rev-parse", "HEAD")
    if sha is None:
        return None
    # A record that a run has just written must not make the next run look like changed code.
    changes = _git(folder, "status", "--porcelain", "--", ":/", ":(top,exclude)results")
    return Commit(sha=sha, dirty=changes != "")


def versions() -> dict[str, str | None]:
    """Versions of what a number depends on; None where a package is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found | {"cuda": torch.version.cuda}


def device_facts(device: torch.device | str = "cpu", count: int = 1) -> dict[str, object]:
    """The processor that computes and the host around it.

    Args:
        device: what the run computes on.
        count: processes of the run, each with one such device.
    """
    device = torch.device(device)
    facts: dict[str, object] = {
        "type": device.type,
        "name": cpu_model(),
        "count": count,
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "host_cpu": cpu_model(),
        "host_cores": _usable_cores(),
        "host_threads": torch.get_num_threads(),
        "host_memory_gib": round(psutil.virtual_memory().total / GIB, 1),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory_gib = round(properties.total_memory / GIB, 1)
        facts |= {"name": properties.name, "memory_gib": memory_gib}
    return facts


def cpu_model() -> str:
    """The processor's name as the system states it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only; respects a container's share
    return len(affinity(0)) if affinity else psutil.cpu_count() or 1


def command_line() -> str:
    """This process's command, as a shell would read it."""
    return shlex.join(["python", *sys.argv])


def now() -> str:
    """The time in UTC to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
