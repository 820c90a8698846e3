"""Job: what is converted, how and where to; and what a conversion says of itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from qerl.convert.companions import fingerprint
from qerl.convert.method import Calibration, Method, Row
from qerl.model.source import Source, Weights
from qerl.quant.packed import Format

PACKED_FORMATS = ("nvfp4", "mxfp4")
"""Formats that compressed-tensors stores packed."""

Json = Any


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is converted, how, and where to."""

    source: Source
    format: Format
    """With an entry in `compressed.PARTS`."""

    method: Method

    out: Path
    """The folder that appears when all is done."""

    shard_bytes: int = 2_000_000_000
    """Data of one file; a part (a layer, the embedding) that is larger has a file of its own."""

    device: torch.device = field(default=torch.device("cpu"))
    """Where layers are quantised."""

    dense: bool = False
    """The folder is dense, in bf16: adapters are merged, and nothing is packed."""

    calibration: Callable[[], Calibration] | None = None
    """Makes what a calibrated method needs; called when there is a layer to quantise. With a
    data-free method it adds output errors to the report."""

    draw: Callable[[Sequence[Row], Path], object] | None = None
    """Draws the report into a file; the same rows give the same bytes. None draws nothing."""

    facts: Mapping[str, Json] = field(default_factory=dict)
    """What else the bytes depend on, as JSON values: tool, commit, calibration data."""

    def settings(self, weights: Weights) -> dict[str, Json]:
        """Everything that the bytes depend on; the same settings give the same folder."""
        settings = {
            "source": {
                "name": self.source.name,
                "weights": weights.fingerprint(),
                "files": fingerprint(self.source),
            },
            "format": {"name": self.format.name, **_fields(self.format)},
            "method": {"name": self.method.name, **_fields(self.method)},
            "shard_bytes": self.shard_bytes,
        }
        if self.method.calibrated:  # statistics round as their device does; packing does not
            settings["device"] = self.device.type
        return settings | dict(self.facts)

    def __post_init__(self) -> None:
        if self.format.name not in (("bf16",) if self.dense else PACKED_FORMATS):
            raise ValueError(
                f"quant={self.format.name}: compressed-tensors packs nvfp4 and mxfp4; load "
                f"{self.format.name} from the bf16 checkpoint, which train.py and evaluate.py pack "
                "while they load it"
            )
        if self.shard_bytes < 1:
            raise ValueError(f"shard_bytes={self.shard_bytes}: at least 1 byte a file")
        if self.method.calibrated and self.calibration is None:
            raise ValueError(f"method {self.method.name}: it needs calibration data; give some")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """How far a conversion has come."""

    label: str
    """The part that is done, for example ``layer 3``."""

    done: int
    """Weights converted or found converted."""

    total: int
    """Weights of the model."""

    found: bool
    """The part was there from an earlier call."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A finished conversion."""

    folder: Path
    rows: Sequence[Row]
    """The report: a line a linear."""
    weights: int
    """Of the model."""
    nbytes: int
    """Of all files with weights."""
    found: bool
    """The folder was there already; nothing has been done."""


def _fields(options: Any) -> dict[str, Json]:
    """The settings of a format or a method, which are frozen dataclasses."""
    return asdict(options)
