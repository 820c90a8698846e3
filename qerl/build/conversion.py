"""The third job: from a configuration to a folder of packed weights."""

import logging
from pathlib import Path

from omegaconf import DictConfig

from qerl.build.config import make, quiet_libraries
from qerl.convert.convert import convert
from qerl.convert.job import Converted, Job
from qerl.convert.method import Method
from qerl.convert.report import summary
from qerl.model.source import Source
from qerl.quant.packed import Format
from qerl.record import provenance
from qerl.record.conversion import ConversionProgress
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
    with ConversionProgress(Path(cfg.out).name) as display:
        done = convert(job(cfg, display), display.stage)
    return _told(done)


def job(cfg: DictConfig, display: ConversionProgress) -> Job:
    """The job that `cfg` describes; nothing is read."""
    source: Source = make(cfg.model.source)
    format: Format = make(cfg.quant)
    if cfg.quant.method not in cfg.methods:
        raise ValueError(f"quant.method={cfg.quant.method}: one of {', '.join(cfg.methods)}")
    method: Method = make(cfg.methods[cfg.quant.method])
    if not isinstance(cfg.shard_gb, int | float) or not cfg.shard_gb > 0:
        raise ValueError(f"shard_gb={cfg.shard_gb}: GB of data in one file, above 0")
    compute: Compute = make(cfg.trainer.compute)
    code = provenance.commit()
    return Job(
        source=source,
        format=format,
        method=method,
        out=Path(cfg.out).expanduser(),
        shard_bytes=int(cfg.shard_gb * GB),
        device=compute.torch_device(),
        calibration=None,
        facts={
            "tool": f"qerl {provenance.versions()['qerl']}",
            "commit": code.short if code else None,
        },
    )


def _told(done: Converted) -> str:
    """Where the folder is, what it takes and how exact it is."""
    if done.found:
        return f"{done.folder} is there already, made with the same settings"
    figures = ", ".join(f"{name} {value:.4g}" for name, value in summary(done.rows).items())
    size = f"{done.weights / 1e9:.3f} G weights in {done.nbytes / GB:.3f} GB"
    return f"{done.folder}: {size}; {figures}"
