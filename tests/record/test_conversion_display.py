"""The progress of a conversion: a line a part off a terminal, a bar with an ETA on one."""

import io

from rich.console import Console

from qerl.convert.job import Stage
from qerl.record import conversion as display_file
from qerl.record.conversion import ConversionProgress


def stage(label: str, done: int, *, found: bool = False) -> Stage:
    return Stage(label=label, done=done, total=100_000_000, found=found)


def shown(stages: list[Stage], monkeypatch, *, terminal: bool = False) -> str:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(display_file.time, "monotonic", lambda: float(next(clock)))
    out = io.StringIO()
    with ConversionProgress("x", Console(file=out, force_terminal=terminal, width=120)) as bar:
        for each in stages:
            bar.stage(each)
            bar.calibration("measure", 1, 2)
    return out.getvalue()


def test_a_line_a_part_with_speed_and_eta(monkeypatch) -> None:
    lines = shown(
        [stage("embedding", 20_000_000), stage("layer 0", 40_000_000), stage("head", 100_000_000)],
        monkeypatch,
    ).splitlines()
    assert "20 %  embedding  eta –" in lines[0]
    assert "40 %  layer 0  2.0 M weights/s  eta 30s" in lines[1]
    assert "100 %  head  4.0 M weights/s  eta 0s" in lines[2]


def test_parts_that_were_found_do_not_count_for_the_speed(monkeypatch) -> None:
    found = [stage("embedding", 20_000_000, found=True), stage("layer 0", 50_000_000, found=True)]
    made = [stage("layer 1", 60_000_000), stage("layer 2", 70_000_000)]
    lines = shown([*found, *made], monkeypatch).splitlines()
    assert len(lines) == 2
    assert "60 %  layer 1  eta –  2 parts found" in lines[0]
    assert "70 %  layer 2  1.0 M weights/s  eta 30s" in lines[1]


def test_a_terminal_shows_a_bar(monkeypatch) -> None:
    text = shown(
        [stage("embedding", 20_000_000), stage("head", 100_000_000)], monkeypatch, terminal=True
    )
    assert "100 %" in text
    assert "━" in text
