"""Reading strict JSON objects field by field, with messages that name the file and the field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gati.errors import CompositionError

__all__ = [
    "Fields",
    "flag",
    "integer",
    "items",
    "mapping",
    "number",
    "objects",
    "optional_integer",
    "optional_mapping",
    "optional_number",
    "text",
]

T = TypeVar("T")


class Fields:
    """A JSON object whose values are taken out by name and checked on the way."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def take(self, name: str, kind: Callable[[object], T]) -> T:
        """Return field `name` as `kind` makes it; `kind` says in its docstring what it accepts."""
        if name not in self.values:
            raise CompositionError(f"{self.where}: has no field {name!r}; compose again")
        value = self.values[name]
        try:
            return kind(value)
        except (TypeError, ValueError):
            wanted = (kind.__doc__ or kind.__name__).rstrip(".").lower()
            raise CompositionError(
                f"{self.where}: field {name!r} is {value!r}, expected {wanted}; compose again"
            ) from None


def number(value: object) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError
    return float(value)


def integer(value: object) -> int:
    """A whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def flag(value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise TypeError
    return value


def text(value: object) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError
    return value


def optional_number(value: object) -> float | None:
    """A finite number or null."""
    return None if value is None else number(value)


def optional_integer(value: object) -> int | None:
    """A whole number or null."""
    return None if value is None else integer(value)


def optional_mapping(value: object) -> dict[str, Any] | None:
    """An object or null."""
    if value is not None and not isinstance(value, dict):
        raise TypeError
    return value


def mapping(value: object) -> dict[str, object]:
    """An object."""
    if not isinstance(value, dict):
        raise TypeError
    return value


def items(value: object) -> list[object]:
    """A list."""
    if not isinstance(value, list):
        raise TypeError
    return value


def objects(value: object) -> list[dict[str, object]]:
    """A list of objects."""
    found = items(value)
    return [mapping(each) for each in found]
