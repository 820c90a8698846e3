r"""Mathematics beyond our grammar, by math-verify: sums, products, integrals, limits, determinants.

math-verify reads and evaluates, and for constants the comparison is ours. Its own `verify` decides
what is left (expressions with symbols under such a sign) and no more, since it accepts what is not
equal: it chops differences below 1e-15, rounds to 6 decimals once a float appears, lowers the case
of symbols, reads ``2(3)`` as the mixed number 5 and drops indices of numbers (``1011_2``).

The reference is always boxed, reference and prediction always stand in this order, and no timeout
of the library is used: they need the main thread's signals. Whoever calls this runs in a worker
process that can be killed.
"""

import logging
import re
from fractions import Fraction
from typing import Any

import mpmath

BEYOND = re.compile(r"\\(?:sum|prod|int|lim|det|partial|nabla)(?![A-Za-z])|\\text ?\{(?:lcm|gcd)\}")

MAX_TERMS = 10_000
"""Of a finite sum or product: a longer one would be ended by its time budget."""

DIGITS = 50


def needs_math_verify(text: str) -> bool:
    """Whether cleaned `text` holds a sign that `expression` does not know and math-verify does."""
    return BEYOND.search(text) is not None


def math_verify_value(text: str) -> Any:
    """The real value of an expression without symbols, as an mpf; None where it has none."""
    # sympy raises almost anything on text that is no mathematics.
    try:
        expression = _parse(text)
        return None if expression is None else _constant(expression)
    except MemoryError:
        raise
    except Exception:
        return None


def math_verify_agrees(gold: str, answer: str) -> bool:
    """Whether math-verify reads both and they are equal; False where it fails on one."""
    left, right = math_verify_value(gold), math_verify_value(answer)
    if left is not None and right is not None:
        return agree_to_digits(left, right)
    try:
        return _verify(gold, answer)
    except MemoryError:
        raise
    except Exception:
        return False


def agree_to_digits(left: Any, right: Any) -> bool:
    """Whether two values differ by less than the last of `DIGITS` digits."""
    with mpmath.workdps(DIGITS + 10):
        a, b = (
            mpmath.mpf(v.numerator) / v.denominator if isinstance(v, Fraction) else v
            for v in (left, right)
        )
        return bool(abs(a - b) <= (abs(a) + abs(b)) * mpmath.mpf(10) ** -DIGITS)


def _verify(gold: str, answer: str) -> bool:
    # Imported here: the fork server of the pool loads sympy once, and nothing else needs it.
    from math_verify import verify

    left, right = _parse(gold), _parse(answer)
    if left is None or right is None:
        return False
    return bool(verify(left, right, float_rounding=30, numeric_precision=60, timeout_seconds=None))


def _parse(text: str) -> Any:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing timeout
    # No unit rules ("2s" would lose its s); ours have run, and sympy never evaluates text.
    config = LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(
            basic_latex=True, malformed_operators=True, boxed="last"
        ),
    )
    found = parse(rf"\boxed{{{text}}}", [config], fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def _constant(expression: Any) -> Any:
    from sympy import Product, Sum

    if not getattr(expression, "is_number", False):
        return None
    for repeated in expression.atoms(Sum, Product):
        for _, low, high in repeated.limits:
            if (high - low).is_finite and high - low > MAX_TERMS:
                raise ValueError(f"more than {MAX_TERMS} terms")
    value = expression.doit().evalf(DIGITS + 10)
    if not (value.is_number and value.is_comparable and value.is_finite):
        return None
    with mpmath.workdps(DIGITS + 10):
        return mpmath.mpf(str(value))
