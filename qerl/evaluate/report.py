"""Records of evaluations → a table in Markdown and a bar chart."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from tabulate import tabulate

from qerl.evaluate.score import METRIC
from qerl.record.figure import Bar, bar_chart
from qerl.record.files import write_atomic
from qerl.record.schema import Record, find

_TITLE = {"greedy": "greedy pass@1", "sampled": "mean@{k}"}
_DASH = "–"


def alike(folder: Path, record: Record, names: str = "*.json") -> list[Record]:
    """Completed evaluations under `folder` on the problems of `record`, the newest of each.

    Two records of one policy (weights and adapter), seed and way of drawing are one evaluation that
    was done twice, for example by two commits.
    """
    newest: dict[str, Record] = {}
    wanted = {"config.evaluation.problem_set": problem_set(record), "status": "completed"}
    found = find(folder, wanted, kind="eval", names=names)
    for other in sorted([*found, record], key=lambda r: r.ended):
        newest[_identity(other)] = other
    return sorted(newest.values(), key=lambda r: r.name)


def problem_set(record: Record) -> str:
    """Digest of the problems' ids, questions and golds."""
    return str(record.config["evaluation"]["problem_set"])


def table(records: Sequence[Record]) -> str:
    """A row an evaluation, in GitHub's Markdown, percentages with standard error and interval."""
    modes = [m for m in METRIC if any(f"{m}/{METRIC[m]}" in r.summary for r in records)]
    headings = ["model", "quant", "adapter", "n"]
    for mode in modes:
        headings += [_heading(mode, records), f"truncated, {mode}", f"no answer, {mode}"]
    body = [[*_labels(r), _problems(r), *(c for m in modes for c in _cells(r, m))] for r in records]
    align = ["left"] * 3 + ["right"] * (len(headings) - 3)
    grid = tabulate(body, headings, tablefmt="pipe", colalign=align, disable_numparse=True)
    first = records[0]
    return (
        f"**{first.config['evaluation']['benchmark']}**, seed {_seeds(records)}\n\n{grid}\n\n"
        f"<sub>per cent ± s.e. [95 % interval] over n problems; {_DASH} not measured</sub>\n"
    )


def write_report(records: Sequence[Record], folder: Path, name: str) -> tuple[Path, Path]:
    """Write ``<name>.md`` and ``<name>.png`` under `folder`."""
    page = write_atomic(folder / f"{name}.md", table(records))
    return page, chart(records, folder / f"{name}.png")


def chart(records: Sequence[Record], path: Path) -> Path:
    """Bars with their standard errors, one group an evaluation."""
    bars = []
    for record in records:
        for mode in METRIC:
            key = f"{mode}/{METRIC[mode]}"
            if key in record.summary and math.isfinite(record.summary[key]):
                error = record.summary[f"{key}_stderr"]
                bars.append(
                    Bar(
                        label="\n".join(w for name in _labels(record) for w in wrap(name, 10)),
                        value=100 * record.summary[key],
                        stderr=100 * error if math.isfinite(error) else None,
                        series=_heading(mode, records),
                    )
                )
    title = str(records[0].config["evaluation"]["benchmark"])
    return bar_chart(bars, path, label="accuracy ± 1 s.e. (%)", title=title, form=".1f")


def _identity(record: Record) -> str:
    of = record.config["evaluation"]
    # Of a local checkpoint; models of other places go by their names.
    weights = of.get("weights")
    facts = [record.name, record.seed, weights, of["adapter_sha256"], of["drawn"]]
    return json.dumps(facts, sort_keys=True)


def _labels(record: Record) -> list[str]:
    of = record.config["evaluation"]
    return [of["model"], of["quant"], of["adapter"]]


def _heading(mode: str, records: Sequence[Record]) -> str:
    ks = {int(r.summary[f"{mode}/samples"]) for r in records if f"{mode}/samples" in r.summary}
    return _TITLE[mode].format(k=ks.pop() if len(ks) == 1 else "k")


def _problems(record: Record) -> str:
    return str(len(record.rows))


def _cells(record: Record, mode: str) -> list[str]:
    key, summary = f"{mode}/{METRIC[mode]}", record.summary
    if key not in summary or not math.isfinite(summary[key]):
        return [_DASH] * 3
    error = summary[f"{key}_stderr"]
    margin = f" ± {100 * error:.1f}" if math.isfinite(error) else ""
    low, high = summary[f"{key}_low"], summary[f"{key}_high"]
    shares = [f"{100 * summary[f'{mode}/{s}_share']:.0f} %" for s in ("truncated", "no_answer")]
    return [f"{100 * summary[key]:.1f}{margin} [{100 * low:.1f}, {100 * high:.1f}]", *shares]


def _seeds(records: Sequence[Record]) -> str:
    return ", ".join(str(seed) for seed in sorted({record.seed for record in records}))
