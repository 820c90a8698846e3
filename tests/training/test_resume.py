"""SIGKILL anywhere in any step, then resume: the run is the run that was never killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 3
OVERRIDES = [
    "experiment=smoke",
    f"trainer.max_steps={STEPS}",
    "noise.schedule.stages=3",
    "algorithm.prompts_per_step=8",
    "algorithm.group_size=16",
    "data.max_new_tokens=1",  # a random model then earns a reward in the first step
    "optimizer.schedule.peak=3e-3",
    "trainer.evaluation.problems=2",
    "logger=none",
]


@pytest.mark.timeout(280)
def test_a_run_killed_at_any_step_resumes_to_the_same_run(tmp_path: Path) -> None:
    driver = Path(__file__).with_name("kill_and_resume.py")
    command = [sys.executable, str(driver), ",".join(OVERRIDES), str(STEPS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    straight, killed = runs[0], runs[1:]
    assert straight["status"] == "completed"
    assert len(straight["curves"]["train/reward"]["values"]) == STEPS
    assert any(row["rollout_step"] == STEPS - 1 for row in straight["completions"])
    assert max(straight["curves"]["train/grad_norm"]["values"]) > 0, "nothing was learned from"
    assert len(killed) == 3 * STEPS
    for run in killed:
        for name, curve in straight["curves"].items():
            assert run["curves"][name] == curve, f"{run['name']}: {name}"
        assert run["completions"] == straight["completions"], run["name"]
