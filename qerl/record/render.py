"""Cells → Markdown and LaTeX. The same records give the same bytes."""

import math
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from qerl.record.files import write_atomic
from qerl.record.schema import Record
from qerl.record.table import Cell, TableSpec, cells

MISSING = "–"
_LEGEND = (
    "mean ± s.e. over n runs; for n=1 the s.e. is the run's own (over its problems); "
    f"{MISSING} no record"
)
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "±": r"$\pm$",
    "σ": r"$\sigma$",
}


def markdown(spec: TableSpec, table: Sequence[Sequence[Cell]]) -> str:
    """The table as GitHub's Markdown, its title above and the legend below."""
    body = [
        [
            *(label.replace("|", r"\|") for label in row.labels),
            *(text for cell, paper in _shown(spec, line) for text in _texts(cell, paper)),
        ]
        for row, line in zip(spec.rows, table, strict=True)
    ]
    # Right-aligned numbers; tabulate must not parse them, or it would rewrite their digits.
    align = ["left"] * len(spec.stub) + ["right"] * (len(body[0]) - len(spec.stub))
    grid = tabulate(
        body, headers=_headings(spec), tablefmt="pipe", colalign=align, disable_numparse=True
    )
    notes = [note for note in (spec.note, _coverage(table), _LEGEND) if note]
    return f"**{spec.title}**\n\n{grid}\n\n" + "\n".join(f"<sub>{n}</sub>  " for n in notes) + "\n"


def latex(spec: TableSpec, table: Sequence[Sequence[Cell]]) -> str:
    r"""The table as a booktabs ``table`` environment with the label ``tab:<name>``."""
    lines = []
    for row, line in zip(spec.rows, table, strict=True):
        texts = [_escape(label) for label in row.labels]
        for cell, paper in _shown(spec, line):
            texts += [_escape(text) for text in _texts(cell, paper)]
        lines.append(" & ".join(texts) + r" \\")
    headings = _headings(spec)
    align = "l" * len(spec.stub) + "r" * (len(headings) - len(spec.stub))
    notes = " ".join(f"{_escape(n)}." for n in (spec.title, spec.note, _LEGEND) if n)
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{notes}}}",
            rf"\label{{tab:{spec.name}}}",
            rf"\begin{{tabular}}{{{align}}}",
            r"\toprule",
            " & ".join(_escape(heading) for heading in headings) + r" \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def render(spec: TableSpec, records: Sequence[Record], folder: Path) -> list[Path]:
    """Write ``<name>.md`` and ``<name>.tex`` under `folder`; a file that is right stays as it is.

    Returns:
        The files that changed.
    """
    changed = stale(spec, records, folder)
    for path, text in _files(spec, records, folder).items():
        if path in changed:
            write_atomic(path, text)
    return changed


def stale(spec: TableSpec, records: Sequence[Record], folder: Path) -> list[Path]:
    """The rendered files that differ from the records, or are absent."""
    return [
        path
        for path, text in _files(spec, records, folder).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def cell_text(cell: Cell) -> str:
    """``83.3 ± 0.4 (n=3)``, or a dash for a cell without a record."""
    if cell.n == 0 or not math.isfinite(cell.mean):
        return MISSING
    margin = f" ± {cell.stderr:.{cell.digits}f}" if math.isfinite(cell.stderr) else ""
    return f"{cell.mean:.{cell.digits}f}{margin} (n={cell.n})"


def _files(spec: TableSpec, records: Sequence[Record], folder: Path) -> dict[Path, str]:
    table = cells(spec, records)
    return {
        folder / f"{spec.name}.md": markdown(spec, table),
        folder / f"{spec.name}.tex": latex(spec, table),
    }


def _quoted(spec: TableSpec) -> list[bool]:
    """For each column, whether any row quotes the paper in it."""
    return [any(column.label in row.paper for row in spec.rows) for column in spec.columns]


def _headings(spec: TableSpec) -> list[str]:
    found = list(spec.stub)
    for column, quoted in zip(spec.columns, _quoted(spec), strict=True):
        found += [column.label, f"{column.label} (paper)"] if quoted else [column.label]
    return found


def _shown(spec: TableSpec, line: Sequence[Cell]) -> list[tuple[Cell, bool]]:
    return list(zip(line, _quoted(spec), strict=True))


def _texts(cell: Cell, paper: bool) -> list[str]:
    if not paper:
        return [cell_text(cell)]
    return [cell_text(cell), MISSING if cell.paper is None else f"{cell.paper:.{cell.digits}f}"]


def _coverage(table: Sequence[Sequence[Cell]]) -> str:
    flat = [cell for line in table for cell in line]
    empty = sum(cell.n == 0 for cell in flat)
    return f"{empty} of {len(flat)} cells have no record" if empty else ""


def _escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
