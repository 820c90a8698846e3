"""Runs trainings of one configuration in forked children and kills them where it is told to.

Not a test by itself: test_resume.py starts it once, so that the libraries are imported once for
all the runs. Prints one JSON line for each run: what its completions and curves were.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from qerl import build
from qerl.training.checkpoint import AtomicCheckpointIO
from qerl.training.learner import PolicyLearner

ROOT = Path(__file__).parent.parent.parent
TIMED = ("time/", "memory/", "rollout/seconds", "rollout/tok_per_s", "reward_s")


def configuration(overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def die_at(place: str, step: int) -> None:
    """Let this process kill itself, as SIGKILL from outside would, at a place of a step."""
    if place == "save":
        save = AtomicCheckpointIO.save_checkpoint

        def dying_save(self, checkpoint, path, storage_options=None):  # type: ignore[no-untyped-def]
            if checkpoint["qerl"]["rollout_step"] == step + 1:
                Path(path).with_suffix(".partial-0").write_bytes(b"half a checkpoint")
                os.kill(os.getpid(), signal.SIGKILL)
            save(self, checkpoint, path, storage_options)

        AtomicCheckpointIO.save_checkpoint = dying_save  # type: ignore[method-assign]
        return
    name = {"sample": "sample", "update": "_apply_gradient"}[place]
    original = getattr(PolicyLearner, name)

    def dying(self, *args):  # type: ignore[no-untyped-def]
        if self.rollout_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args)

    setattr(PolicyLearner, name, dying)


def run(overrides: list[str], kill: tuple[str, int] | None = None) -> int:
    """Train in a child; its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        if kill is not None:
            die_at(*kill)
        try:
            build.train(configuration(overrides))
        except BaseException as error:  # the child must never return into the parent's code
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def facts(run_dir: Path) -> dict[str, object]:
    """What must not depend on interruptions."""
    record = json.loads((run_dir / "record.json").read_text())
    rows = [json.loads(line) for line in (run_dir / "completions.jsonl").read_text().splitlines()]
    curves = {
        name: curve for name, curve in record["curves"].items() if not any(t in name for t in TIMED)
    }
    return {"status": record["status"], "curves": curves, "completions": rows}


def newest(folder: Path) -> Path:
    return max(folder.glob("out/*/*"), key=lambda path: path.stat().st_mtime)


def main() -> None:
    overrides, steps = sys.argv[1].split(","), int(sys.argv[2])
    base = Path.cwd()
    for name, kill in [("straight", None)] + [
        (f"{place}-{step}", (place, step))
        for step in range(steps)
        for place in ("sample", "update", "save")
    ]:
        folder = base / name
        folder.mkdir()
        os.chdir(folder)
        status = run(overrides, kill)
        expected = 0 if kill is None else -signal.SIGKILL
        assert status == expected, f"{name}: exit {status}, expected {expected}"
        run_dir = newest(folder)
        if kill is not None:
            status = run([*overrides, f"resume={run_dir}"])
            assert status == 0, f"{name}: the resumed run exited with {status}"
        sys.stdout.write(json.dumps({"name": name, **facts(run_dir)}) + "\n")


if __name__ == "__main__":
    main()
