"""Unions of real intervals as sets: equal if they hold the same points, however they are written.

Ends are compared exactly (`numeric`). Intervals that overlap, or touch at a point that one of them
holds, are merged: (-oo, 3) and [3, oo) make the whole line, while (-oo, 3) and (3, oo) leave out 3.
"""

from dataclasses import dataclass, replace
from functools import cmp_to_key

import mpmath

from qerl.reward.expression import Node
from qerl.reward.kinds import Interval, RealSet
from qerl.reward.numeric import COARSE_DIGITS, UndefinedError, are_equal, evaluate, to_float

_INFINITY = mpmath.mpf("inf")


@dataclass(frozen=True)
class _Piece:
    """An interval with the values of its ends."""

    interval: Interval
    low: mpmath.mpf
    high: mpmath.mpf


def are_same_set(left: RealSet, right: RealSet) -> bool:
    """True where both hold the same reals; ends with symbols must stand in the same order.

    Raises:
        TooLargeError: an end does not fit the bounds of `numeric`.
    """
    try:
        pieces = [_merged(left), _merged(right)]
    except UndefinedError:
        pieces = [list(left.intervals), list(right.intervals)]
    if len(pieces[0]) != len(pieces[1]):
        return False
    return all(_are_same_interval(a, b) for a, b in zip(*pieces, strict=True))


def _are_same_interval(left: Interval, right: Interval) -> bool:
    closed = (left.low_closed, left.high_closed) == (right.low_closed, right.high_closed)
    ends = ((left.low, right.low), (left.high, right.high))
    return closed and all(
        a is b is None or (a is not None and b is not None and are_equal(a, b)) for a, b in ends
    )


def _merged(reals: RealSet) -> list[Interval]:
    pieces = [
        _Piece(interval, _value(interval.low, -_INFINITY), _value(interval.high, _INFINITY))
        for interval in reals.intervals
    ]
    # An interval without points adds none.
    pieces = [p for p in pieces if p.low < p.high or (p.interval.low_closed and _touch(p, p))]
    pieces.sort(key=cmp_to_key(_order))
    merged: list[_Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if last is None or not _joins(last, piece):
            merged.append(piece)
        elif _ends_later(piece, last):
            longer = replace(
                last.interval, high=piece.interval.high, high_closed=piece.interval.high_closed
            )
            merged[-1] = _Piece(longer, last.low, piece.high)
    return [piece.interval for piece in merged]


def _value(end: Node | None, infinite: mpmath.mpf) -> mpmath.mpf:
    if end is None:
        return infinite
    if end.symbols():
        raise UndefinedError("an end with symbols has no place on the line")
    return to_float(evaluate(end, {}, COARSE_DIGITS))


def _same_place(left: mpmath.mpf, right: mpmath.mpf) -> bool:
    if left == right or not (mpmath.isfinite(left) and mpmath.isfinite(right)):
        return bool(left == right)
    return bool(abs(left - right) <= mpmath.mpf(10) ** -40 * abs(left))


def _touch(left: _Piece, right: _Piece) -> bool:
    return _same_place(left.high, right.low)


def _order(left: _Piece, right: _Piece) -> int:
    if not _same_place(left.low, right.low):
        return -1 if left.low < right.low else 1
    return right.interval.low_closed - left.interval.low_closed


def _joins(left: _Piece, right: _Piece) -> bool:
    if _touch(left, right):
        return left.interval.high_closed or right.interval.low_closed
    return bool(right.low < left.high)


def _ends_later(piece: _Piece, last: _Piece) -> bool:
    if _same_place(piece.high, last.high):
        return piece.interval.high_closed
    return bool(piece.high > last.high)
