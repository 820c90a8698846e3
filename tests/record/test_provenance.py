"""Where a measurement comes from."""

import shutil
import subprocess
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest
import torch

from qerl.record.provenance import GIB, commit, cpu_model, device_facts, now, versions

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="no git on PATH")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout with one package."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "-m", "one")
    return tmp_path


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@needs_git
def test_a_clean_checkout_gives_its_commit(checkout: Path) -> None:
    found = commit(checkout / "pack")
    assert found is not None
    assert found.sha == _git(checkout, "rev-parse", "HEAD")
    assert not found.dirty
    assert found.short == found.sha[:7]


@needs_git
@pytest.mark.parametrize("name", ["pack/__init__.py", "conf_new.yaml"])
def test_changed_and_new_files_make_it_dirty(checkout: Path, name: str) -> None:
    (checkout / name).write_text("changed")
    found = commit(checkout / "pack")
    assert found is not None
    assert found.dirty
    assert found.short.endswith("-dirty")


@needs_git
def test_a_record_just_written_does_not_make_it_dirty(checkout: Path) -> None:
    (checkout / "results").mkdir()
    (checkout / "results" / "run.json").write_text("{}")
    found = commit(checkout / "pack")
    assert found is not None
    assert not found.dirty


@needs_git
def test_a_copy_that_the_checkout_does_not_track_has_no_commit(checkout: Path) -> None:
    (checkout / "venv").mkdir()
    (checkout / "venv" / "__init__.py").write_text("")
    assert commit(checkout / "venv") is None


def test_outside_git_there_is_no_commit(tmp_path: Path) -> None:
    assert commit(tmp_path) is None


def test_versions_name_every_dependency_and_null_what_is_absent() -> None:
    found = versions()
    assert found["torch"] == torch.__version__
    for name in ("python", "lightning", "transformers", "peft"):
        assert found[name]
    assert {"triton", "qerl", "vllm", "cuda"} <= found.keys()


def test_device_facts_state_the_host() -> None:
    facts = device_facts("cpu", count=2)
    assert facts["count"] == 2
    assert facts["name"] == facts["host_cpu"] != ""
    assert facts["host_memory_gib"] == round(psutil.virtual_memory().total / GIB, 1)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux names its processor there")
def test_the_processor_has_the_name_that_the_system_gives_it() -> None:
    text = Path("/proc/cpuinfo").read_text()
    if "model name" not in text:
        pytest.skip("this processor has no model name")
    assert f": {cpu_model()}\n" in text


def test_times_are_utc() -> None:
    assert datetime.fromisoformat(now()).utcoffset() == timedelta(0)
