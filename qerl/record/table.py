"""TableSpec + records → cells with mean ± s.e. and n.

A table states which records belong to each cell by their fields; it holds no number of ours. The
numbers of a paper may stand beside ours, in columns that say so.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qerl.record.schema import Kind, Record, matches

Where = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: what its records have in common."""

    labels: tuple[str, ...]
    """Its first cells, one for each heading of the table's stub."""

    where: Where = field(default_factory=dict)
    """Dotted field of a record to value or list of values (`qerl.record.schema.find`)."""

    overrides: tuple[str, ...] = ()
    """What the command line of such a run says, so that a missing cell can be measured."""

    prefix: str = ""
    """Stands before the metric of every column: for records that hold several rows."""

    paper: Mapping[str, float] = field(default_factory=dict)
    """The paper's number by column label, in the column's displayed unit."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: which number of a record it shows."""

    label: str

    metric: str = ""
    """Key of the record's summary; its standard error is ``<metric>_stderr``."""

    where: Where = field(default_factory=dict)
    overrides: tuple[str, ...] = ()

    scale: float = 1.0
    """Factor to the displayed unit; 100 shows a share in per cent."""

    digits: int = 1
    """Decimals shown."""

    average: bool = False
    """The mean of the row's cells to its left instead of a metric; missing where one of them is.
    Its standard error takes them as independent."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A mean over n runs, in the column's displayed unit."""

    mean: float = math.nan

    stderr: float = math.nan
    """Over runs where n > 1; within the run where n = 1 and the record states it; else NaN."""

    n: int = 0
    """Runs; 0 is a cell without a record."""

    digits: int = 1
    paper: float | None = None


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """A table of results, before any result."""

    name: str
    """File name of the rendered table, without its ending."""

    title: str
    stub: tuple[str, ...]
    """Headings of the row labels."""

    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    kind: Kind = "eval"
    where: Where = field(default_factory=dict)
    """Holds for every cell. Only completed measurements count."""

    note: str = ""

    def __post_init__(self) -> None:
        if not self.rows or not self.columns:
            raise ValueError(f"table {self.name}: needs at least one row and one column")
        for row in self.rows:
            if len(row.labels) != len(self.stub):
                raise ValueError(
                    f"table {self.name}: row {row.labels} has {len(row.labels)} labels for the "
                    f"{len(self.stub)} headings {self.stub}"
                )
            unknown = row.paper.keys() - {column.label for column in self.columns}
            if unknown:
                raise ValueError(
                    f"table {self.name}: row {row.labels} quotes the paper for {sorted(unknown)}, "
                    "which are no columns"
                )
        for column in self.columns:
            if bool(column.metric) == column.average:
                raise ValueError(
                    f"table {self.name}: column {column.label!r} needs a metric or average: true, "
                    "and not both"
                )


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A cell that has no record yet."""

    row: Row
    column: Column
    overrides: tuple[str, ...]
    """The table's row and column as overrides of one command line."""


def spec_from(name: str, document: Mapping[str, Any]) -> TableSpec:
    """The table that a YAML file of plain keys describes.

    Args:
        name: the file's name without its ending.
        document: keys as the fields of `TableSpec`, `Row` and `Column`.

    Raises:
        ValueError: for a key that is no field, naming it.
    """
    plain = dict(document)
    rows = tuple(_build(Row, f"{name}.rows[{i}]", r) for i, r in enumerate(plain.pop("rows", ())))
    columns = tuple(
        _build(Column, f"{name}.columns[{i}]", c) for i, c in enumerate(plain.pop("columns", ()))
    )
    spec: TableSpec = _build(
        TableSpec, name, plain | {"name": name, "rows": rows, "columns": columns}
    )
    return spec


def cells(spec: TableSpec, records: Sequence[Record]) -> list[list[Cell]]:
    """The table's cells, row by row."""
    found = []
    for row in spec.rows:
        line: list[Cell] = []
        for column in spec.columns:
            line.append(
                _average(_measured(spec, line), row, column)
                if column.average
                else _cell(spec, row, column, records)
            )
        found.append(line)
    return found


def missing(spec: TableSpec, records: Sequence[Record]) -> list[Missing]:
    """The cells without a record, in the table's order."""
    return [
        Missing(row=row, column=column, overrides=(*row.overrides, *column.overrides))
        for row, line in zip(spec.rows, cells(spec, records), strict=True)
        for column, cell in zip(spec.columns, line, strict=True)
        if cell.n == 0 and not column.average
    ]


def _cell(spec: TableSpec, row: Row, column: Column, records: Sequence[Record]) -> Cell:
    where = {"status": "completed", "kind": spec.kind, **spec.where, **row.where, **column.where}
    metric = row.prefix + column.metric
    chosen = [r for r in records if matches(r, where) and metric in r.summary]
    values = [r.summary[metric] * column.scale for r in chosen]
    stderr = math.nan
    if len(values) > 1:
        stderr = statistics.stdev(values) / math.sqrt(len(values))
    elif values:
        stderr = chosen[0].summary.get(metric + "_stderr", math.nan) * column.scale
    return Cell(
        mean=statistics.fmean(values) if values else math.nan,
        stderr=stderr,
        n=len(values),
        digits=column.digits,
        paper=row.paper.get(column.label),
    )


def _measured(spec: TableSpec, line: Sequence[Cell]) -> list[Cell]:
    """The cells of a line so far that are no averages themselves."""
    columns = spec.columns[: len(line)]
    return [cell for cell, column in zip(line, columns, strict=True) if not column.average]


def _average(line: Sequence[Cell], row: Row, column: Column) -> Cell:
    paper = row.paper.get(column.label)
    if not line or any(cell.n == 0 for cell in line):
        return Cell(digits=column.digits, paper=paper)
    k = len(line)
    return Cell(
        mean=sum(cell.mean for cell in line) / k,
        stderr=math.sqrt(sum(cell.stderr**2 for cell in line)) / k,
        n=min(cell.n for cell in line),
        digits=column.digits,
        paper=paper,
    )


def _build(kind: type[Any], place: str, document: Mapping[str, Any]) -> Any:
    known = kind.__dataclass_fields__
    for key in document:
        if key not in known:
            raise ValueError(f"table {place}.{key}: no such key; known: {', '.join(known)}")
    tuples: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in document.items()
    }
    try:
        return kind(**tuples)
    except TypeError as error:
        raise ValueError(f"table {place}: {error}") from error
