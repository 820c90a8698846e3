"""Files that are whole or absent: what a record, a table or a figure is written with.

A text is written beside its target, flushed to the disk and renamed; a full disk or a kill leaves
the old file as it stood and nothing under the new name.
"""

import os
from collections.abc import Callable
from pathlib import Path


def write_atomic(path: Path, data: str | bytes) -> Path:
    """Put `data` at `path`, replacing what stood there, or leave everything as it was.

    Raises:
        OSError: one line with the path, the reason and the cure; the old file still stands.
    """
    return _publish(path, data, lambda partial: partial.replace(path))


def write_once(path: Path, data: str | bytes) -> Path:
    """Put `data` at `path`, or beside it with ``-2``, ``-3``, … where another file stands.

    Returns:
        The path that holds `data`: an existing one where it holds the same bytes.

    Raises:
        OSError: one line with the path, the reason and the cure; no file has changed.
    """
    return _publish(path, data, lambda partial: _claim(partial, path, _bytes(data)))


def append(path: Path, text: str) -> None:
    """Add `text` at the end of `path`, whole or not at all.

    Raises:
        OSError: one line with the path, the reason and the cure; the file ends where it ended.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(_bytes(text))
    except OSError as error:
        if path.exists():
            os.truncate(path, end)
        raise _one_line(path, error) from error


def _publish(path: Path, data: str | bytes, place: Callable[[Path], Path]) -> Path:
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(_bytes(data))
            file.flush()
            os.fsync(file.fileno())
        return place(partial)
    except OSError as error:
        raise _one_line(path, error) from error
    finally:
        partial.unlink(missing_ok=True)


def _claim(partial: Path, path: Path, data: bytes) -> Path:
    """Give `partial` the first free name; the test and the claim are one system call."""
    number = 1
    while True:
        target = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        try:
            target.hardlink_to(partial)  # fails where the name is taken
        except FileExistsError:
            if target.read_bytes() == data:
                return target
            number += 1
        except PermissionError:  # a file system without hard links
            if not target.exists():
                return partial.replace(target)
            number += 1
        else:
            return target


def _bytes(data: str | bytes) -> bytes:
    # A lone surrogate (half a character that a tokenizer cut) becomes its JSON escape.
    return data if isinstance(data, bytes) else data.encode("utf-8", "backslashreplace")


def _one_line(path: Path, error: OSError) -> OSError:
    reason = error.strerror or str(error)
    return OSError(
        error.errno,
        f"{path} is not written ({reason}): what stood there still stands; free or choose another "
        "disk and write again",
    )
