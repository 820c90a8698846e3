r"""A number with what stands around it, and a ratio: the leaves of structured answers."""

import re
from fractions import Fraction

from qerl.reward import units
from qerl.reward.clean import split_top, tokens
from qerl.reward.expression import FUNCTIONS, Node, UnreadableError, number, parse
from qerl.reward.kinds import Ratio, Scalar

TEXT_GROUP = re.compile(r"\\text ?\{([^{}]*)\}")

_TEXT_UNIT = re.compile(r"(.*?)\\text ?\{([^{}]*)\}( ?\^ ?\{?[23]\}?)?", re.DOTALL)
_CURRENCY = re.compile(
    r"([+-]?) ?(\\(?:dollar|euro|pounds|yen|rupee)|USD|Rs\.?) ?([+-]?.*)", re.DOTALL
)
_SCALED = re.compile(
    r"(.*?[^ ]) ?(?:\\text ?\{)?(hundred|thousand|million|billion|trillion)\}?", re.IGNORECASE
)
_ASIDE = re.compile(r"(.*[0-9}%]) ?\(([A-Za-z][A-Za-z ]+)\)")
_EXPONENTS = (["^", "2"], ["^", "3"], ["^", "{", "2", "}"], ["^", "{", "3", "}"])


def scalar(text: str, *, any_words: bool) -> Scalar | None:
    """The number or expression that cleaned `text` states; None where it states none."""
    unit: str | None = None
    core = text
    if money := _CURRENCY.fullmatch(text):
        core, unit = money[1] + money[3], units.CURRENCY[money[2].rstrip(".")]
    core, named = _without_units(core, any_words)
    scaled = _SCALED.fullmatch(core)
    try:
        tree = parse(scaled[1] if scaled else core)
    except UnreadableError:
        return None
    if scaled:
        tree = Node("mul", (tree, number(Fraction(units.SCALES[scaled[2].lower()]))))
    return Scalar(tree, unit or named, text)


def ratio(text: str) -> Ratio | None:
    """``3:5`` or ``8:34 p.m.``; None where cleaned `text` is neither."""
    core, unit = _without_units(text, any_words=False)
    parts = [part for _, part in split_top(core, frozenset({":"}))]
    if not 2 <= len(parts) <= 4 or unit not in (None, "am", "pm"):
        return None
    try:
        return Ratio(tuple(parse(part) for part in parts), unit)
    except UnreadableError:
        return None


def _without_units(text: str, any_words: bool) -> tuple[str, str | None]:
    """`text` without the units behind it, and the last of them that is known."""
    name: str | None = None
    for _ in range(3):
        core, words, spelled = _tail(text, any_words)
        unit = units.read(words, any_words=any_words or spelled)
        if unit is None or not core.strip():
            break
        text, name = core.strip(), name or unit.name
    return text, name


def _tail(text: str, any_words: bool) -> tuple[str, str, bool]:
    """What stands before and in the words at the end, and whether they are in a text group."""
    if group := _TEXT_UNIT.fullmatch(text):
        return group[1], group[2].strip("() ") + (group[3] or "").strip(), True
    if aside := _ASIDE.fullmatch(text):
        return aside[1], aside[2], False
    for sign, unit in (("%", "%"), (r"\degree", "degree")):
        # Under a function degrees are an angle, not a unit of the result.
        if text.endswith(sign) and not _has_function(text):
            return text.removesuffix(sign), unit, True
    core, words = _bare_tail(text)
    lone_symbol = len(words) == 1 and not any_words
    return (core, "", False) if lone_symbol else (core, words, False)


def _has_function(text: str) -> bool:
    return any(token.lstrip("\\") in FUNCTIONS for token in tokens(text) if token[0] == "\\")


def _bare_tail(text: str) -> tuple[str, str]:
    """A number and the letters behind it: ``10 cm^2`` to ``10`` and ``cm^2``."""
    listed = tokens(text)
    power = next((e for e in _EXPONENTS if listed[-len(e) :] == e), [])
    at = end = len(listed) - len(power)
    while at > 0 and (listed[at - 1] in " .-/'" or _is_letter(listed[at - 1])):
        at -= 1
    core, tail = "".join(listed[:at]), "".join(listed[at:end])
    words = tail.strip()
    first, _, rest = words.partition(" ")
    if first.lower() in units.SCALES:  # it belongs to the number
        core, words = f"{core.strip()} {first}", rest
    if not words[:1].isalpha():
        return text, ""
    words += "".join(power)
    # Letters that touch the number are a unit only if they are a known one: 10cm, but not 10ab.
    touches = tail[:1].isalpha() and units.read(words, any_words=False) is None
    return (text, "") if touches else (core, words)


def _is_letter(token: str) -> bool:
    return len(token) == 1 and token.isalpha()
