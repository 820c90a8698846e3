"""Checks of JSON values: small functions that compose into the shape of a document.

A check takes the dotted name of a value and the value, and raises ValueError with name, value and
constraint in one line.
"""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

Check = Callable[[str, Any], None]


def text(name: str, value: Any) -> None:
    """A string."""
    if not isinstance(value, str):
        raise _wrong(name, value, "a text")


def truth(name: str, value: Any) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")


def integer(name: str, value: Any) -> None:
    """A whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(name, value, "a whole number")


def number(name: str, value: Any) -> None:
    """A finite number, null for NaN, or "inf" and "-inf"."""
    if value is None or value in ("inf", "-inf"):
        return
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(name, value, "a number, null (NaN), 'inf' or '-inf'")
    if value != value or value in (float("inf"), float("-inf")):
        raise _wrong(name, value, "finite in JSON; NaN is null, infinities are 'inf' and '-inf'")


def utc_time(name: str, value: Any) -> None:
    """An ISO 8601 time in UTC."""
    text(name, value)
    try:
        offset = datetime.fromisoformat(value).utcoffset()
    except ValueError:
        offset = None
    if offset != timedelta(0):
        raise _wrong(name, value, "an ISO time in UTC such as 2025-01-31T09:30:00+00:00")


def json_value(name: str, value: Any) -> None:
    """Anything that JSON can hold."""
    if isinstance(value, Mapping):
        map_of(json_value)(name, value)
    elif isinstance(value, list):
        list_of(json_value)(name, value)
    elif isinstance(value, float):
        number(name, value)
    elif value is not None and not isinstance(value, str | int):
        raise _wrong(name, value, "null, a text, a number, true, false, a list or an object")


def one_of(*allowed: object) -> Check:
    """One of a few values."""

    def check(name: str, value: Any) -> None:
        if value not in allowed:
            raise _wrong(name, value, "one of " + ", ".join(map(repr, allowed)))

    return check


def optional(inner: Check) -> Check:
    """Null, or what `inner` accepts."""

    def check(name: str, value: Any) -> None:
        if value is not None:
            inner(name, value)

    return check


def list_of(inner: Check) -> Check:
    """A list whose items `inner` accepts."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, list):
            raise _wrong(name, value, "a list")
        for index, item in enumerate(value):
            inner(f"{name}[{index}]", item)

    return check


def map_of(inner: Check) -> Check:
    """An object with any keys, whose values `inner` accepts."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise _wrong(name, value, "an object")
        for key, item in value.items():
            text(f"{name}: key", key)
            inner(f"{name}.{key}", item)

    return check


def structure(checks: Mapping[str, Check]) -> Check:
    """An object with exactly the keys of `checks`."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise _wrong(name, value, "an object")
        for key in checks:
            if key not in value:
                raise ValueError(f"{name}.{key} is missing")
        for key in value:
            if key not in checks:
                raise ValueError(f"{name}.{key}: no such field; known: {', '.join(checks)}")
        for key, inner in checks.items():
            inner(f"{name}.{key}", value[key])

    return check


def _wrong(name: str, value: Any, wanted: str) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ValueError(f"{name}={shown}: must be {wanted}")
