"""Record: what a measured JSON must carry; written once, found by fields.

A number that is not in a record has not been measured: tables and figures are rendered from
records and from nothing else. NaN is written as ``null``, infinities as ``"inf"`` and ``"-inf"``.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from qerl.record.check import (
    integer,
    json_value,
    list_of,
    map_of,
    number,
    one_of,
    optional,
    structure,
    text,
    truth,
    utc_time,
)
from qerl.record.files import write_once

Kind = Literal["run", "eval", "bench"]
Status = Literal["completed", "interrupted", "failed"]
Json = Any  # what json.loads gives; mypy has no use for the recursive alias at the dict accesses
VERSION = 1

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*(/[A-Za-z0-9][A-Za-z0-9._+=-]*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric over the rollout steps of a run."""

    steps: tuple[int, ...]
    """Rollout steps, rising; a metric need not have a value at every step."""

    values: tuple[float, ...]
    """The metric in the unit that its name ends with; NaN where it was undefined."""

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.values):
            raise ValueError(
                f"{len(self.values)} values for {len(self.steps)} steps: a curve has one a step"
            )
        for before, after in zip(self.steps, self.steps[1:], strict=False):
            if after <= before:
                raise ValueError(f"step {after} after step {before}: steps of a curve rise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The code that measured."""

    sha: str
    """Full commit hash."""

    dirty: bool
    """True where tracked or new files differed from the commit (results aside)."""

    @property
    def short(self) -> str:
        """Seven digits, with ``-dirty`` where the tree differed."""
        return self.sha[:7] + ("-dirty" if self.dirty else "")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run, one evaluation or one benchmark, with everything that a reader needs to trust it."""

    kind: Kind

    name: str
    """What was measured; folders of the path, for example ``gsm8k_3b_nvfp4_aqn``."""

    status: Status

    seed: int

    config: Mapping[str, Json]
    """The resolved configuration, every default included."""

    overrides: tuple[str, ...] = ()
    """What the command line changed."""

    command: str
    """The line that measures this again."""

    commit: Commit | None
    """None outside a git checkout."""

    versions: Mapping[str, str | None]
    """Of python, torch, lightning, transformers, peft, triton, qerl, cuda; None where absent."""

    device: Mapping[str, Json]
    """Processor, memory and count: see `qerl.record.provenance.device_facts`."""

    started: str
    """ISO time, UTC, when a resumed run first started."""

    ended: str

    resumed_at: tuple[int, ...] = ()
    """Rollout steps at which the run was taken up again."""

    error: str | None = None
    """One line where `status` is ``failed``."""

    summary: Mapping[str, float]
    """One number a metric; ``<metric>_stderr`` beside it where its standard error is known."""

    curves: Mapping[str, Curve] = field(default_factory=dict)

    rows: tuple[Mapping[str, Json], ...] = ()
    """Flat measurements of a benchmark or of each problem of an evaluation."""

    samples: tuple[Mapping[str, Json], ...] = ()
    """A few completions with their verdicts."""

    path: Path | None = field(default=None, compare=False)
    """Where it was read from; not part of the document."""

    def __post_init__(self) -> None:
        validate(self.document())

    def document(self) -> dict[str, Json]:
        """The JSON object of this record."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "path"}
        commit = self.commit and {"sha": self.commit.sha, "dirty": self.commit.dirty}
        curves = {
            metric: {"steps": list(curve.steps), "values": list(curve.values)}
            for metric, curve in self.curves.items()
        }
        document: dict[str, Json] = _plain(
            {"schema": VERSION, **plain, "commit": commit, "curves": curves}
        )
        return document

    @property
    def file(self) -> Path:
        """``<name>/seed<k>-<sha7>.json``, with the status where it is not ``completed``."""
        commit = self.commit.short if self.commit else "nogit"
        ending = "" if self.status == "completed" else f"-{self.status}"
        return Path(self.name) / f"seed{self.seed}-{commit}{ending}.json"

    def write(self, folder: Path) -> Path:
        """Write once under `folder` and return the path; no existing record is ever replaced."""
        return write_once(folder / self.file, encode(self.document()))


def load(path: Path) -> Record:
    """The record at `path`.

    Raises:
        ValueError: naming the file, the field, its value and what it should be.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return from_document(document, path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def from_document(document: Json, path: Path | None = None) -> Record:
    """The record that a JSON object describes; ValueError where it is not one."""
    validate(document)
    plain = {key: value for key, value in document.items() if key != "schema"}
    commit = plain["commit"]
    curves = {
        metric: Curve(steps=tuple(curve["steps"]), values=tuple(_floats(curve["values"])))
        for metric, curve in plain["curves"].items()
    }
    lists = {key: tuple(plain[key]) for key in ("overrides", "resumed_at", "rows", "samples")}
    summary = dict(zip(plain["summary"], _floats(plain["summary"].values()), strict=True))
    plain |= {"commit": commit and Commit(**commit), "curves": curves, "summary": summary}
    return Record(**(plain | lists), path=path)


def find(
    folder: Path,
    where: Mapping[str, Json] | None = None,
    kind: Kind | None = None,
    names: str = "*.json",
) -> list[Record]:
    """Records under `folder` whose fields have the values of `where`, in order of their paths.

    Args:
        folder: searched with its subfolders; a folder that does not exist holds none.
        where: dotted field to value, for example ``{"config.quant.name": "nvfp4"}``; a list of
            values accepts each of them.
        kind: only records of this kind.
        names: pattern of the files; folders of runs hold other JSON beside ``record.json``.
    """
    found = (load(path) for path in sorted(folder.rglob(names)) if path.is_file())
    return [r for r in found if (kind is None or r.kind == kind) and matches(r, where or {})]


def matches(record: Record, where: Mapping[str, Json]) -> bool:
    """Whether every dotted field of `where` has its value, or one of its list of values."""
    for dotted, wanted in where.items():
        allowed = list(wanted) if isinstance(wanted, list | tuple) else [wanted]
        found, value = _lookup(record, dotted)
        if not found or value not in allowed:
            return False
    return True


def validate(document: Json) -> None:
    """Check a record's JSON object.

    Raises:
        ValueError: ``field=value: what it should be``, for the first field that is wrong.
    """
    _STRUCTURE("record", document)
    check_identity(document["name"], document["config"])
    if document["ended"] < document["started"]:
        raise ValueError(f"record.ended={document['ended']}: not before {document['started']}")
    for metric, curve in document["curves"].items():
        try:
            Curve(steps=tuple(curve["steps"]), values=tuple(_floats(curve["values"])))
        except ValueError as error:
            raise ValueError(f"record.curves.{metric}: {error}") from error


def check_identity(name: str, config: Mapping[str, Json]) -> None:
    """Check what a run is told at its start: a name that makes a path, a config of JSON values.

    Raises:
        ValueError: for the first of them that is wrong.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"record.name={name!r}: words of letters, digits and ._+=- joined by /")
    map_of(json_value)("record.config", _plain(config))


def encode(document: Mapping[str, Json]) -> str:
    """JSON text, the same bytes for the same object: keys sorted, a line a curve and a row."""
    return _encode(document, 0) + "\n"


def _encode(value: Json, depth: int) -> str:
    pad = " " * (depth + 1)
    if isinstance(value, Mapping) and value and depth < 3:
        body = ",\n".join(
            f"{pad}{json.dumps(key, ensure_ascii=False)}: {_encode(value[key], depth + 1)}"
            for key in sorted(value)
        )
        return f"{{\n{body}\n{pad[1:]}}}"
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
        body = ",\n".join(pad + _encode(item, 3) for item in value)
        return f"[\n{body}\n{pad[1:]}]"
    return json.dumps(value, ensure_ascii=False, sort_keys=True, allow_nan=False)


def _lookup(record: Record, dotted: str) -> tuple[bool, Json]:
    first, *rest = dotted.split(".")
    if first not in Record.__dataclass_fields__:
        return False, None
    value = getattr(record, first)
    if first == "commit" and value is not None:
        value = {"sha": value.sha, "dirty": value.dirty}
    for key in rest:
        if not isinstance(value, Mapping) or key not in value:
            return False, None
        value = value[key]
    return True, value


def _plain(value: Json) -> Json:
    """`value` in the types of JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _floats(values: Iterable[float | str | None]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


_STRUCTURE = structure(
    {
        "schema": one_of(VERSION),
        "kind": one_of(*get_args(Kind)),
        "name": text,
        "status": one_of(*get_args(Status)),
        "seed": integer,
        "config": map_of(json_value),
        "overrides": list_of(text),
        "command": text,
        "commit": optional(structure({"sha": text, "dirty": truth})),
        "versions": map_of(optional(text)),
        "device": map_of(json_value),
        "started": utc_time,
        "ended": utc_time,
        "resumed_at": list_of(integer),
        "error": optional(text),
        "summary": map_of(number),
        "curves": map_of(structure({"steps": list_of(integer), "values": list_of(number)})),
        "rows": list_of(map_of(json_value)),
        "samples": list_of(map_of(json_value)),
    }
)
