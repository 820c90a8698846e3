r"""Cleaned text to a typed answer, outermost structure first.

Matrix, list, relation, union of intervals, bracket, plus-minus, ratio, scalar: the first that fits.

A comma separates, except between groups of three digits without a space (``1,234``) outside
brackets, where it belongs to the number; inside ``( )``, ``[ ]`` and ``\{ \}`` it always separates.
``and``, ``or`` and ``;`` separate like a comma. Text that no reader knows is `Text`, so that
reading never fails: the comparison then asks for the same text.
"""

import re
from itertools import pairwise

from qerl.reward.clean import closes_at_end, is_balanced, levels, split_top, tokens
from qerl.reward.expression import FUNCTIONS, GREEK, Node, UnreadableError, parse
from qerl.reward.kinds import (
    Answer,
    Based,
    Bracketed,
    Choice,
    FiniteSet,
    Infinity,
    Interval,
    Listing,
    Matrix,
    Named,
    RealSet,
    Relation,
    Scalar,
    Text,
)
from qerl.reward.scalar import TEXT_GROUP, ratio, scalar

MAX_ITEMS = 64

_COMMAS = frozenset({",", ";"})
_EQUALITIES = frozenset({"=", r"\approx", r"\in", r"\equiv"})
_SIGNS = {"<": ">", r"\le": ">=", ">": ">", r"\ge": ">=", r"\ne": "!="}
_RELATIONS = _EQUALITIES | _SIGNS.keys()
_ASCENDING = frozenset({"<", r"\le"})

_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_BARE_CONJUNCTION = re.compile(r",? (?:and|or) ")
_INFINITY = re.compile(r"([+-]?) ?(?:\\infty|infinity|oo)")
_BASED = re.compile(r"(-?(?:[0-9A-Z]*[0-9][0-9A-Z]*))_(?:\{([0-9]{1,2})\}|([0-9]{1,2}))")
_LETTER = re.compile(r"[(\[]? ?([A-Z]) ?[)\]]?")
_OPTION = re.compile(r"[(\[]? ?([A-Za-z]) ?[)\].:]?")
_OPTION_AND_TEXT = re.compile(r"[(\[]? ?([A-Z]) ?[)\].:] ?(.+)")
_NAMED_OPTION = re.compile(
    r"(?:option|choice|answer):? ?[(\[]? ?([A-Za-z]) ?[)\].]?", re.IGNORECASE
)
_OTHER_OPTION = re.compile(r"(?:^|[^A-Za-z])\(?[A-Z][).:]")
# Of tokens with a space between each two.
_NAME = re.compile(
    r"(?:\\[A-Za-z]+(?: \{(?: [A-Za-z,])* \})?|[A-Za-z])(?: (?:\\[A-Za-z]+|[A-Za-z]))*"
    r"(?: _ (?:\{[^{}]*\}|[A-Za-z0-9]+))?(?: ')*(?: \([^()]*\))?"
    r"|\( [A-Za-z](?: , [A-Za-z])+ \)"
)
_MATRIX = re.compile(
    r"(.*?)\\begin\{([pbB]?(?:small)?matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\2\}"
)
_BRACKETED_MATRIX = re.compile(
    r"[(\[] ?(\\begin\{(?:matrix|array)\}.*\\end\{(?:matrix|array)\}) ?[)\]]"
)
_WORDS = re.compile(r"[A-Za-z]{3,}(?: [A-Za-z]+)*")
_SPELLED_COMMA = re.compile(r" ?, ?(?:(?:and|or) )?| (?:and|or) ")
_WORD_SIGNS = re.compile(r"[^\W_]+(?:[ ,.'!?()-]+[^\W_]+)*[ ,.'!?()-]*")


def read(text: str, *, any_words: bool) -> Answer:
    """The answer that cleaned `text` states.

    Args:
        text: As `clean` leaves it.
        any_words: Whether words behind a number are passed over (`units`).
    """
    plain = TEXT_GROUP.sub(r"\1", text).strip()
    if letter := _LETTER.fullmatch(plain):
        return Choice(letter[1])
    if not is_balanced(text):
        return as_text(text)
    if _WORDS.fullmatch(text) and text.split()[0] not in FUNCTIONS:
        return as_text(text)
    if (group := TEXT_GROUP.fullmatch(text)) and not any(c.isdecimal() for c in group[1]):
        return _spelled(group[1])
    return _structure(plain if group else text, any_words) or as_text(text)


def option(text: str) -> str | None:
    """The letter of the one option that cleaned `text` names; None where it names none."""
    plain = TEXT_GROUP.sub(r"\1", text).strip()
    for pattern in (_OPTION, _NAMED_OPTION):
        if match := pattern.fullmatch(plain):
            return match[1]
    match = _OPTION_AND_TEXT.fullmatch(plain)
    return match[1] if match and not _OTHER_OPTION.search(match[2]) else None


def _structure(text: str, any_words: bool) -> Answer | None:
    if matrix := _MATRIX.fullmatch(_BRACKETED_MATRIX.sub(r"\1", text)):
        return _matrix(matrix[1], matrix[3])
    text = _join_thousands(_BARE_CONJUNCTION.sub(", ", text))
    parts = [part for _, part in split_top(text, _COMMAS) if part]
    if len(parts) > 1:
        return _listing(parts, any_words)
    sides = split_top(text, _RELATIONS)
    if len(sides) > 1:
        return _relation(sides, any_words)
    if (sets := _real_set(text) or _bracketed(text, any_words)) is not None:
        return sets
    if r"\pm" in text or r"\mp" in text:
        upper = text.replace(r"\pm", "+").replace(r"\mp", "-")
        lower = text.replace(r"\pm", "-").replace(r"\mp", "+")
        return _listing([upper, lower], any_words)
    return _single(text, any_words)


def _single(text: str, any_words: bool) -> Answer | None:
    if infinity := _INFINITY.fullmatch(text):
        return Infinity(infinity[1] != "-")
    if based := _BASED.fullmatch(TEXT_GROUP.sub(r"\1", text).replace(" ", "")):
        return Based(based[1], int(based[2] or based[3]))
    return ratio(text) or scalar(text, any_words=any_words)


def _listing(parts: list[str], any_words: bool) -> Answer | None:
    if len(parts) > MAX_ITEMS:
        return None
    items: list[Answer] = []
    for part in parts:
        item = read(part, any_words=any_words)
        items.extend(item.items if isinstance(item, Listing) else [item])
    return Listing(tuple(items))


def _join_thousands(text: str) -> str:
    """`text` with ``1,234`` outside brackets as ``1234``."""
    if "," not in text:
        return text
    inside, marks = 0, {}
    for token, start, _ in levels(text):
        inside += token in ("(", "[", r"\{") and 1
        inside -= token in (")", "]", r"\}") and 1
        marks[start] = inside
    return _THOUSANDS.sub(
        lambda m: m.group() if marks.get(m.start()) else m.group().replace(",", ""), text
    )


def _relation(sides: list[tuple[str, str]], any_words: bool) -> Answer | None:
    signs = [sign for sign, _ in sides[1:]]
    if all(sign in _EQUALITIES for sign in signs):
        return _equality(sides, any_words)
    texts = [side for _, side in sides]
    if len(sides) > 3 or any(sign in _EQUALITIES or sign == r"\ne" for sign in signs[1:]):
        return None
    if (bounds := _inequality_bounds(texts, signs)) is not None:
        return bounds
    if len(sides) > 2:
        return None
    left, right = (texts[1], texts[0]) if signs[0] in _ASCENDING else texts
    return _difference(left, right, _SIGNS.get(signs[0], "="))


def _equality(sides: list[tuple[str, str]], any_words: bool) -> Answer | None:
    """``x = 6/2 = 3``: what stands behind an approximation sign is a rounded copy, and dropped."""
    if not sides[0][1]:
        sides = [("", sides[1][1]), *sides[2:]]
    exact = sides[:1]
    for sign, side in sides[1:]:
        if sign == r"\approx" and not (len(exact) == 1 and is_name(exact[0][1])):
            break
        exact.append((sign, side))
        if sign == r"\approx":
            break
    texts = [side for _, side in exact]
    if len(texts) > 8 or not all(texts):
        return None
    if len(texts) == 2 and not is_name(texts[0]) and is_name(texts[1]):
        texts.reverse()
    relation = _difference(texts[0], texts[1], "=") if len(texts) == 2 else None
    if len(texts) > 1 and is_name(texts[0]) and not _mentions(texts[1:], texts[0]):
        values = tuple(read(side, any_words=any_words) for side in texts[1:])
        return Named(normal_name(texts[0]), values, relation)
    if relation is not None and relation.difference.symbols():
        return relation
    values = tuple(read(side, any_words=any_words) for side in texts)
    return values[0] if len(values) == 1 else Named("", values, None)


def is_name(text: str) -> bool:
    r"""Whether `text` names what is defined: ``x``, ``f(x)``, ``\theta``, ``\text{Area}``."""
    words = TEXT_GROUP.sub(lambda group: re.sub("[^A-Za-z]", "", group[1]), text)
    listed = [token for token in tokens(words) if token != " "]
    bare = "".join(listed)
    if not 0 < len(bare) <= 60 or _NAME.fullmatch(" ".join(listed)) is None:
        return False
    commands = [token for token in listed if len(token) > 1 and token.startswith("\\")]
    known = all(command in GREEK or command[1:] in _ACCENT_WORDS for command in commands)
    return known and bare.lower() not in FUNCTIONS | {"pi", "e", "i"}


_ACCENT_WORDS = frozenset({"overline", "vec", "bar", "hat", "overrightarrow", "mathcal"})


def normal_name(text: str) -> str:
    """A name without what spells it: groups, commands' braces, spaces, case of words."""
    bare = TEXT_GROUP.sub(r"\1", text)
    bare = re.sub(r"[{} ]", "", bare)
    return bare if len(bare) <= 2 or "\\" in bare else bare.casefold()


def _mentions(sides: list[str], name: str) -> bool:
    return len(name) == 1 and any(name in tokens(side) for side in sides)


def _difference(left: str, right: str, sign: str) -> Relation | None:
    try:
        return Relation(Node("add", (parse(left), Node("neg", (parse(right),)))), sign)
    except UnreadableError:
        return None


def _inequality_bounds(texts: list[str], signs: list[str]) -> RealSet | None:
    """``-2 <= x < 7`` or ``x > 3`` as an interval; None where a bound is no constant."""
    if signs[0] not in _ASCENDING:
        texts, signs = texts[::-1], [_FLIPPED[sign] for sign in reversed(signs) if sign in _FLIPPED]
    if not signs or len(signs) != len(texts) - 1 or any(s not in _ASCENDING for s in signs):
        return None
    middle = 1 if len(texts) == 3 else (0 if is_name(texts[0]) else 1)
    if not is_name(texts[middle]):
        return None
    low = _end(texts[middle - 1]) if middle else Infinity(positive=False)
    high = _end(texts[middle + 1]) if middle + 1 < len(texts) else Infinity(positive=True)
    if low is None or high is None:
        return None
    bounds = Interval(
        None if isinstance(low, Infinity) else low.tree,
        middle > 0 and signs[0] == r"\le" and isinstance(low, Scalar),
        None if isinstance(high, Infinity) else high.tree,
        middle + 1 < len(texts) and signs[-1] == r"\le" and isinstance(high, Scalar),
    )
    return RealSet((bounds,), normal_name(texts[middle]))


_FLIPPED = {">": "<", r"\ge": r"\le"}


def _end(text: str) -> Scalar | Infinity | None:
    end = _single(text, any_words=False)
    if isinstance(end, Scalar):
        return None if end.tree.symbols() else end
    return end if isinstance(end, Infinity) else None


def _real_set(text: str) -> RealSet | None:
    r"""A union of intervals and points, ``\mathbb{R}``, or the reals without some points."""
    parts = [part for _, part in split_top(text, frozenset({r"\cup"}))]
    if len(parts) == 1:
        return _reals(text)
    intervals: list[Interval] = []
    for part in parts[:MAX_ITEMS]:
        piece = as_real_set(_reals(part) or _bracketed(part, any_words=False))
        if piece is None:
            return None
        intervals.extend(piece.intervals)
    return RealSet(tuple(intervals))


def _reals(text: str) -> RealSet | None:
    whole, *removed = [
        part for _, part in split_top(text, frozenset({r"\setminus", r"\backslash"}))
    ]
    if whole.replace(" ", "") not in (r"\mathbb{R}", r"\mathbb R", r"\mathbbR"):
        return None
    if not removed:
        return RealSet((Interval(None, False, None, False),))
    points = _bracketed(removed[0], any_words=False)
    if len(removed) > 1 or not isinstance(points, FiniteSet):
        return None
    ends = [item.tree for item in points.items if isinstance(item, Scalar)]
    if len(ends) != len(points.items):
        return None
    bounds = [None, *ends, None]
    return RealSet(tuple(Interval(a, False, b, False) for a, b in pairwise(bounds)))


def as_real_set(answer: Answer | None) -> RealSet | None:
    """`answer` as a set of reals: an interval, points, or inequalities joined by "or"."""
    if isinstance(answer, RealSet):
        return answer
    if isinstance(answer, FiniteSet):
        ends = [item.tree for item in answer.items if isinstance(item, Scalar)]
        points = tuple(Interval(end, True, end, True) for end in ends)
        return RealSet(points) if points and len(ends) == len(answer.items) else None
    if isinstance(answer, Listing):
        pieces = [item for item in answer.items if isinstance(item, RealSet)]
        if len(pieces) < len(answer.items) or len({piece.name for piece in pieces}) > 1:
            return None
        return RealSet(tuple(i for piece in pieces for i in piece.intervals), pieces[0].name)
    if not isinstance(answer, Bracketed) or len(answer.items) != 2:
        return None
    low, high = answer.items
    if not isinstance(low, Scalar | Infinity) or not isinstance(high, Scalar | Infinity):
        return None
    interval = Interval(
        low.tree if isinstance(low, Scalar) else None,
        answer.opening == "[" and isinstance(low, Scalar),
        high.tree if isinstance(high, Scalar) else None,
        answer.closing == "]" and isinstance(high, Scalar),
    )
    ordered = not (isinstance(low, Infinity) and low.positive)
    ordered = ordered and not (isinstance(high, Infinity) and not high.positive)
    return RealSet((interval,)) if ordered else None


def _bracketed(text: str, any_words: bool) -> Answer | None:
    if text.replace(" ", "") in (r"\emptyset", r"\{\}"):
        return FiniteSet(())
    listed = tokens(text)
    opening, closing = listed[0] if listed else "", listed[-1] if listed else ""
    if opening not in ("(", "[", r"\{", r"\langle") or not closes_at_end(text):
        return None
    inner = text[len(opening) : -len(closing)]
    parts = [part for _, part in split_top(inner, _COMMAS)]
    if len(parts) > MAX_ITEMS or not all(parts) or (len(parts) == 1 and opening != r"\{"):
        return None
    if opening == r"\{":
        items = _listing(parts, any_words)
        return FiniteSet(items.items) if isinstance(items, Listing) else None
    return Bracketed(opening, closing, tuple(read(part, any_words=any_words) for part in parts))


def _matrix(prefix: str, body: str) -> Matrix | None:
    try:
        factor = parse(prefix) if prefix.strip() else None
        rows = [row for row in body.split(r"\\") if row.strip()]
        cells = [tuple(parse(cell) for cell in row.split("&")) for row in rows[:MAX_ITEMS]]
    except UnreadableError:
        return None
    if not cells or len({len(row) for row in cells}) > 1:
        return None
    if factor is not None:
        cells = [tuple(Node("mul", (factor, cell)) for cell in row) for row in cells]
    return Matrix(tuple(cells))


def _spelled(words: str) -> Answer:
    letters = _SPELLED_COMMA.split(words.strip())
    if all(_LETTER.fullmatch(letter) for letter in letters):
        return Listing(tuple(Choice(letter.strip("() []")) for letter in letters))
    return as_text(words)


def as_text(text: str) -> Text:
    """Cleaned `text` as words, whatever else it may be."""
    plain = TEXT_GROUP.sub(r"\1", text).strip()
    if _WORD_SIGNS.fullmatch(plain):
        return Text(" ".join(re.findall(r"[^\W_]+", plain.casefold())))
    return Text(plain.replace(" ", ""))
