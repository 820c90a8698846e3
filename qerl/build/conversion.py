"""The third job: from a configuration to a folder of packed weights."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from qerl.build.calibration import calibration_plan
from qerl.build.config import make, quiet_libraries
from qerl.convert.convert import convert
from qerl.convert.job import Converted, Job
from qerl.convert.method import Method
from qerl.convert.report import summary
from qerl.model.packing import read_packing
from qerl.model.source import Source
from qerl.quant.packed import Format
from qerl.record import provenance
from qerl.record.conversion import ConversionProgress
from qerl.record.figure import plot_linears
from qerl.training.compute import Compute

log = logging.getLogger(__name__)

GB = 10**9


def quantize(cfg: DictConfig) -> str:
    """Convert as `cfg` says, or go on where an earlier call was stopped; what a person is told.

    Raises:
        ValueError: with one line a person can act on.
        OSError: the disk is full; what is finished stays.
    """
    quiet_libraries()
    if not cfg.out:
        raise ValueError(f"out={cfg.out}: name the folder to write, for example out=/models/mine")
    with ConversionProgress(Path(cfg.out).name) as display:
        done = convert(job(cfg, display), display.stage)
    return _exactly(done)


def job(cfg: DictConfig, display: ConversionProgress) -> Job:
    """The job that `cfg` describes; nothing is read."""
    if cfg.quant.method not in cfg.methods:
        raise ValueError(f"quant.method={cfg.quant.method}: one of {', '.join(cfg.methods)}")
    source: Source = make(cfg.model.source)
    format: Format = make(cfg.quant)
    packing = read_packing(source.config())
    if packing is not None:
        raise ValueError(
            f"{source.name} holds {packing.format.name} of {packing.maker} already; bring the "
            "original checkpoint: what is quantised once is not quantised again"
        )
    method: Method = make(cfg.methods[cfg.quant.method])
    largest = shard_bytes(cfg)
    compute: Compute = make(cfg.trainer.compute)
    facts = tool()
    plan = None
    if method.calibrated or cfg.output_error:
        plan = calibration_plan(cfg, source, compute, display.calibration)
        facts |= plan.facts
    return Job(
        source=source,
        format=format,
        method=method,
        out=Path(cfg.out).expanduser(),
        shard_bytes=largest,
        device=compute.torch_device(),
        calibration=plan.begin if plan else None,
        draw=partial(plot_linears, title=f"{cfg.model.name}, {format.name}, {method.name}"),
        facts=facts,
    )


def shard_bytes(cfg: DictConfig) -> int:
    """Most data of one file, as ``shard_gb`` says."""
    if not isinstance(cfg.shard_gb, int | float) or not cfg.shard_gb > 0:
        raise ValueError(f"shard_gb={cfg.shard_gb}: GB of data in one file, above 0")
    return int(cfg.shard_gb * GB)


def tool() -> dict[str, Any]:
    """What made a folder, for its checksums."""
    code = provenance.commit()
    return {
        "tool": f"qerl {provenance.versions()['qerl']}",
        "commit": code.short if code else None,
    }


def told(done: Converted) -> str:
    """Where the folder is and what it takes."""
    if done.found:
        return f"{done.folder} is there already, made with the same settings"
    return f"{done.folder}: {done.weights / 1e9:.3f} G weights in {done.nbytes / GB:.3f} GB"


def _exactly(done: Converted) -> str:
    """As `told`, and how exact it is."""
    if done.found:
        return told(done)
    figures = ", ".join(f"{name} {value:.4g}" for name, value in summary(done.rows).items())
    return f"{told(done)}; {figures}"
