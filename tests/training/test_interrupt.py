"""Ctrl-C leaves a checkpoint, and the command that is printed continues the run."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from qerl import build
from qerl.training.checkpoint import CheckpointError

ROOT = Path(__file__).parent.parent.parent


def _start(folder: Path, *overrides: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *overrides],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_a_signal_saves_says_how_to_resume_and_that_command_completes_the_run(
    tmp_path: Path, number: int, status: int
) -> None:
    steps = 400
    run = _start(
        tmp_path,
        "experiment=smoke",
        f"trainer.max_steps={steps}",
        "trainer.checkpoint_every=1000",
        "trainer.evaluation.problems=0",
        "logger=none",
    )
    assert run.stdout is not None
    said = []
    for line in run.stdout:
        said.append(line)
        if line.startswith("step 3/"):
            run.send_signal(number)
            break
    said.append(run.stdout.read())
    text = "".join(said)
    assert run.wait() == status, text
    assert "finishing the step in progress" in text
    found = re.search(r"python train\.py (.*resume=\S+)", text)
    assert found, text
    run_dir = next(tmp_path.glob("out/*/*"))
    record = json.loads((run_dir / "record-interrupted.json").read_text())
    assert record["status"] == "interrupted"
    done = len(record["curves"]["train/reward"]["values"])
    assert 3 <= done < steps
    assert (run_dir / "adapter" / "adapter_model.safetensors").exists()

    resumed = _start(tmp_path, *shlex.split(found[1]))
    out, _ = resumed.communicate()
    assert resumed.returncode == 0, out
    record = json.loads((run_dir / "record.json").read_text())
    assert record["status"] == "completed"
    assert record["curves"]["train/reward"]["steps"] == list(range(steps))
    assert record["resumed_at"] == [done]


@pytest.mark.timeout(100)
def test_a_refusal_is_one_line_and_a_failing_exit_status(tmp_path: Path) -> None:
    run = _start(tmp_path, "experiment=smoke", "algorithm.group_size=1")
    out, _ = run.communicate()
    assert run.returncode == 1
    assert "Traceback" not in out
    last = out.strip().splitlines()[-1]
    assert last.startswith("error: algorithm.group_size=1: ")


@pytest.mark.timeout(100)
def test_a_refused_resume_changes_nothing_in_the_run_folder(
    composed: Callable[..., DictConfig],
) -> None:
    small = ("experiment=smoke", "trainer.max_steps=1", "trainer.evaluation.problems=0")
    build.train(composed(*small, "logger=none", "trainer=cpu"))
    run_dir = next(Path("out").glob("*/*"))
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"algorithm\.temperature: 1\.0 -> 0\.5"):
        build.train(
            composed(
                *small,
                "logger=none",
                "trainer=cpu",
                "algorithm.temperature=0.5",
                f"resume={run_dir}",
            )
        )
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
