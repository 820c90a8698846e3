"""A conversion is whole or not there: kills, full disks, other settings, two processes."""

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl.convert import convert as convert_file
from qerl.convert.convert import convert
from qerl.convert.unfinished import Unfinished
from qerl.model.shards import SafetensorsWeights
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nvfp4 import NVFP4

Jobs = Callable[..., Any]
Digest = Callable[[Path], dict[str, str]]


def killed_at(number: int, call: Callable[[], object]) -> bool:
    """Whether a child that runs `call` dies of a real SIGKILL before its `number`-th disk call.

    Counted are fsync, rename and unlink: between two of them the disk does not change but for the
    growth of one file, which every count sees in another state.
    """
    child = os.fork()
    if child == 0:
        left = [number]

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return wrapped

        status = 1
        try:
            for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
                setattr(os, name, counted(getattr(os, name)))
            call()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def test_a_kill_at_any_point_costs_no_byte(job: Jobs, digest: Digest, tmp_path: Path) -> None:
    few = {"shard_bytes": 45_000}
    whole = convert(job(out=tmp_path / "whole", **few)).folder
    wanted = digest(whole)
    assert sum(name.endswith(".safetensors") for name in wanted) == 3
    out, number = tmp_path / "out", 0
    while True:
        number += 1
        assert not out.exists()
        died = killed_at(number, lambda: convert(job(**few)))
        if out.exists():  # killed or not: what has the name is whole
            assert digest(out) == wanted
        else:
            assert died
            with pytest.raises(ValueError, match="unfinished"):
                SafetensorsWeights(tmp_path / "out.partial" / "model")
            convert(job(**few))
            assert digest(out) == wanted
        convert(job(**few))
        assert not (tmp_path / "out.partial").exists()
        for path in out.iterdir():
            path.unlink()
        out.rmdir()
        if not died:
            break
    assert number > 20


def test_kill_after_kill_ends_with_the_same_bytes(
    job: Jobs, digest: Digest, tmp_path: Path
) -> None:
    wanted = digest(convert(job(out=tmp_path / "whole")).folder)
    deaths = 0
    while killed_at(8 + 2 * deaths, lambda: convert(job())):
        deaths += 1
    assert deaths >= 5
    assert digest(tmp_path / "out") == wanted


def test_finished_shards_are_not_made_again(job: Jobs, tmp_path: Path) -> None:
    def stop(stage: Any) -> None:
        if stage.label == "layer 1":
            raise RuntimeError

    with pytest.raises(RuntimeError):
        convert(job(), stop)
    stages: list[Any] = []
    convert(job(), stages.append)
    assert [(stage.label, stage.found) for stage in stages] == [
        ("embedding", True),
        ("layer 0", True),
        ("layer 1", False),
        ("layer 2", False),
        ("head", False),
    ]
    assert stages[-1].done == stages[-1].total
    assert convert(job()).found


def test_a_shard_that_rotted_is_made_again(job: Jobs, digest: Digest, tmp_path: Path) -> None:
    wanted = digest(convert(job(out=tmp_path / "whole")).folder)

    def spoil(stage: Any) -> None:
        if stage.label == "layer 2":
            shard = tmp_path / "out.partial/model/model-00002-of-00005.safetensors"
            data = bytearray(shard.read_bytes())
            data[-1] ^= 1
            shard.write_bytes(data)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        convert(job(), spoil)
    convert(job())
    assert digest(tmp_path / "out") == wanted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": MXFP4()}, r"format\.name: 'nvfp4' -> 'mxfp4'"),
        ({"format": NVFP4(power_of_two_scale=True)}, r"power_of_two_scale: False -> True"),
        ({"shard_bytes": 30_000}, r"shard_bytes: 20000 -> 30000"),
        ({"facts": {"commit": "abc"}}, r"commit: None -> 'abc'"),
    ],
)
def test_other_settings_do_not_go_on_with_the_work(
    job: Jobs, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    assert killed_at(12, lambda: convert(job()))
    with pytest.raises(ValueError, match=rf"out\.partial was begun with other settings.*{words}"):
        convert(job(**changes))
    convert(job())
    with pytest.raises(ValueError, match=rf"exists and was made with other settings.*{words}"):
        convert(job(**changes))


def test_other_settings_begin_anew_where_no_shard_is_finished(
    job: Jobs, tmp_path: Path, digest: Digest
) -> None:
    with Unfinished(tmp_path / "out", {"shard_bytes": 1}) as work:
        work.take_up()
        (work.folder / "model-00001-of-00005.safetensors").write_bytes(b"half")
    wanted = digest(convert(job(out=tmp_path / "whole")).folder)
    convert(job())
    assert digest(tmp_path / "out") == wanted


def test_another_source_does_not_go_on_with_the_work(
    job: Jobs, checkpoint: Path, tmp_path: Path
) -> None:
    assert killed_at(12, lambda: convert(job()))
    path = checkpoint / "two.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"other settings \(source\.weights: "):
        convert(job())


def test_a_changed_tokenizer_does_not_go_on_with_the_work(job: Jobs, checkpoint: Path) -> None:
    assert killed_at(12, lambda: convert(job()))
    path = checkpoint / "tokenizer_config.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ValueError, match=r"other settings \(source\.files: "):
        convert(job())


def test_two_processes_do_not_write_one_folder(job: Jobs, tmp_path: Path) -> None:
    with (
        Unfinished(tmp_path / "out", {}),
        pytest.raises(ValueError, match=r"out\.partial: another process writes there"),
    ):
        convert(job())
    convert(job())


def test_a_folder_of_somebody_else_is_not_overwritten(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for content in (None, "{}"):
        if content is not None:
            (tmp_path / "out" / "checksums.json").write_text(content)
        with pytest.raises(ValueError, match=r"out exists and is no conversion; choose another"):
            convert(job())


def test_a_refused_folder_leaves_no_trace_of_the_attempt(job: Jobs, tmp_path: Path) -> None:
    convert(job())
    (tmp_path / "file").touch()
    for out, changes in (("out", {"shard_bytes": 30_000}), ("file", {})):
        with pytest.raises(ValueError, match=rf"out=.*{out} exists"):
            convert(job(out=tmp_path / out, **changes))
        assert not (tmp_path / f"{out}.partial").exists()


@pytest.mark.parametrize("out", ["", ".", "..", "/", "made.partial", "made.partial/model"])
def test_a_name_under_which_no_folder_could_be_found_whole_is_refused(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"out={out or '.'}: .*choose another out="):
        convert(job(out=Path(out)))
    assert not list(tmp_path.glob("*.partial"))


def test_a_full_disk_is_one_line_and_the_work_goes_on_afterwards(
    job: Jobs, digest: Digest, tmp_path: Path
) -> None:
    wanted = digest(convert(job(out=tmp_path / "whole")).folder)
    full = tmp_path / "out.partial/model/model-00003-of-00005.safetensors"

    def fill(stage: Any) -> None:
        if stage.label == "layer 0":
            full.symlink_to("/dev/full")  # every write there fails as on a full disk

    with pytest.raises(OSError, match=r"No space left on device.*make room and give the same") as e:
        convert(job(), fill)
    assert e.value.errno == errno.ENOSPC
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out").exists()
    convert(job())
    assert digest(tmp_path / "out") == wanted


def test_a_disk_without_room_is_refused_before_the_first_weight(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = convert_file.shutil.disk_usage(tmp_path)._replace(free=10_000_000)
    monkeypatch.setattr(convert_file.shutil, "disk_usage", lambda path: usage)
    stages: list[Any] = []
    with pytest.raises(ValueError, match=r"0\.07 GB to write, 0\.01 GB free; make room"):
        convert(job(), stages.append)
    assert not stages


def test_checksums_list_every_file_and_the_settings(
    job: Jobs, digest: Digest, tmp_path: Path
) -> None:
    folder = convert(job(facts={"tool": "qerl 1"})).folder
    listed = json.loads((folder / "checksums.json").read_text())
    there = digest(folder)
    del there["checksums.json"]
    assert {name: facts["sha256"] for name, facts in listed["files"].items()} == there
    assert listed["settings"]["tool"] == "qerl 1"
    assert listed["settings"]["method"] == {"name": "rtn"}
    assert listed["settings"]["source"]["name"] == "small"


class Counting:
    """A calibration that notes its calls; `inputs` depend on all layers before."""

    def __init__(self) -> None:
        self.state = 0.0
        self.calls: list[str] = []

    def inputs(self, layer: Any) -> Any:
        self.calls.append(f"inputs {layer.index}")
        return self.state

    def advance(self, layer: Any) -> None:
        self.calls.append(f"advance {layer.index}")
        for packed in layer.linears.values():
            self.state += float(packed.dequantize(torch.float32).sum())


class Shifting:
    """A method whose result depends on the calibration."""

    name = "shifting"
    calibrated = True

    def quantize(self, layer: Any, format: Any, inputs: Any) -> Any:
        from dataclasses import replace

        from qerl.convert.method import LayerWeights, Rtn

        tensors = {n: (t + inputs / 1e4).to(t.dtype) for n, t in layer.tensors.items()}
        made = Rtn().quantize(LayerWeights(index=layer.index, tensors=tensors), format)
        return replace(made, rows=[{"layer": layer.index, "output_error": inputs}])


def test_a_calibrated_conversion_goes_on_with_what_flows_through_the_finished_layers(
    job: Jobs, digest: Digest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qerl.convert.job._fields", lambda options: {})
    calibrations: list[Counting] = []

    def calibration() -> Counting:
        calibrations.append(Counting())
        return calibrations[-1]

    def stop(stage: Any) -> None:
        if stage.label == "layer 1":
            raise RuntimeError

    wanted = digest(
        convert(job(method=Shifting(), calibration=calibration, out=tmp_path / "whole")).folder
    )
    with pytest.raises(RuntimeError):
        convert(job(method=Shifting(), calibration=calibration), stop)
    done = convert(job(method=Shifting(), calibration=calibration))
    assert digest(tmp_path / "out") == wanted
    assert calibrations[-1].calls == [
        "advance 0", "inputs 1", "advance 1", "inputs 2", "advance 2",
    ]  # fmt: skip
    assert [row["layer"] for row in done.rows] == [0, 1, 2]
    assert len({row["output_error"] for row in done.rows}) == 3


def test_a_calibrated_method_without_data_is_refused(job: Jobs) -> None:
    with pytest.raises(ValueError, match="method shifting: it needs calibration data"):
        job(method=Shifting())
