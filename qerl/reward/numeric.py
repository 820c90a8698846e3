r"""Are two expressions equal: exactly where they are rational, to 160 digits where they are not.

Rational arithmetic stays in `Fraction`, so 1/2006! is not 1/2004! and 0.3333 is not 1/3. Anything
else (roots, pi, logarithms, i) is evaluated by mpmath with 180 digits. Two values are equal if they
agree to 160 of them, or if both are zero: rounding errors that shrink with the precision, which a
number that is merely tiny does not. Irrational numbers that agree to 160 digits pass as equal.

Expressions with symbols are equal if they are equal at every one of `POINTS`, where the left side
is real if it is real anywhere (a square root of x is meant for x >= 0). Two different expressions
of an answer's size agree at that many fixed rational points with a probability that rounds to 0.

Sizes are bounded before they are computed: a tower of powers raises `TooLargeError` at once.
"""

import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import reduce
from math import ceil, comb, factorial, floor, isqrt
from typing import Any

import mpmath

from qerl.reward.expression import Node

# mpmath ships no types: a value is a Fraction where it is exact, else an mpf or an mpc.
Value = Any
Symbols = Mapping[str, Fraction]

MAX_BITS = 1 << 16  # of an exact number: 2006! has 19,000, the largest power in MATH 4,951
MAX_EXPONENT = 1 << 20  # of two, in an inexact number
MAX_ARGUMENT_BITS = 1 << 10  # of an angle, which must be reduced modulo 2 pi
COARSE_DIGITS, FINE_DIGITS, EQUAL_DIGITS = 60, 180, 160
_TEN = mpmath.mpf(10)
SCALES = (Fraction(97, 89), Fraction(31, 97), Fraction(71, 97), Fraction(211, 97))
POINTS = range(len(SCALES) + 4)  # at which expressions with symbols are compared
MIN_REAL_POINTS = 3


class TooLargeError(ArithmeticError):
    """A number that would not fit the bounds above."""


class UndefinedError(ArithmeticError):
    """No value: a division by zero, a factorial of a fraction."""


def are_equal(left: Node, right: Node) -> bool:
    """True where both sides have the same value, at every point if they have symbols.

    Raises:
        TooLargeError: a side does not fit the bounds of this module.
    """
    names = left.symbols() | right.symbols()
    if not names:
        return _defined_and_same(left, right, {})
    real: list[Symbols] = []
    other: list[Symbols] = []
    for index in POINTS:
        point = symbol_values(names, index)
        try:
            is_real = _is_real(evaluate(left, point, COARSE_DIGITS))
        except UndefinedError:
            continue
        (real if is_real else other).append(point)
    points = real if len(real) >= MIN_REAL_POINTS else real + other
    return bool(points) and all(_defined_and_same(left, right, point) for point in points)


def symbol_values(names: frozenset[str], point: int) -> dict[str, Fraction]:
    """A rational value for each name at `point`: different names get unrelated values.

    The scales above 0 come first; then all values are negative, then every pair of the first eight
    names takes opposite signs at some point, so that |xy| is not xy.
    """
    values = {}
    for index, name in enumerate(sorted(names)):
        size = Fraction(1 + zlib.crc32(name.encode()) % 9973, 4987)
        bit = point - len(SCALES)
        sign = 1 if bit < 0 else (-1 if bit == 0 or index >> (bit - 1) & 1 else 1)
        values[name] = sign * size * SCALES[point % len(SCALES)]
    return values


def same(measure: Callable[[int], tuple[Value, Value]]) -> bool:
    """Whether two values are equal, given what they are at a number of digits."""
    left, right = measure(COARSE_DIGITS)
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    coarse_gap, coarse_size = _gap_and_size(left, right)
    # Far apart is unequal without the fine digits, unless both are errors around zero.
    if coarse_gap > coarse_size * _TEN**-20 and coarse_size > _TEN**-30:
        return False
    gap, size = _gap_and_size(*measure(FINE_DIGITS))
    return bool(gap <= size * _TEN**-EQUAL_DIGITS or size <= coarse_size * _TEN**-COARSE_DIGITS)


def _gap_and_size(left: Value, right: Value) -> tuple[Value, Value]:
    with mpmath.workdps(FINE_DIGITS + 20):
        left, right = _inexact(left), _inexact(right)
        return abs(left - right), abs(left) + abs(right)


def evaluate(tree: Node, symbols: Symbols, digits: int) -> Value:
    """The value of `tree` at `symbols`: a Fraction where exact, else to about `digits` digits.

    Raises:
        TooLargeError: it does not fit the bounds of this module.
        UndefinedError: it has no value.
    """
    with mpmath.workdps(digits + 20):
        try:
            return _value(tree, symbols)
        except (ZeroDivisionError, mpmath.libmp.NoConvergence) as error:
            raise UndefinedError(str(error)) from error
        except (OverflowError, ValueError) as error:
            raise TooLargeError(str(error)) from error


def to_float(value: Value) -> Any:
    """A real value as an mpf.

    Raises:
        UndefinedError: the value is not real.
    """
    if not _is_real(value):
        raise UndefinedError("not real")
    return mpmath.re(_inexact(value))


def are_proportional(left: Node, right: Node, *, positive: bool) -> bool:
    """True where left = c * right at every point, c a constant that is not 0.

    Args:
        left: An expression.
        right: Another.
        positive: Whether c must be above 0, as it must for two inequalities.

    Raises:
        TooLargeError: a side does not fit the bounds of this module.
    """
    names = left.symbols() | right.symbols()
    factor = None
    for index in POINTS:
        point = symbol_values(names, index)
        try:
            over, under = (evaluate(side, point, COARSE_DIGITS) for side in (left, right))
        except UndefinedError:
            continue
        if over == 0 or under == 0:
            return False
        with mpmath.workdps(COARSE_DIGITS):
            factor = _inexact(over) / _inexact(under) if factor is None else factor
            gap = _inexact(over) - factor * _inexact(under)
            if abs(gap) > abs(_inexact(over)) * _TEN ** (20 - COARSE_DIGITS):
                return False
    if factor is None or not _is_real(factor):
        return False
    return not positive or bool(to_float(factor) > 0)


def _defined_and_same(left: Node, right: Node, point: Symbols) -> bool:
    try:
        return same(lambda digits: (evaluate(left, point, digits), evaluate(right, point, digits)))
    except UndefinedError:
        return False


def _is_real(value: Value) -> bool:
    if isinstance(value, Fraction):
        return True
    return bool(abs(mpmath.im(value)) <= abs(value) * _TEN ** (10 - COARSE_DIGITS))


def _inexact(value: Value) -> Value:
    if isinstance(value, Fraction):
        return mpmath.mpf(value.numerator) / value.denominator
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Value) -> Value:
    if isinstance(value, Fraction):
        if _bits(value) > MAX_BITS:
            raise TooLargeError("more digits than an answer has")
    elif not mpmath.isfinite(value):
        raise UndefinedError("not finite")
    elif value != 0 and abs(mpmath.mag(value)) > MAX_EXPONENT:
        raise TooLargeError("a larger power than an answer has")
    return value


def _value(tree: Node, symbols: Symbols) -> Value:
    if tree.op == "num":
        return tree.leaf
    if tree.op == "sym":
        return symbols[str(tree.leaf)]
    if tree.op == "const":
        return {"pi": mpmath.mpf(mpmath.pi), "e": mpmath.mpf(mpmath.e), "i": mpmath.mpc(0, 1)}[
            str(tree.leaf)
        ]
    args = [_value(arg, symbols) for arg in tree.args]
    operation = _OPERATIONS.get(tree.op)
    if operation is not None:
        return _bounded(operation(*args))
    return _bounded(_function(tree.op, args[0]))


def _mix(operation: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    """`operation` over any number of values, exact as long as all of them are."""

    def apply(left: Value, right: Value) -> Value:
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return _bounded(operation(left, right))
        return operation(_inexact(left), _inexact(right))

    return lambda *values: reduce(apply, values)


def _inverse(value: Value) -> Value:
    if value == 0:
        raise UndefinedError("division by zero")
    return 1 / value


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        return _integer_power(base, exponent.numerator)
    base, exponent = _inexact(base), _inexact(exponent)
    if base == 0:
        if mpmath.im(exponent) == 0 and mpmath.re(exponent) > 0:
            return Fraction(0)
        raise UndefinedError("a power of zero")
    growth = abs(mpmath.log(base)) * abs(exponent)
    if growth > MAX_EXPONENT:
        raise TooLargeError("a larger power than an answer has")
    return mpmath.power(base, exponent)


def _integer_power(base: Value, exponent: int) -> Value:
    if base == 0 and exponent < 0:
        raise UndefinedError("division by zero")
    if isinstance(base, Fraction):
        if abs(base) == 1 or base == 0:
            return base ** (exponent % 2 if abs(base) == 1 else exponent)
        if (_bits(base) - 1) * abs(exponent) <= MAX_BITS:
            return base**exponent
        raise TooLargeError("more digits than an answer has")
    if base != 0 and abs(mpmath.mag(base)) * abs(exponent) > MAX_EXPONENT:
        raise TooLargeError("a larger power than an answer has")
    return mpmath.power(base, exponent)


def _root(radicand: Value, degree: Value) -> Value:
    if not (isinstance(degree, Fraction) and degree.denominator == 1 and 1 <= degree <= 1000):
        return _power(radicand, _inverse(degree))
    n = degree.numerator
    if isinstance(radicand, Fraction) and n == 2 and radicand >= 0:
        over, under = isqrt(radicand.numerator), isqrt(radicand.denominator)
        if over * over == radicand.numerator and under * under == radicand.denominator:
            return Fraction(over, under)
    value = _inexact(radicand)
    if n % 2 and mpmath.im(value) == 0 and mpmath.re(value) < 0:
        return -mpmath.root(-mpmath.re(value), n)  # the real root, as schools have it
    return mpmath.root(value, n)


def _factorial(value: Value) -> Value:
    if not (isinstance(value, Fraction) and value.denominator == 1 and value >= 0):
        raise UndefinedError("a factorial of what is no natural number")
    if value > 5000:
        raise TooLargeError("more digits than an answer has")
    return Fraction(factorial(value.numerator))


def _binomial(over: Value, under: Value) -> Value:
    for value in (over, under):
        if not (isinstance(value, Fraction) and value.denominator == 1 and value >= 0):
            raise UndefinedError("a binomial of what are no natural numbers")
    if over > 5000:
        raise TooLargeError("more digits than an answer has")
    return Fraction(comb(over.numerator, under.numerator))


def _logarithm(argument: Value, base: Value) -> Value:
    if argument == 0 or base in (0, 1):
        raise UndefinedError("a logarithm of zero, or to base 0 or 1")
    return mpmath.log(_inexact(argument)) / mpmath.log(_inexact(base))


def _function(name: str, argument: Value) -> Value:
    if isinstance(argument, Fraction) and name in _EXACT_FUNCTIONS:
        return Fraction(_EXACT_FUNCTIONS[name](argument))
    value = _inexact(argument)
    if name == "abs":
        return abs(value)
    if value != 0 and mpmath.mag(value) > MAX_ARGUMENT_BITS:
        raise TooLargeError("an argument larger than an answer has")
    if name in ("exp", "sinh", "cosh", "tanh", "coth") and abs(value) > MAX_EXPONENT:
        raise TooLargeError("a larger power than an answer has")
    if name == "ln" and value == 0:
        raise UndefinedError("a logarithm of zero")
    return _FUNCTIONS[name](value)


_TRIGONOMETRY = ("sin", "cos", "tan", "cot", "sec", "csc")
_EXACT_FUNCTIONS: dict[str, Callable[[Fraction], Any]] = {"abs": abs, "floor": floor, "ceil": ceil}
_FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    **{name: getattr(mpmath, name) for name in (*_TRIGONOMETRY, "exp")},
    **{name: getattr(mpmath, name) for name in ("sinh", "cosh", "tanh", "coth", "floor", "ceil")},
    **{f"arc{name}": getattr(mpmath, f"a{name}") for name in _TRIGONOMETRY},
    "ln": mpmath.log,
}
_OPERATIONS: dict[str, Callable[..., Value]] = {
    "add": _mix(lambda left, right: left + right),
    "mul": _mix(lambda left, right: left * right),
    "neg": lambda value: -value,
    "inv": _inverse,
    "pow": _power,
    "root": _root,
    "fact": _factorial,
    "binom": _binomial,
    "log": _logarithm,
}
