"""The folder of an evaluation: its settings and every completion, so that it can go on.

``settings.json`` says what is evaluated and how; ``completions.jsonl`` gets a chunk of problems at
a time, flushed to the disk. A kill can tear the last chunk only; what is torn is drawn again. A
completion's seed derives from its prompt's id, so what is drawn later is what would have been
drawn then.
"""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from qerl.record.completions import Row
from qerl.record.files import write_atomic

log = logging.getLogger(__name__)

Json = Any
SETTINGS = "settings.json"
COMPLETIONS = "completions.jsonl"


def fingerprint(settings: Mapping[str, Json]) -> str:
    """SHA-256 of the settings, whatever their order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


class Store:
    """Rows of one evaluation, each with its ``mode``, ``prompt`` and ``sample``."""

    def __init__(self, folder: Path, settings: Mapping[str, Json], started: str) -> None:
        """Open `folder`, or take it up where it was left.

        Args:
            folder: of this evaluation alone.
            settings: flat; what the rows depend on.
            started: when the evaluation began, kept from the first call.

        Raises:
            ValueError: the folder holds an evaluation with other settings, or another process
                writes to it.
        """
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(folder)
        self.started = _agree(folder / SETTINGS, settings, started)
        self._groups, self._torn = _read(folder / COMPLETIONS)

    def close(self) -> None:
        """Let other processes write to the folder."""
        self._lock.close()

    def take(self, mode: str, prompts: Sequence[str], samples: int) -> list[Row] | None:
        """The rows of a chunk in order, or None where it has to be drawn (again)."""
        groups = [self._groups.get((mode, prompt), []) for prompt in prompts]
        if all(len(group) == samples for group in groups):
            return [row for group in groups for row in group]
        for prompt in prompts:
            self._torn |= self._groups.pop((mode, prompt), None) is not None
        return None

    def add(self, rows: Sequence[Row]) -> None:
        """Append a chunk's rows and wait for the disk.

        Raises:
            OSError: the disk is full; the chunk is not part of the evaluation then.
        """
        path = self.folder / COMPLETIONS
        if self._torn:
            write_atomic(path, _lines([row for group in self._groups.values() for row in group]))
            self._torn = False
        with path.open("ab") as file:
            file.write(_lines(rows).encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        for row in rows:
            self._groups.setdefault((row["mode"], row["prompt"]), []).append(row)


def _locked(folder: Path) -> IO[bytes]:
    """A file that this process alone holds while it is open."""
    file = (folder / ".lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ValueError(
            f"{folder}: another process evaluates there; wait for it, or set evaluate.folder"
        ) from error
    return file


def _agree(path: Path, settings: Mapping[str, Json], started: str) -> str:
    """Write the settings, or check that they are those of the folder; when it started."""
    if not path.exists():
        document = {"fingerprint": fingerprint(settings), "started": started, "settings": settings}
        write_atomic(path, json.dumps(document, indent=1, sort_keys=True) + "\n")
        return started
    saved = json.loads(path.read_text(encoding="utf-8"))
    there = saved["settings"]
    here = json.loads(json.dumps(settings))
    changed = [k for k in sorted(there.keys() | here.keys()) if there.get(k) != here.get(k)]
    if changed:
        listed = "; ".join(f"{key}: {there.get(key)!r} -> {here.get(key)!r}" for key in changed)
        raise ValueError(
            f"{path.parent} holds an evaluation with other settings ({listed}): use the same "
            "settings to go on with it, or another evaluate.folder"
        )
    return str(saved["started"])


def _read(path: Path) -> tuple[dict[tuple[str, str], list[Row]], bool]:
    """Rows by (mode, prompt), and whether something at the end cannot be read."""
    groups: dict[tuple[str, str], list[Row]] = {}
    if not path.exists():
        return groups, False
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            groups.setdefault((row["mode"], row["prompt"]), []).append(row)
        except (ValueError, KeyError, TypeError):
            log.warning("%s:%d is torn; what it was part of is drawn again", path, number)
            return groups, True
    # A last line without its end reads as whole only where nothing of it is missing.
    return groups, bool(path.stat().st_size) and not path.read_bytes().endswith(b"\n")


def _lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
