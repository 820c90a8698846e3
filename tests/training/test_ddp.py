"""Two processes are one run: they split its prompts, and learn what one process would."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
OVERRIDES = (
    "experiment=smoke",
    "trainer.max_steps=2",
    "trainer.evaluation.problems=0",
    "algorithm.prompts_per_step=8",
    "algorithm.group_size=16",
    "data.max_new_tokens=1",  # a random model then earns a reward in the first step
    "optimizer.schedule.peak=3e-3",
    "logger=none",
)


def _run(folder: Path, *overrides: str) -> dict[str, object]:
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "train.py"), *OVERRIDES, *overrides]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    records = list(folder.glob("out/*/*/record.json"))
    assert len(records) == 1, "one run leaves one record, whatever the number of processes"
    record: dict[str, object] = json.loads(records[0].read_text())
    return record


@pytest.mark.timeout(280)
def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    one = _run(tmp_path / "one", "trainer=cpu")["curves"]
    two = _run(
        tmp_path / "two", "trainer=ddp", "trainer.compute.device=cpu", "trainer.backend=gloo"
    )["curves"]
    assert max(one["train/grad_norm"]["values"]) > 0, "nothing was learned from"  # type: ignore[index]
    for name in ("train/reward", "train/loss", "train/grad_norm", "rollout/length_mean"):
        assert two[name]["values"] == pytest.approx(one[name]["values"], rel=1e-4, abs=1e-6), name  # type: ignore[index]


@pytest.mark.timeout(280)
def test_dynamic_sampling_of_two_processes_stays_in_step(tmp_path: Path) -> None:
    record = _run(
        tmp_path / "dapo",
        "trainer=ddp",
        "trainer.compute.device=cpu",
        "trainer.backend=gloo",
        "algorithm=dapo",
        "algorithm.group_size=4",
        "algorithm.prompts_per_step=4",
        "algorithm.dynamic_sampling.max_rollouts=40",
        "trainer.max_steps=3",
    )
    draws = record["curves"]["rollout/draws"]["values"]  # type: ignore[index]
    assert len(draws) == 3
    assert max(draws) > 1
    assert all(draw == int(draw) for draw in draws), "processes drew different numbers of times"
