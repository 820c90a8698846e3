"""Problems and where they come from: a question, its gold answer, and a source that loads them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Checksum = Literal["verified", "differs", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question with the answer that verifies it."""

    id: str
    """Stable identity, for example ``gsm8k/train/17``; seeds of completions derive from it."""

    question: str
    """The bare question, without instruction, shots or chat template."""

    gold: str
    """The reference answer alone, without its derivation."""

    meta: Mapping[str, str] = field(default_factory=dict)
    """What else the source says: its own id, level, subject."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a source holds, before anything is dropped on account of a run."""

    name: str
    """Data set and split, for example ``gsm8k/train``."""

    problems: tuple[Problem, ...]

    origin: str
    """Where the rows were read: a file, a hub id, a generator with its seed."""

    rows: int
    """Rows read, before the ones below were left out."""

    other_levels: int = 0
    """Rows left out because the source was asked for other levels."""

    beyond_limit: int = 0
    """Rows left out because the source was asked for the first few only."""

    unreadable_golds: tuple[str, ...] = ()
    """Rows left out because no answer could be read from them, by place."""

    checksum: Checksum = "unknown"
    """Whether the bytes are those of a recorded copy; ``unknown`` where none is recorded."""

    warnings: tuple[str, ...] = ()
    """What a reader of results must know: a count or checksum that is not the recorded one."""


class ProblemSource(Protocol):
    """Anything that loads problems. Construction reads nothing; `load` does."""

    def load(self) -> Loaded: ...
