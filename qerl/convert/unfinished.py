"""The folder in which a conversion works, and how it becomes the output: whole or not at all.

``<out>.partial/`` holds ``model/`` (what will be ``<out>``), ``settings.json`` (what is converted
and how), ``journal.jsonl`` (a line a finished shard) and ``lock``. A shard enters the journal after
its bytes are on the disk; what is not in the journal is made again. The last act is the renaming of
``model/``, which has no half-way.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from qerl.model.shards import CHECKSUMS, UNFINISHED, check_finished

log = logging.getLogger(__name__)

Json = Any
_CHUNK = 1 << 22


class Unfinished:
    """Use as a context, which holds the lock."""

    def __init__(self, out: Path, settings: Mapping[str, Json]) -> None:
        """Nothing is touched here.

        Args:
            out: what the finished folder will be called.
            settings: JSON values; the same settings give the same bytes.

        Raises:
            ValueError: `out` has no name of its own, or one that is kept for unfinished work.
        """
        _check_name(out)
        self.out = out
        self.place = out.with_name(out.name + UNFINISHED)
        self.folder = self.place / "model"
        self.settings = json.loads(json.dumps(settings))
        self._journal = self.place / "journal.jsonl"
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> "Unfinished":
        self.place.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.place)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lock is not None:
            if [path.name for path in self.place.glob("*")] == ["lock"]:  # refused before it began
                shutil.rmtree(self.place)
            self._lock.close()
            self._lock = None

    def is_published(self) -> bool:
        """Whether `out` is there already, made with the same settings.

        Raises:
            ValueError: something else is there.
        """
        if not self.out.exists():
            return False
        listed = self.out / CHECKSUMS
        made = json.loads(listed.read_text()).get("settings") if listed.is_file() else None
        if made is None:
            raise ValueError(f"out={self.out} exists and is no conversion; choose another out=")
        if made != self.settings:
            raise ValueError(
                f"out={self.out} exists and was made with other settings "
                f"({_differences(made, self.settings)}); choose another out= or remove it"
            )
        check_finished(self.out)
        shutil.rmtree(self.place)
        return True

    def take_up(self) -> list[dict[str, Json]]:
        """The journal's lines of shards that are whole; everything else is cleared away.

        Raises:
            ValueError: shards were finished with other settings.
        """
        path, journal = self.place / "settings.json", self._read()
        if journal:
            begun = json.loads(path.read_text())
            if begun != self.settings:
                raise ValueError(
                    f"{self.place} was begun with other settings "
                    f"({_differences(begun, self.settings)}); give the same ones to go on, or "
                    "remove the folder to start anew"
                )
        else:
            write_whole(path, json.dumps(self.settings, indent=1, sort_keys=True) + "\n")
        self.folder.mkdir(exist_ok=True)
        if journal:
            log.info("%s: checking %d finished shards", self.place, len(journal))
        entries = [entry for entry in journal if self._is_whole(entry)]
        kept = {entry["file"] for entry in entries}
        for path in self.folder.iterdir():
            if path.name not in kept:
                path.unlink()
        write_whole(self._journal, "".join(json.dumps(entry) + "\n" for entry in entries))
        return entries

    def add(self, entry: Mapping[str, Json]) -> None:
        """Enter a shard (``file``, ``bytes``, ``sha256``, ``rows``) whose bytes are on the disk."""
        sync_folder(self.folder)
        with self._journal.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def publish(self) -> None:
        """Give the finished folder its name."""
        for path in self.folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(self.folder)
        self.folder.rename(self.out)
        sync_folder(self.out.parent)
        shutil.rmtree(self.place)

    def _read(self) -> Sequence[dict[str, Json]]:
        """The lines of the journal up to one that a kill has torn."""
        entries: list[dict[str, Json]] = []
        if self._journal.is_file():
            for line in self._journal.read_text().splitlines(keepends=True):
                if not line.endswith("\n"):
                    break
                entries.append(json.loads(line))
        return entries

    def _is_whole(self, entry: Mapping[str, Json]) -> bool:
        path = self.folder / str(entry["file"])
        whole = path.is_file() and path.stat().st_size == entry["bytes"]
        if not whole or sha256(path) != entry["sha256"]:
            log.warning("%s is not what the journal says; it is made again", path)
            return False
        return True


def sha256(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Put `text` at `path`, with its bytes on the disk before its name."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_name(out: Path) -> None:
    """Raise unless a folder may be called `out` when it is whole."""
    if out.name in ("", ".."):
        raise ValueError(
            f"out={out}: no name for a folder that does not exist; choose another out="
        )
    kept = [part for part in out.absolute().parts if part.endswith(UNFINISHED)]
    if kept:
        raise ValueError(
            f"out={out}: names that end in {UNFINISHED}, as {kept[0]}, are kept for unfinished "
            "work; choose another out="
        )


def _locked(place: Path) -> IO[bytes]:
    """A file that this process alone holds while it is open."""
    try:
        file = (place / "lock").open("wb")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        busy = True
    else:
        busy = os.fstat(file.fileno()).st_nlink == 0  # its holder has just finished
    if busy:
        raise ValueError(
            f"{place}: another process writes there; wait for it, or choose another out="
        )
    return file


def _differences(there: Mapping[str, Json], here: Mapping[str, Json]) -> str:
    """Settings that differ, with both values."""
    flat_there, flat_here = dict(_flat(there)), dict(_flat(here))
    keys = sorted(flat_there.keys() | flat_here.keys())
    return "; ".join(
        f"{key}: {flat_there.get(key)!r} -> {flat_here.get(key)!r}"
        for key in keys
        if flat_there.get(key) != flat_here.get(key)
    )


def _flat(settings: Mapping[str, Json], prefix: str = "") -> list[tuple[str, Json]]:
    pairs: list[tuple[str, Json]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((prefix + key, value))
    return pairs
