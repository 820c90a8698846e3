"""The types of answers: what a reference answer is decides what can equal it."""

from dataclasses import dataclass
from typing import TypeAlias

from qerl.reward.expression import Node


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number, a fraction, a percentage or an expression."""

    tree: Node
    unit: str | None
    """Canonical name of a known unit, ``%`` for percent; None for none and for other words."""
    source: str
    """The cleaned text, for digits that are meant in another base."""


@dataclass(frozen=True, slots=True)
class Infinity:
    """Plus or minus infinity."""

    positive: bool


@dataclass(frozen=True, slots=True)
class Bracketed:
    """An ordered tuple or an interval: ``(0, 5)`` may be either, and its brackets matter."""

    opening: str
    closing: str
    items: tuple["Answer", ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """Several answers in any order: ``2, -2`` or ``x = 2 or x = -2``."""

    items: tuple["Answer", ...]


@dataclass(frozen=True, slots=True)
class FiniteSet:
    r"""``\\{1, 2\\}``: any order, repetition does not matter."""

    items: tuple["Answer", ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """Reals between two ends; an end that is None is infinite."""

    low: Node | None
    low_closed: bool
    high: Node | None
    high_closed: bool


@dataclass(frozen=True, slots=True)
class RealSet:
    """A union of intervals, or an inequality that states one."""

    intervals: tuple[Interval, ...]
    name: str = ""
    """The variable of the inequality, normalised; "" where none is named."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of expressions; a column vector has one column."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """An equation or inequality between expressions: ``left`` minus ``right`` against 0."""

    difference: Node
    sign: str
    """``=``, ``>`` or ``>=``, and ``!=``; "less than" is turned round."""


@dataclass(frozen=True, slots=True)
class Named:
    """``x = 3``, or ``1/2 = 0.5`` with an empty name: every side states the answer."""

    name: str
    values: tuple["Answer", ...]
    relation: Relation | None
    """The same as an equation, where it is one between expressions."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """``3:5``, or a time of day ``8:34``."""

    parts: tuple[Node, ...]
    half: str | None
    """``am`` or ``pm`` where stated."""


@dataclass(frozen=True, slots=True)
class Based:
    """A numeral with its base: ``1011_2``."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A letter that names an option."""

    letter: str


@dataclass(frozen=True, slots=True)
class Text:
    """Words, or mathematics that no reader here knows; compared as it is written."""

    words: str
    """Case-folded words without punctuation; text with other signs keeps them and its case."""


Answer: TypeAlias = (
    Scalar
    | Infinity
    | Bracketed
    | Listing
    | FiniteSet
    | RealSet
    | Matrix
    | Relation
    | Named
    | Ratio
    | Based
    | Choice
    | Text
)

WORDS: dict[type, str] = {
    Scalar: "number or expression",
    Infinity: "infinity",
    Bracketed: "tuple or interval",
    Listing: "list",
    FiniteSet: "set",
    RealSet: "set of reals",
    Matrix: "matrix",
    Relation: "equation or inequality",
    Named: "equation",
    Ratio: "ratio",
    Based: "numeral with a base",
    Choice: "choice",
    Text: "text",
}
