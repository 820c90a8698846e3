"""Figures: written, deterministic, and drawn from the right numbers."""

import math
from pathlib import Path

import numpy as np
import pytest

from qerl.record.figure import (
    Bar,
    aligned,
    bar_chart,
    plot_curves,
    plot_linears,
    running_mean,
)
from qerl.record.schema import Curve


@pytest.fixture
def run(make_record):
    def make(seed: int, n: int = 30):
        steps = tuple(range(n))
        wave = tuple(0.3 + 0.01 * k + 0.02 * ((k * 7 + seed * 3) % 5) for k in steps)
        return make_record(
            seed=seed,
            curves={
                "train/reward": Curve(steps=steps, values=wave),
                "train/entropy_nats": Curve(steps=steps, values=wave),
                "noise/sigma": Curve(
                    steps=steps, values=tuple(0.0 if k < 5 else 0.01 for k in steps)
                ),
                "held_out/mean_at_k": Curve(steps=(0, n), values=(0.2, 0.6)),
                "held_out/mean_at_k_stderr": Curve(steps=(0, n), values=(0.03, 0.04)),
            },
        )

    return make


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_same_records_give_the_same_bytes(run, tmp_path: Path, ending: str) -> None:
    groups = {"NVFP4 + AQN": [run(0, n=8), run(1, n=8)], "BF16": [run(2, n=8)]}
    first = plot_curves(groups, tmp_path / f"a.{ending}").read_bytes()
    second = plot_curves(groups, tmp_path / f"b.{ending}").read_bytes()
    assert len(first) > 2000
    assert first == second


def test_other_records_give_another_figure(run, tmp_path: Path) -> None:
    first = plot_curves({"x": [run(0, n=6)]}, tmp_path / "a.png").read_bytes()
    assert plot_curves({"x": [run(1, n=6)]}, tmp_path / "b.png").read_bytes() != first


def test_panels_name_their_units_and_every_run(run, tmp_path: Path) -> None:
    text = plot_curves(
        {"NVFP4": [run(0), run(1)], "BF16": [run(2)]}, tmp_path / "a.svg"
    ).read_text()
    for label in (
        "reward",
        "held-out accuracy",
        "entropy (nats)",
        "noise σ",
        "rollout step",
        "NVFP4 (2 seeds)",
        "± 1 s.d. over seeds",
        "error bars: ± 1 s.e.",
    ):
        assert f"<!-- {label}" in text or label in text, label


def test_metrics_that_no_run_has_take_no_panel(make_record, tmp_path: Path) -> None:
    text = plot_curves({"x": [make_record()]}, tmp_path / "a.svg").read_text()
    assert "entropy" not in text


def test_records_without_a_curve_are_refused(make_record, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 records hold none of train/reward"):
        plot_curves({"x": [make_record(curves={})]}, tmp_path / "a.png")


def test_a_running_mean_looks_back_and_skips_nan() -> None:
    values = np.array([1.0, 3.0, math.nan, 5.0])
    assert running_mean(values, 2).tolist() == [1.0, 2.0, 3.0, 5.0]
    assert math.isnan(running_mean(np.array([math.nan]), 2)[0])


def test_curves_of_different_length_are_aligned_by_step() -> None:
    steps, values = aligned(
        [Curve(steps=(0, 2), values=(1.0, 2.0)), Curve(steps=(0, 1), values=(3.0, 4.0))]
    )
    assert steps.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(values, [[1.0, math.nan, 2.0], [3.0, 4.0, math.nan]])


def test_bars_show_values_and_series(tmp_path: Path) -> None:
    bars = [
        Bar(label="NF4", value=0.575, stderr=0.013, series="base"),
        Bar(label="NF4", value=0.761, series="trained"),
        Bar(label="NVFP4", value=0.594, series="base"),
    ]
    path = bar_chart(bars, tmp_path / "bars.svg", label="GSM8K mean@1", title="3B")
    text = path.read_text()
    for label in ("NF4", "NVFP4", "trained", "0.575", "GSM8K mean@1"):
        assert label in text
    assert (
        bar_chart(bars, tmp_path / "again.svg", label="GSM8K mean@1", title="3B").read_text()
        == text
    )
    with pytest.raises(ValueError, match="no bars"):
        bar_chart([], tmp_path / "x.png", label="y")


def report_rows(error: float | None) -> list[dict[str, object]]:
    return [
        {"layer": layer, "linear": f"mlp.{name}", "sqnr_db": 20.0 + layer, "output_error": error}
        for layer in range(3)
        for name in ("up_proj", "down_proj")
    ]


def test_a_report_is_drawn_as_the_same_bytes_and_follows_its_numbers(tmp_path: Path) -> None:
    first = plot_linears(report_rows(0.1), tmp_path / "a.png", title="nvfp4, mse").read_bytes()
    assert (
        plot_linears(report_rows(0.1), tmp_path / "b.png", title="nvfp4, mse").read_bytes() == first
    )
    assert (
        plot_linears(report_rows(0.2), tmp_path / "c.png", title="nvfp4, mse").read_bytes() != first
    )


def test_a_report_without_output_errors_has_one_panel(tmp_path: Path) -> None:
    text = plot_linears(report_rows(None), tmp_path / "a.svg").read_text()
    assert "SQNR (dB)" in text
    assert "output error" not in text
    assert "down_proj" in text
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_linears([{"layer": 0, "linear": "q", "sqnr_db": math.inf}], tmp_path / "b.png")
