r"""What stands around a number: currency, percent, degrees, units and large-number words.

* A unit makes no number wrong by being there or missing: ``10\text{ cm}``, ``10 cm`` and 10 are
  equal, and so are ``\$5``, ``5 dollars`` and 5.
* Two units that are both known must be the same: 8 m is not 8 cm, ``\$5`` is not 5 cents. Units are
  not converted, so 100 cm is not 1 m.
* Other words ("18 eggs", "3 more apples") are no unit: they are passed over, up to `MAX_WORDS` of
  them, unless one of them (`_CONTENT`) says more than a noun does: "10 or 20", "42 is wrong".
* ``%``, percent, percentage and pct: p% is the number p and the number p/100, because data sets
  ask "what percentage" and state 20. Degrees are a unit: ``30^\circ`` is 30, and not pi/6.
* hundred, thousand, million, billion and trillion multiply.

Bare words count as a unit in a prediction only where the reference is a plain number. Where it has
symbols, ``2s`` is two times s.
"""

import re
from dataclasses import dataclass

MAX_WORDS = 6

_SAME = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "in inch inche",
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mi": "mi mile",
    "mg": "mg milligram",
    "g": "g gram gm",
    "kg": "kg kilogram kilo",
    "pound": "lb pound",  # of weight or of money: both are written so
    "oz": "oz ounce",
    "ton": "ton tonne",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hour",
    "day": "day",
    "week": "week wk",
    "month": "month",
    "year": "year yr",
    "ml": "ml mL milliliter millilitre",
    "l": "l L liter litre",
    "gal": "gal gallon",
    "dollar": "dollar buck usd USD",
    "cent": "cent",
    "euro": "euro eur EUR",
    "yen": "yen JPY",
    "rupee": "rupee rs Rs INR",
    "degree": "degree deg",
    "radian": "radian rad",
    "mi/h": "mph",
    "km/h": "kmph kph kmh",
    "am": "a.m am AM",
    "pm": "p.m pm PM",
    "%": "% percent percentage pct",
}
KNOWN = {word: unit for unit, words in _SAME.items() for word in words.split()}
CURRENCY = {r"\dollar": "dollar", r"\euro": "euro", r"\pounds": "pound", r"\yen": "yen"}
CURRENCY |= {r"\rupee": "rupee", "USD": "dollar", "Rs": "rupee"}
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
SCALES["trillion"] = 10**12

_SAYS = (
    "or and not no is are was isn't aren't to but than plus minus times over equals if wrong "
    "correct incorrect maybe either half quarter third infinity pi e i sin cos tan cot sec "
    "csc log ln exp sqrt mod x y z"
)
_CONTENT = frozenset(_SAYS.split()) | SCALES.keys()
_LETTERS = frozenset("LJNWVCFK")  # units that are one capital letter, where any words may be
_POWER = re.compile(r"(?:\^ ?\{?([23])\}?)$")
_DIMENSIONS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
_WORD = re.compile(r"[A-Za-z][A-Za-z'.]*|%")


@dataclass(frozen=True, slots=True)
class Unit:
    """Words behind a number."""

    name: str | None
    """Canonical name where every word is known, for example ``mi/h`` or ``cm^2``; else None."""


def read(words: str, *, any_words: bool) -> Unit | None:
    """The unit that `words` name; None where they are none.

    Args:
        words: What stands behind a number, for example ``square cm``, ``m/s^2``, ``eggs per day``.
        any_words: Whether words beside the known units may be passed over.
    """
    power = _POWER.search(words)
    bare = words[: power.start()].strip() if power else words.strip()
    listed = bare.replace(" per ", "/").replace("/", " / ").replace("-", " ").split()
    if not listed or len(listed) > MAX_WORDS:
        return None
    names = [_canonical(word) for word in listed]
    if all(name is not None for name in names):
        joined = _join([str(name) for name in names])
        return Unit(joined + (f"^{power[1]}" if power else ""))
    plain = all(
        _WORD.fullmatch(word) and (len(word.strip(".")) > 1 or word in _LETTERS)
        for word in listed
        if word != "/"
    )
    says = any(word.lower().strip(".") in _CONTENT for word in listed)
    return Unit(None) if any_words and plain and not says else None


def _canonical(word: str) -> str | None:
    if word == "/" or word in _DIMENSIONS or word.rstrip(".") in _DIMENSIONS:
        return _DIMENSIONS.get(word.rstrip("."), word)
    bare = word.rstrip(".")
    singular = bare[:-1] if len(bare) > 2 and bare.endswith("s") else bare
    for spelling in (bare, singular, bare.lower(), singular.lower()):
        # A capital letter alone is a symbol or an option, not a unit.
        if spelling in KNOWN and (len(bare) > 1 or not bare.isupper()):
            return KNOWN[spelling]
    return None


def _join(names: list[str]) -> str:
    """``["^2", "cm"]`` to ``cm^2``; ``["mi", "/", "h"]`` to ``mi/h``."""
    if names[0].startswith("^"):
        names = [*names[1:], names[0]]
    return "".join(names)
