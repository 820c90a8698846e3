"""The observer through real trainers: completed, stopped, interrupted, failed and resumed runs."""

import csv
import errno
import json
import logging
import os
import re
import signal
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from qerl.record import provenance
from qerl.record.loggers import CsvLog
from qerl.record.observer import RunInfo, RunObserver, TableOptions
from qerl.record.schema import load


@pytest.fixture(autouse=True)
def _keep_sigint():
    """Lightning ignores Ctrl-C for good once it has seen one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def observer(run_info, tmp_path):
    return lambda **options: RunObserver(
        run_info, tmp_path / "out", tmp_path / "results" / "runs", **options
    )


def _stop_at(step: int, error: BaseException):
    def stop(k: int) -> None:
        if k == step:
            raise error

    return stop


def test_a_completed_run_leaves_record_figure_samples_and_completions(
    observer, learner, fit, tmp_path
) -> None:
    watcher = observer()
    fit(learner(5), [watcher])
    record = load(watcher.record_path)
    assert watcher.record_path.parent == tmp_path / "results" / "runs" / "toy"
    assert (record.kind, record.status, record.seed, record.error) == ("run", "completed", 3, None)
    assert record.curves["train/reward"].values == (0.0, 0.1, 0.2, 0.3, 0.4)
    assert record.curves["noise/sigma"].steps == (0, 1, 2, 3, 4)
    assert record.curves["memory/peak_gib"].values[-1] > 0
    assert record.curves["time/step_s"].values[0] > 0
    assert record.summary["steps"] == 5
    assert record.summary["train/reward_first_fifth"] == pytest.approx(0.0)
    assert record.summary["train/reward_last_fifth"] == pytest.approx(0.4)
    assert record.summary["train/reward"] == pytest.approx(0.4)
    assert record.config == {"quant": {"name": "nvfp4"}}
    assert record.device["type"] == "cpu"
    assert {row["rollout_step"] for row in record.samples} == {0, 4}
    out = tmp_path / "out"
    assert load(out / "record.json") == record
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "text 0 of step 4" in (out / "samples.md").read_text()
    lines = (out / "completions.jsonl").read_text().splitlines()
    assert [json.loads(line)["rollout_step"] for line in lines] == [
        k for k in range(5) for _ in "abcd"
    ]


def test_the_summary_is_for_a_person_and_names_every_file(observer, learner, fit) -> None:
    watcher = observer(
        held_out=lambda: {"before": {"mean_at_k": 0.25, "standard_error": 0.031, "problems": 64.0}}
    )
    fit(learner(5), [watcher])
    text = watcher.summary_text()
    assert "run         toy, seed 3: completed\n" in text
    assert re.search(r"steps +5 of 5 in \d+s; below, the means of the first and the last 1\n", text)
    assert "reward      0.000 → 0.400\n" in text
    assert "speed       400 → 404 tok/s\n" in text
    assert "held out    0.250 ± 0.031 before (mean@k ± s.e. over problems)\n" in text
    for label in ("record", "figure", "samples", "completions"):
        line = next(line for line in text.splitlines() if line.startswith(label + " "))
        assert Path(line.split()[1]).is_file()


def test_without_a_record_folder_the_record_stays_in_the_run_folder(
    run_info, learner, fit, tmp_path
) -> None:
    watcher = RunObserver(run_info, tmp_path / "out")
    fit(learner(5), [watcher])
    assert watcher.record_path == tmp_path / "out" / "record.json"


def test_ctrl_c_leaves_the_record_of_an_interrupted_run(observer, learner, fit, tmp_path) -> None:
    watcher = observer()
    with pytest.raises(SystemExit):
        fit(learner(5, _stop_at(3, KeyboardInterrupt())), [watcher])
    record = load(watcher.record_path)
    assert (record.status, record.error) == ("interrupted", None)
    assert record.curves["train/reward"].steps == (0, 1, 2)
    assert watcher.record_path.stem.endswith("-interrupted")
    assert (tmp_path / "out" / "record-interrupted.json").exists()
    assert (tmp_path / "out" / "curves.png").exists()


def test_an_error_leaves_the_record_of_a_failed_run_with_its_reason(observer, learner, fit) -> None:
    watcher = observer()
    with pytest.raises(RuntimeError, match="two\nlines"):
        fit(learner(5, _stop_at(2, RuntimeError("out of memory:\ntwo\nlines"))), [watcher])
    record = load(watcher.record_path)
    assert (record.status, record.error) == ("failed", "RuntimeError: out of memory: two lines")
    assert "toy, seed 3: failed" in watcher.summary_text()


def test_a_run_that_stops_early_without_an_error_counts_as_interrupted(
    observer, learner, fit
) -> None:
    module = learner(5)

    def stop(k: int) -> None:
        module.trainer.should_stop = k == 1

    module.stop = stop
    watcher = observer()
    fit(module, [watcher])
    assert load(watcher.record_path).status == "interrupted"
    assert load(watcher.record_path).curves["train/reward"].steps == (0, 1)


def test_a_run_without_a_step_leaves_no_record(observer, learner, fit, tmp_path) -> None:
    watcher = observer()
    with pytest.raises(RuntimeError):
        fit(learner(5, _stop_at(0, RuntimeError("no memory"))), [watcher])
    assert watcher.record_path is None
    assert not list(tmp_path.rglob("*.json"))
    assert "0 of 5" in watcher.summary_text()


def test_the_record_of_a_resumed_run_is_the_whole_run(
    observer, learner, fit, save_every, tmp_path, monkeypatch
) -> None:
    hours = iter(range(24))
    monkeypatch.setattr(provenance, "now", lambda: f"2025-01-31T{next(hours):02d}:00:00+00:00")
    first = observer()
    with pytest.raises(RuntimeError):
        fit(
            learner(5, _stop_at(4, RuntimeError("power cut"))),
            [first, save_every(tmp_path, (2,))],
        )
    assert load(first.record_path).curves["train/reward"].steps == (0, 1, 2, 3)
    second = observer()
    fit(learner(5), [second], checkpoint=tmp_path / "step-2.ckpt")
    record = load(second.record_path)
    assert record.status == "completed"
    assert record.resumed_at == (2,)
    assert record.curves["train/reward"].steps == (0, 1, 2, 3, 4)
    assert record.curves["train/reward"].values == (0.0, 0.1, 0.2, 0.3, 0.4)
    assert record.started == "2025-01-31T00:00:00+00:00"
    assert record.ended == "2025-01-31T03:00:00+00:00"
    assert {row["rollout_step"] for row in record.samples} == {0, 4}
    assert first.record_path != second.record_path
    assert first.record_path.exists()
    lines = (tmp_path / "out" / "completions.jsonl").read_text().splitlines()
    assert [json.loads(line)["rollout_step"] for line in lines] == [
        k for k in range(5) for _ in "abcd"
    ]


def test_held_out_results_become_points_and_figures_of_the_summary(observer, learner, fit) -> None:
    results: dict[str, dict[str, float]] = {
        "before": {"mean_at_k": 0.25, "standard_error": 0.03, "problems": 64.0}
    }

    def finish(k: int) -> None:
        if k == 4:
            results["after"] = {"mean_at_k": 0.5, "standard_error": 0.04, "problems": 64.0}

    watcher = observer(held_out=lambda: results)
    fit(learner(5, finish), [watcher])
    record = load(watcher.record_path)
    assert record.curves["held_out/mean_at_k"].steps == (0, 5)
    assert record.curves["held_out/mean_at_k"].values == (0.25, 0.5)
    assert record.curves["held_out/mean_at_k_stderr"].values == (0.03, 0.04)
    assert record.summary["held_out_after/mean_at_k"] == 0.5
    assert record.summary["held_out_after/mean_at_k_stderr"] == 0.04
    assert record.summary["held_out/mean_at_k"] == 0.5


def test_the_csv_has_one_row_a_rollout_step_on_the_disk(observer, learner, fit, tmp_path) -> None:
    path = tmp_path / "out" / "csv" / "version_0" / "metrics.csv"
    lines = []

    def look(k: int) -> None:
        lines.append(len(path.read_text().splitlines()) if path.exists() else 0)

    fit(learner(3, look), [observer()], logger=CsvLog().open(tmp_path / "out", "toy", None))
    assert lines == [0, 2, 3]  # the header and every step so far, before the run ends
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [0, 1, 2]
    assert [float(row["train/reward"]) for row in rows] == [0.0, 0.1, 0.2]
    assert float(rows[1]["rollout/tok_per_s"]) == 401


def test_a_resumed_run_keeps_the_csv_of_its_first_stretch(
    observer, learner, fit, save_every, tmp_path
) -> None:
    def logger() -> CSVLogger:
        return CsvLog().open(tmp_path / "out", "toy", None)

    fit(learner(5), [observer(), save_every(tmp_path, (2,))], logger=logger())
    fit(learner(5), [observer()], logger=logger(), checkpoint=tmp_path / "step-2.ckpt")
    for version, steps in (("version_0", 5), ("version_1", 3)):
        path = tmp_path / "out" / "csv" / version / "metrics.csv"
        assert len(path.read_text().splitlines()) == 1 + steps


def test_a_full_disk_at_the_end_is_one_line_and_spoils_no_record(
    observer, learner, fit, tmp_path, monkeypatch
) -> None:
    watcher = observer()
    fit(learner(5), [watcher])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"is not written \(No space left on device\)"):
        fit(learner(5), [observer()])
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_a_full_disk_does_not_hide_the_error_that_ended_the_run(
    observer, learner, fit, monkeypatch, caplog
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="the real reason"):
        fit(learner(5, _stop_at(2, RuntimeError("the real reason"))), [observer()])
    assert any("No space left on device" in r.message for r in caplog.records)


def test_completions_are_kept_every_n_steps(observer, learner, fit, tmp_path) -> None:
    fit(learner(5), [observer(table=TableOptions(every_n_steps=2, max_rows=1))])
    lines = (tmp_path / "out" / "completions.jsonl").read_text().splitlines()
    assert [json.loads(line)["rollout_step"] for line in lines] == [0, 2, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"name": "a b"}, "record.name='a b'"), ({"config": {"x": {1, 2}}}, "record.config.x=")],
)
def test_what_a_record_would_refuse_is_refused_before_the_run(changes, message) -> None:
    fields = {"name": "toy", "seed": 0, "total_steps": 1, "config": {}}
    with pytest.raises(ValueError, match=message):
        RunInfo(**(fields | changes))
