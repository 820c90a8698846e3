"""Files that are whole or absent."""

import errno
import io
from pathlib import Path

import pytest

from qerl.record.files import append, write_atomic


def test_replacing_a_file_leaves_no_partial_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a" / "page.md"
    write_atomic(path, "one")
    write_atomic(path, b"two")
    assert path.read_text() == "two"
    assert list(path.parent.iterdir()) == [path]


def test_an_append_that_fails_midway_takes_its_bytes_back(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "table.jsonl"
    append(path, "whole line\n")
    real = io.FileIO

    class Full(real):
        def write(self, data: object) -> int:
            super().write(bytes(data)[:4])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda self, mode: Full(self, mode.replace("b", "")))
    with pytest.raises(OSError, match=r"table\.jsonl is not written \(No space left"):
        append(path, "another line\n")
    monkeypatch.undo()
    assert path.read_text() == "whole line\n"


def test_a_replacement_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = write_atomic(tmp_path / "page.md", "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="what stood there still stands"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
