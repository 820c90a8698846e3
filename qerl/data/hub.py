"""Problems of a published set: from the hugging-face hub, or from a local copy of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qerl.data.files import Row, locate, read_rows
from qerl.data.golds import READINGS, Reading, read_gold
from qerl.data.known import check_known
from qerl.data.problems import Loaded, Problem

META = ("id", "level", "subject", "type", "source", "domain", "llama8b_solve_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Which fields of a row hold what; copies of one set differ in their names."""

    question: Sequence[str] = ("question", "problem", "prompt")
    """Candidates, the first present counts; ``Body+Question`` joins two with a space."""

    answer: Mapping[str, Reading] = field(default_factory=lambda: {"answer": "as_is"})
    """Candidates, the first present counts, each with how its text is read (`qerl.data.golds`)."""

    level: str = "level"
    """Difficulty, a number or text that contains one (``Level 5``)."""

    def __post_init__(self) -> None:
        for name, reading in self.answer.items():
            if reading not in READINGS:
                raise ValueError(
                    f"answer field {name!r} read as {reading!r}: one of {', '.join(READINGS)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class HubProblems:
    """One split of a data set.

    With `path` the rows come from local files and the hub is not asked; without it they come
    through ``datasets.load_dataset``, whose cache serves later runs offline. `hub_id` may be a
    local data set folder, as that function allows.
    """

    name: str
    """Short name: first part of ids, and the folder looked for under `path`."""

    hub_id: str
    """For example ``openai/gsm8k``."""

    split: str = "train"
    """Split as it is called here and in local file names."""

    hub_config: str | None = None
    """Configuration (subset) on the hub."""

    hub_split: str | None = None
    """Split as the hub calls it, where that differs."""

    revision: str | None = None
    """Commit on the hub; null takes the newest."""

    path: str | None = None
    """A .jsonl or .parquet file, or a folder (`qerl.data.files.locate`); ``~`` is expanded."""

    fields: Fields = field(default_factory=Fields)

    levels: Sequence[int] = ()
    """Difficulties kept; empty keeps all. Rows must then state their level."""

    limit: int | None = None
    """Only the first so many problems; null takes all."""

    def load(self) -> Loaded:
        """Read the split.

        Raises:
            ValueError: the hub cannot be reached, a file is missing or malformed, or a row lacks a
                field; one line that says what, where, and what to set.
        """
        files = self.files()
        count, skipped = 0, 0
        problems: list[Problem] = []
        unreadable: list[str] = []
        for index, row in enumerate(self.rows()):
            count += 1
            if self.levels and self._level(row) not in self.levels:
                skipped += 1
                continue
            try:
                problems.append(self._problem(index, row))
            except _UnreadableGoldError as error:
                unreadable.append(f"{row.place}: {error}")
        checksum, warnings = check_known(self.name, self.split, count, files)
        kept = problems if self.limit is None else problems[: self.limit]
        return Loaded(
            name=f"{self.name}/{self.split}",
            problems=tuple(kept),
            origin=", ".join(map(str, files)) or self._hub_place(),
            rows=count,
            other_levels=skipped,
            beyond_limit=len(problems) - len(kept),
            unreadable_golds=tuple(unreadable),
            checksum=checksum,
            warnings=warnings,
        )

    def files(self) -> tuple[Path, ...]:
        """The local files that hold the rows; none where they come through the hub's library."""
        return locate(self.path, self.name, self.hub_config, self.split) if self.path else ()

    def rows(self) -> Iterator[Row]:
        """Every row of the split as it is stored, in order; raises as `load` does."""
        files = self.files()
        return read_rows(files) if files else self._hub_rows()

    def _problem(self, index: int, row: Row) -> Problem:
        question = self._question(row)
        gold = self._gold(row)
        meta = {key: str(row.values[key]) for key in META if row.values.get(key) is not None}
        return Problem(
            id=f"{self.name}/{self.split}/{index}", question=question, gold=gold, meta=meta
        )

    def _question(self, row: Row) -> str:
        for candidate in self.fields.question:
            parts = [row.values.get(part) for part in candidate.split("+")]
            if all(isinstance(part, str) and part.strip() for part in parts):
                return " ".join(str(part).strip() for part in parts)
        raise ValueError(_missing(row, "question", self.fields.question))

    def _gold(self, row: Row) -> str:
        for candidate, reading in self.fields.answer.items():
            if candidate in row.values:
                try:
                    return read_gold(_text(row.values[candidate]), reading)
                except ValueError as error:
                    raise _UnreadableGoldError(str(error)) from error
        raise ValueError(_missing(row, "answer", tuple(self.fields.answer)))

    def _level(self, row: Row) -> int | None:
        if row.values.get(self.fields.level) is None:
            raise ValueError(
                f"{row.place}: levels {list(self.levels)} are asked for, but there is no field "
                f"{self.fields.level!r}; set data.problems.levels=[] to take all"
            )
        digits = "".join(filter(str.isdigit, _text(row.values[self.fields.level])))
        return int(digits) if digits else None  # two rows of MATH say "Level ?"

    def _hub_place(self) -> str:
        config = f"{self.hub_config}, " if self.hub_config else ""
        return f"{self.hub_id} ({config}{self.hub_split or self.split})"

    def _hub_rows(self) -> Iterator[Row]:
        # 0.7 s, and most of it is wasted on runs that read local files or generate their problems.
        import datasets

        try:
            data = datasets.load_dataset(
                self.hub_id,
                self.hub_config,
                split=self.hub_split or self.split,
                revision=self.revision,
            )
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{self.name}/{self.split}: cannot load {self._hub_place()} from the hub "
                f"({type(error).__name__}: {reason}); set data.path to a folder with "
                f"{self.name}/{self.split}.jsonl, or check the network and access"
            ) from error
        for number, values in enumerate(data, start=1):
            yield Row(f"{self._hub_place()}:{number}", values)


class _UnreadableGoldError(ValueError):
    """A row whose answer cannot be read: left out and counted, unlike a row without the field."""


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _missing(row: Row, what: str, candidates: Sequence[str]) -> str:
    return (
        f"{row.place}: no {what}; looked for {', '.join(map(repr, candidates))}, the row has "
        f"{', '.join(map(repr, row.values))}; set data.problems.fields.{what}"
    )
