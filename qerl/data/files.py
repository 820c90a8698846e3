"""Rows of local files: where a split lies under a folder, and one row at a time with its place."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from qerl.data.known import KNOWN

SUFFIXES = (".jsonl", ".parquet")
SPLITS = frozenset({"train", "test", "validation", "dev"})


@dataclass(frozen=True, slots=True)
class Row:
    """One row and where it stands, for errors that a reader can act on."""

    place: str
    """File and line (or row) number, counted from 1."""

    values: Mapping[str, object]


def locate(path: str, name: str, config: str | None, split: str) -> tuple[Path, ...]:
    """The files of one split at `path`.

    `path` is a file, or a folder with ``<name>/<split>.jsonl``, ``<split>.jsonl`` or a clone of
    the hub's layout (``<config>/<split>-*.parquet``); the first that exists counts. A file named
    after another split stands for its folder, so that ``train.jsonl`` never serves as ``test``,
    and ``<split>.jsonl`` in the folder of another known set never serves as this one.

    Raises:
        ValueError: nothing is there; names what was sought and where.
    """
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix not in SUFFIXES:
            raise ValueError(f"data.path={place}: a .jsonl or .parquet file, or a folder of them")
        if place.stem == split or place.stem not in SPLITS:
            return (place,)
        place = place.parent
    wanted = _patterns(place.name, name, config, split)
    for pattern in wanted:
        found = tuple(sorted(place.glob(pattern))) if place.is_dir() else ()
        if found:
            return found
    what = "nothing there fits" if place.exists() else "there is no such file or folder"
    raise ValueError(
        f"{name}/{split}: {what} at {place}; looked for {', '.join(wanted)}; set data.path to a "
        ".jsonl or .parquet file, or to a folder that holds one of these"
    )


def _patterns(folder: str, name: str, config: str | None, split: str) -> list[str]:
    """Where a split may lie below a folder of that name, the most specific place first."""
    inside = [f"{config}/"] if config else []
    foreign = folder != name and any(folder == known for known, _ in KNOWN)
    stems = [f"{name}/{part}{split}" for part in (*inside, "")]
    stems += [] if foreign else [f"{part}{split}" for part in (*inside, "")]
    # Shards, as the hub stores them: below the configuration's name, or below data.
    tops = [f"{name}/"] if foreign else [f"{name}/", ""]
    stems += [f"{top}{part}{split}-*" for top in tops for part in (*inside, "data/")]
    return [stem + suffix for stem in stems for suffix in SUFFIXES]


def read_rows(files: tuple[Path, ...]) -> Iterator[Row]:
    """Every row of `files`, in order.

    Raises:
        ValueError: a line is no JSON object, or a file is no parquet; names file and line.
    """
    for file in files:
        yield from _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file)


def _json_rows(file: Path) -> Iterator[Row]:
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            # utf-8-sig: some editors put a byte-order mark in front of the first line.
            values = json.loads(line.decode("utf-8-sig"))
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both one
            raise ValueError(
                f"{place}: not valid JSON ({error}); one problem a line, as a JSON object"
            ) from error
        if not isinstance(values, dict):
            raise ValueError(
                f"{place}: a JSON {type(values).__name__}; one problem a line, as a JSON object"
            )
        yield Row(place, values)


def _parquet_rows(file: Path) -> Iterator[Row]:
    # Parquet is the exception among local files: runs that read JSON lines need not load pyarrow.
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
        raise ValueError(f"{file}: not a readable parquet file ({error})") from error
    for number, values in enumerate(table.to_pylist(), start=1):
        yield Row(f"{file}:{number}", values)
