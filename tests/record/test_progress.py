"""The live display: plain lines in a file, bars on a terminal."""

import io
import logging
import re
import sys

import pytest
from rich.console import Console

from qerl.record.progress import StepProgress, duration

METRICS = {
    "train/reward": 0.414,
    "train/entropy_nats": 0.321,
    "noise/sigma": 0.00561,
    "rollout/tok_per_s": 411.7,
}


def _file_console() -> Console:
    return Console(file=io.StringIO(), width=40)


def _terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def _written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_in_a_file_every_step_is_one_line_whatever_the_width() -> None:
    console = _file_console()
    progress = StepProgress(20, console=console)
    progress.on_phase("sampling", 3, 8)
    progress.show_step(11, METRICS, seconds=10.0)
    progress.show_step(12, METRICS | {"train/reward": float("nan")}, seconds=20.0)
    assert _written(console) == (
        "step 12/20  reward 0.41  entropy 0.32 nats  sigma 0.0056  412 tok/s  eta 1m20s\n"
        "step 13/20  reward –  entropy 0.32 nats  sigma 0.0056  412 tok/s  eta 1m45s\n"
    )


def test_figures_that_a_run_lacks_are_left_out() -> None:
    console = _file_console()
    StepProgress(2, console=console).show_step(0, {"train/reward": 1.0}, seconds=1.0)
    assert _written(console) == "step 1/2  reward 1.00  eta 1s\n"


@pytest.mark.parametrize("width", [80, 150])
def test_on_a_terminal_bar_figures_and_phase_fit_the_width(width: int) -> None:
    console = _terminal(width)
    progress = StepProgress(20, console=console)
    progress.show_step(10, METRICS, seconds=10.0)
    progress.show_step(11, METRICS | {"train/reward": 0.2}, seconds=10.0)
    progress._phase = ("sampling", 512, 2048)
    console.print(progress)
    lines = _written(console).splitlines()
    assert len(lines) == (2 if width == 150 else 3)
    assert max(len(line.rstrip()) for line in lines) <= width
    text = "\n".join(lines)
    assert "step 12/20" in text
    assert "reward 0.20 (mean 0.31)  entropy 0.32 nats  sigma 0.0056  412 tok/s" in text
    assert "eta 1m20s" in text
    assert re.search(r"sampling +━+.* 512/2048", text)


def test_it_takes_the_place_of_lightnings_bar_and_shows_phases(learner, fit) -> None:
    console = _terminal()
    progress = StepProgress(3, console=console)
    module = learner(3)
    module.observers.append(progress)
    trainer = fit(module, [progress], bar=True)
    assert trainer.progress_bar_callback is progress
    text = _written(console)
    assert "step 3/3" in text
    assert "reward 0.20 (mean 0.10)" in text
    assert "Epoch" not in text


def test_through_a_trainer_a_file_gets_one_line_a_step(learner, fit) -> None:
    console = _file_console()
    fit(learner(3), [StepProgress(3, console=console)], bar=True)
    assert [line.split("  ")[0] for line in _written(console).splitlines()] == [
        "step 1/3",
        "step 2/3",
        "step 3/3",
    ]


def test_log_lines_go_above_the_display_and_back_to_their_stream_afterwards() -> None:
    handler = logging.StreamHandler(sys.stdout)
    logging.getLogger().addHandler(handler)
    before = handler.stream
    console = _terminal()
    progress = StepProgress(3, console=console)
    try:
        progress.on_phase("sampling", 1, 2)
        assert handler.stream is not before
        logging.getLogger("qerl").warning("low on memory")
        progress._close()
        assert handler.stream is before
    finally:
        logging.getLogger().removeHandler(handler)
    assert "low on memory\n" in _written(console)


def test_an_error_gives_the_terminal_back(learner, fit) -> None:
    def fail(k: int) -> None:
        if k == 1:
            raise RuntimeError("x")

    progress = StepProgress(3, console=_terminal())
    with pytest.raises(RuntimeError):
        fit(learner(3, fail), [progress], bar=True)
    assert progress._live is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (80, "1m20s"), (3600, "1h00m"), (7500, "2h05m")],
)
def test_durations_read_at_a_glance(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="total_steps=0: at least 1 rollout step"):
        StepProgress(0)
