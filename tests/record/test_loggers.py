"""The logger options; W&B with its real client, offline."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from hydra.utils import instantiate
from omegaconf import OmegaConf
from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

from qerl.record.loggers import CsvLog, NoLog, WandbLog, WandbRun, saved_wandb_id
from qerl.record.observer import RunObserver

CONF = Path(__file__).parents[2] / "conf" / "logger"


@pytest.fixture(autouse=True, scope="module")
def _no_account(tmp_path_factory):
    """A home without a login, and no network needed for anything below."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setenv("NETRC", str(home / "netrc"))
        patch.setenv("WANDB_CONFIG_DIR", str(home / "config"))
        patch.setenv("WANDB_CACHE_DIR", str(home / "cache"))
        yield
        wandb.teardown()


def _transaction_log(path: Path) -> list[WandbRecord]:
    """Records of a .wandb file: LevelDB's log format in blocks of 32 KiB after 7 bytes of header.

    Each chunk: crc32 (4 bytes), length (2), type (1: whole, 2: first, 3: middle, 4: last).
    """
    wandb.teardown()  # its service may hold the last bytes for a moment after a run's end
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    records, pending, at = [], b"", 7
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if kind == 0:
            break
        pending += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = WandbRecord()
            record.ParseFromString(pending)
            records.append(record)
            pending = b""
    return records


def _history(path: Path) -> list[dict[str, Any]]:
    return [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        for record in _transaction_log(path)
        if record.WhichOneof("record_type") == "history"
    ]


def _offline_runs(folder: Path) -> list[Path]:
    return sorted(
        folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime_ns
    )


@pytest.mark.parametrize("name", ["csv", "wandb", "none"])
def test_every_option_of_the_group_builds(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    option = instantiate(OmegaConf.load(CONF / f"{name}.yaml"), _convert_="all")
    assert {"csv": CsvLog, "wandb": WandbLog, "none": NoLog}[name] is type(option)
    if name == "wandb":
        assert option.mode == "offline"
        assert option == WandbLog(mode="offline", tags=[])
    if name == "none":
        assert option.open(tmp_path, "toy", None) is False


def test_a_run_offline_holds_metrics_config_and_completions(
    run_info, learner, fit, tmp_path
) -> None:
    out = tmp_path / "out"
    option = WandbLog(mode="offline", table_every_n_steps=2, tags=("toy",))
    logger = option.open(out, "toy-seed3", None)
    watcher = RunObserver(run_info, out)
    fit(learner(5), [watcher], logger=logger)

    (path,) = _offline_runs(out)
    history = _history(path)
    rewards = {
        row["trainer/global_step"]: row["train/reward"] for row in history if "train/reward" in row
    }
    assert rewards == {k: k / 10 for k in range(5)}
    tables = [
        row["trainer/global_step"]
        for row in history
        if "completions/_type" in row or "completions" in row
    ]
    assert tables == [0, 2, 4]
    assert any("memory/peak_gib" in row for row in history)
    (table,) = [
        json.loads(p.read_text())
        for p in path.parent.glob("files/media/table/completions_*.json")
        if "of step 4" in p.read_text()
    ]
    assert len(table["data"]) == 4
    assert table["data"][0][table["columns"].index("completion")] == "text 0 of step 4<|end|>"
    run = next(r.run for r in _transaction_log(path) if r.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name, run.run_id) == ("qerl", "toy-seed3", logger.run_id)
    assert f"wandb sync {path.parent}" in watcher.summary_text()
    assert not list(path.parent.glob("files/**/*.ckpt"))


def test_a_resumed_run_goes_on_in_the_same_wandb_run(
    run_info, learner, fit, save_every, tmp_path
) -> None:
    out = tmp_path / "out"
    option = WandbLog(mode="offline")
    first = option.open(out, "toy", None)
    fit(learner(5), [RunObserver(run_info, out), save_every(tmp_path, (2,))], logger=first)
    checkpoint = tmp_path / "step-2.ckpt"
    assert saved_wandb_id(checkpoint) == first.run_id
    # W&B names an offline folder by the second: two starts in one second need two places.
    later = tmp_path / "later"
    second = option.open(later, "toy", checkpoint)
    assert second.run_id == first.run_id
    fit(learner(5), [RunObserver(run_info, later)], logger=second, checkpoint=checkpoint)
    paths = [*_offline_runs(out), *_offline_runs(later)]
    assert [path.name for path in paths] == [f"run-{first.run_id}.wandb"] * 2
    assert [r["trainer/global_step"] for r in _history(paths[-1]) if "train/reward" in r] == [
        2,
        3,
        4,
    ]


def test_a_second_run_in_one_process_is_a_run_of_its_own(run_info, learner, fit, tmp_path) -> None:
    option = WandbLog(mode="offline")
    for name in ("a", "b"):
        logger = option.open(tmp_path / name, name, None)
        fit(learner(2), [RunObserver(run_info, tmp_path / name)], logger=logger)
        assert wandb.run is None
        assert len(_offline_runs(tmp_path / name)) == 1


def test_online_without_a_login_is_one_line_with_the_cure(run_info, learner, fit, tmp_path) -> None:
    logger = WandbLog(mode="online", init_timeout_s=5).open(tmp_path / "out", "toy", None)
    with pytest.raises(ValueError, match=r"logger=wandb: no run could be started") as caught:
        fit(learner(2), [RunObserver(run_info, tmp_path / "out")], logger=logger)
    assert "logger.mode=offline" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_disabled_logs_nowhere(run_info, learner, fit, tmp_path) -> None:
    logger = WandbLog(mode="disabled").open(tmp_path / "out", "toy", None)
    watcher = RunObserver(run_info, tmp_path / "out")
    fit(learner(5), [watcher], logger=logger)
    assert not _offline_runs(tmp_path / "out")
    assert watcher.record_path is not None


def test_a_checkpoint_of_a_run_logged_elsewhere_starts_a_new_wandb_run(tmp_path) -> None:
    torch.save({"callbacks": {"RunObserver": {"curves": {}}}}, tmp_path / "x.ckpt")
    assert saved_wandb_id(tmp_path / "x.ckpt") is None
    logger = WandbLog(mode="offline").open(tmp_path, "toy", tmp_path / "x.ckpt")
    assert isinstance(logger, WandbRun)
    assert len(logger.run_id) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "on"}, "logger.mode='on': online, offline or disabled"),
        ({"table_every_n_steps": 0}, "logger.table_every_n_steps=0: at least 1"),
    ],
)
def test_wrong_options_name_value_and_constraint(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WandbLog(**options)
