"""Checkpoints are whole or absent, and belong to one run."""

import errno
from pathlib import Path

import pytest
import torch

from qerl.training.checkpoint import (
    AtomicCheckpointIO,
    CheckpointError,
    check_same_run,
    latest,
    latest_whole,
)


def test_a_full_disk_keeps_the_last_checkpoint_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = AtomicCheckpointIO()
    io.save_checkpoint({"qerl": 1}, tmp_path / "step-000001.ckpt")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"No space left.*step-000001\.ckpt.*free disk space"):
        io.save_checkpoint({"qerl": 2}, tmp_path / "step-000002.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001.ckpt"]
    assert latest(tmp_path) == tmp_path / "step-000001.ckpt"


def test_latest_ignores_half_written_and_foreign_files(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for name in ("step-000009.partial-1", "step-12.ckpt", "step-000002.ckpt", "step-000010.ckpt"):
        (tmp_path / name).touch()
    assert latest(tmp_path) == tmp_path / "step-000010.ckpt"


def test_another_run_is_refused_with_what_differs() -> None:
    saved = {"seed": 0, "algorithm.group_size": 8}
    check_same_run(saved, dict(saved))
    with pytest.raises(CheckpointError, match=r"algorithm\.group_size: 8 -> 4"):
        check_same_run(saved, {"seed": 0, "algorithm.group_size": 4})
    with pytest.raises(CheckpointError, match=r"noise: None -> 1"):
        check_same_run(saved, {**saved, "noise": 1})


def test_a_damaged_newest_checkpoint_gives_way_to_the_whole_one_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io = AtomicCheckpointIO()
    for step in (1, 2, 3):
        io.save_checkpoint({"qerl": {"rollout_step": step}}, tmp_path / f"step-00000{step}.ckpt")
    whole = (tmp_path / "step-000002.ckpt").read_bytes()
    (tmp_path / "step-000002.ckpt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "step-000003.ckpt").write_bytes(b"")
    path, state = latest_whole(tmp_path)
    assert (path.name, state) == ("step-000001.ckpt", {"rollout_step": 1})
    assert "step-000003.ckpt is damaged" in caplog.text
    path.unlink()
    with pytest.raises(CheckpointError, match=r"only damaged ones \(step-000003"):
        latest_whole(tmp_path)
