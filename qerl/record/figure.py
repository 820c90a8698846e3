"""Records → figures: the curves of runs, bars of evaluations, and what quantisation did.

Figures are drawn without a display and come out as the same bytes for the same records.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qerl.record.files import write_atomic
from qerl.record.schema import Curve, Record

# Okabe and Ito's colours, which stay apart for colour-blind readers and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":")
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.hashsalt": "qerl",
}
HELD_OUT = "held_out/mean_at_k"


@dataclass(frozen=True)
class _Ink:
    """How one group is drawn."""

    colour: str
    dash: str
    window: int
    """Steps of the running mean."""


@dataclass(frozen=True)
class _Panel:
    metric: str
    label: str
    draw: Callable[[Axes, Sequence[Curve], Sequence[Curve], _Ink], None]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar of `bar_chart`."""

    label: str
    """What stands under it; bars with the same label stand together."""

    value: float
    stderr: float | None = None
    series: str = ""
    """Which colour it has, named in the legend."""


def plot_curves(groups: Mapping[str, Sequence[Record]], path: Path, *, smooth: int = 10) -> Path:
    """Reward, held-out accuracy, entropy and noise over the rollout steps, one panel each.

    Args:
        groups: legend text to the runs that belong together (seeds of one setting): one run is
            drawn raw and smoothed, several as their mean with a band of one standard deviation.
        path: ``.png``, ``.svg`` or ``.pdf``; replaced where it exists.
        smooth: steps of the running mean of reward and entropy.

    Raises:
        ValueError: where no run has any of the four metrics.
    """
    records = [record for group in groups.values() for record in group]
    panels = [panel for panel in _PANELS if any(panel.metric in r.curves for r in records)]
    if not panels:
        names = ", ".join(panel.metric for panel in _PANELS)
        raise ValueError(f"{len(records)} records hold none of {names}: nothing to plot")
    longest = max(
        len(r.curves[p.metric].steps) for r in records for p in panels if p.metric in r.curves
    )
    window = max(1, min(smooth, longest // 5))
    inks = [
        _Ink(COLOURS[i % len(COLOURS)], _DASHES[i % len(_DASHES)], window)
        for i in range(len(groups))
    ]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 0.7 + 1.75 * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axis, panel in zip(axes, panels, strict=True):
            for group, ink in zip(groups.values(), inks, strict=True):
                _draw(axis, panel, group, ink)
            axis.set_ylabel(panel.label)
            axis.margins(x=0.01)
        axes[-1].set_xlabel("rollout step")
        axes[-1].xaxis.get_major_locator().set_params(integer=True)
        _explain(figure, groups, inks)
        return _save(figure, path)


def bar_chart(
    bars: Sequence[Bar], path: Path, *, label: str, title: str = "", form: str = ".3f"
) -> Path:
    """Values with their standard errors, side by side.

    Args:
        bars: in the order of drawing.
        path: ``.png``, ``.svg`` or ``.pdf``; replaced where it exists.
        label: of the value axis, with its unit.
        title: above the figure.
        form: how a value is written above its bar.
    """
    if not bars:
        raise ValueError("no bars: nothing to plot")
    labels = list(dict.fromkeys(bar.label for bar in bars))
    series = list(dict.fromkeys(bar.series for bar in bars))
    width = 0.8 / len(series)
    with mpl.rc_context(_STYLE | {"axes.grid.axis": "y"}):
        size = (max(3.6, 1.2 + 0.75 * len(labels) * max(1.0, 0.6 * len(series))), 3.2)
        figure = Figure(figsize=size, layout="constrained")
        axis = figure.subplots()
        for bar in bars:
            slot = series.index(bar.series)
            x = labels.index(bar.label) + (slot - (len(series) - 1) / 2) * width
            colour = COLOURS[slot % len(COLOURS)]
            axis.bar(x, bar.value, 0.92 * width, color=colour, yerr=bar.stderr, capsize=2.5)
            axis.annotate(
                format(bar.value, form),
                (x, bar.value + (bar.stderr or 0)),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7.5,
            )
        axis.set_xticks(range(len(labels)), labels)
        axis.set_ylabel(label)
        if title:
            axis.set_title(title, loc="left")
        if series != [""]:
            handles = [Patch(color=COLOURS[i % len(COLOURS)]) for i in range(len(series))]
            axis.legend(handles, series, loc="upper left", bbox_to_anchor=(1, 1))
        return _save(figure, path)


def plot_rates(
    series: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    labels: tuple[str, str],
    limits: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    title: str = "",
) -> Path:
    """Lines of (x, y) on doubly logarithmic axes, and what bounds them, dashed.

    Args:
        series: by name; equal names in `limits` have the same colour.
        path: ``.png``, ``.svg`` or ``.pdf``; replaced where it exists.
        labels: of the axes, with units.
        limits: bounds by name.
        title: above the figure.
    """
    if not series:
        raise ValueError("no series: nothing to plot")
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axis = figure.subplots()
        for place, (name, points) in enumerate(series.items()):
            colour = COLOURS[place % len(COLOURS)]
            axis.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, label=name)
            if limits and name in limits:
                axis.plot(*zip(*limits[name], strict=True), "--", color=colour, linewidth=1)
        ticks = sorted({x for points in series.values() for x, _ in points})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_xlabel(labels[0])
        axis.set_ylabel(labels[1])
        axis.legend(loc="upper left")
        if title:
            axis.set_title(title, loc="left", fontsize=9)
        return _save(figure, path)


def plot_linears(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str = "") -> Path:
    """SQNR and, where it is known, relative output error over the layers, a line a linear.

    Args:
        rows: of a quantisation report: ``layer``, ``linear``, ``sqnr_db``, ``output_error``.
        path: ``.png``, ``.svg`` or ``.pdf``; replaced where it exists.
        title: above the figure.

    Raises:
        ValueError: no row has either of the two.
    """
    known = [
        (key, label)
        for key, label in (("sqnr_db", "SQNR (dB)"), ("output_error", "relative output error"))
        if any(_number(row, key) is not None for row in rows)
    ]
    if not known:
        raise ValueError(f"{len(rows)} rows hold neither sqnr_db nor output_error: nothing to plot")
    names = list(dict.fromkeys(str(row["linear"]) for row in rows))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 0.9 + 2.1 * len(known)), layout="constrained")
        axes = figure.subplots(len(known), 1, sharex=True, squeeze=False)[:, 0]
        for axis, (key, label) in zip(axes, known, strict=True):
            for place, name in enumerate(names):
                points = [
                    (int(row["layer"]), value)
                    for row in rows
                    if row["linear"] == name and (value := _number(row, key)) is not None
                ]
                if points:
                    layers, values = zip(*sorted(points), strict=True)
                    colour = COLOURS[place % len(COLOURS)]
                    axis.plot(layers, values, "o-", color=colour, markersize=3, linewidth=1.2)
            axis.set_ylabel(label)
        axes[-1].set_xlabel("decoder layer")
        axes[-1].xaxis.get_major_locator().set_params(integer=True)
        inks = [COLOURS[i % len(COLOURS)] for i in range(len(names))]
        handles = [Line2D([], [], color=colour, linewidth=2) for colour in inks]
        short = [name.rpartition(".")[2] for name in names]
        figure.legend(handles, short, loc="outside right upper")
        if title:
            figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        return _save(figure, path)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` values that are not NaN, at each position."""
    found = np.full(len(values), math.nan)
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        recent = recent[~np.isnan(recent)]
        if len(recent):
            found[end - 1] = recent.mean()
    return found


def aligned(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that any curve has, and the values of each curve at them (NaN where it has none).

    Returns:
        steps [T] and values [curves, T].
    """
    steps = sorted({step for curve in curves for step in curve.steps})
    column = {step: i for i, step in enumerate(steps)}
    values = np.full((len(curves), len(steps)), math.nan)
    for row, curve in enumerate(curves):
        values[row, [column[step] for step in curve.steps]] = curve.values
    return np.array(steps), values


def _number(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _draw(axis: Axes, panel: _Panel, group: Sequence[Record], ink: _Ink) -> None:
    stderr = panel.metric + "_stderr"
    curves = [record.curves[panel.metric] for record in group if panel.metric in record.curves]
    errors = [record.curves[stderr] for record in group if stderr in record.curves]
    if curves:
        panel.draw(axis, curves, errors, ink)


def _draw_smoothed(axis: Axes, curves: Sequence[Curve], errors: Sequence[Curve], ink: _Ink) -> None:
    steps, values = aligned(curves)
    smoothed = np.stack([running_mean(row, ink.window) for row in values])
    middle, spread = _mean_and_deviation(smoothed)
    if len(curves) > 1:
        low, high = middle - spread, middle + spread
        axis.fill_between(steps, low, high, color=ink.colour, alpha=0.18, linewidth=0)
    elif ink.window > 1:
        axis.plot(steps, values[0], color=ink.colour, alpha=0.3, linewidth=0.9)
    axis.plot(steps, middle, color=ink.colour, linewidth=1.8)


def _draw_steps(axis: Axes, curves: Sequence[Curve], errors: Sequence[Curve], ink: _Ink) -> None:
    steps, values = aligned(curves)
    middle = _mean_and_deviation(values)[0]
    steps, middle = np.append(steps, steps[-1] + 1), np.append(middle, middle[-1])
    axis.plot(steps, middle, color=ink.colour, linestyle=ink.dash, drawstyle="steps-post")
    positive = values[values > 0]
    if len(positive) and positive.max() > 10 * positive.min():
        axis.set_yscale("symlog", linthresh=float(positive.min()))  # 0, the clean stage, stays
    axis.set_ylim(bottom=0)


def _draw_points(axis: Axes, curves: Sequence[Curve], errors: Sequence[Curve], ink: _Ink) -> None:
    """Means with their standard errors: over seeds, or the run's own where there is one run."""
    steps, values = aligned(curves)
    middle, spread = _mean_and_deviation(values)
    margin = spread / math.sqrt(len(curves))
    if len(curves) == 1:
        own = dict(zip(errors[0].steps, errors[0].values, strict=True)) if errors else {}
        margin = np.array([own.get(int(step), math.nan) for step in steps])
    axis.plot(steps, middle, color=ink.colour, linestyle=":", linewidth=1, alpha=0.6)
    axis.errorbar(steps, middle, margin, color=ink.colour, fmt="o", markersize=4, capsize=3)


def _mean_and_deviation(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Over the curves that have a value at each step; the deviation of a single one is 0."""
    count = (~np.isnan(values)).sum(0)  # [T]
    total = np.nansum(values, axis=0)
    middle = np.where(count > 0, total / np.maximum(count, 1), math.nan)  # [T]
    squares = np.nansum((values - middle) ** 2, axis=0)
    return middle, np.sqrt(squares / np.maximum(count - 1, 1))


def _explain(figure: Figure, groups: Mapping[str, Sequence[Record]], inks: Sequence[_Ink]) -> None:
    """The title or legend, and the line that says how the curves were made."""
    window = inks[0].window
    notes = [f"thin: each step, thick: mean of {window} steps"] if window > 1 else []
    if any(len(group) > 1 for group in groups.values()):
        steps = f"means of {window} steps" if window > 1 else "each step"
        notes = [f"{steps}, averaged over seeds; band: ± 1 s.d. over seeds"]
    if any(HELD_OUT in record.curves for group in groups.values() for record in group):
        notes.append("error bars: ± 1 s.e.")
    names = [
        f"{name} ({len(group)} seeds)" if len(group) > 1 else name for name, group in groups.items()
    ]
    figure.supxlabel("; ".join(notes), fontsize=7.5, color="#666666", x=0.99, ha="right")
    if len(groups) == 1:
        figure.suptitle(names[0], fontsize=10, x=0.01, ha="left")
        return
    handles = [Line2D([], [], color=ink.colour, linewidth=2) for ink in inks]
    figure.legend(handles, names, loc="outside upper left", ncols=min(3, len(groups)))


def _save(figure: Figure, path: Path) -> Path:
    """Write the figure whole; without dates and versions, which would change its bytes."""
    FigureCanvasAgg(figure)
    form = path.suffix.lstrip(".") or "png"
    absent = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=144, metadata=absent.get(form))
    return write_atomic(path, buffer.getvalue())


_PANELS = (
    _Panel("train/reward", "reward", _draw_smoothed),
    _Panel(HELD_OUT, "held-out accuracy", _draw_points),
    _Panel("train/entropy_nats", "entropy (nats)", _draw_smoothed),
    _Panel("noise/sigma", "noise σ", _draw_steps),
)
