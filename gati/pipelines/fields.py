"""Reading tables of TOML and JSON: every value checked, no key ignored."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping
from typing import Any

from gati.errors import PipelineError


class CheckedTable:
    """A table whose keys are read one by one; `finish` raises for keys that were not read."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = dict(values)
        self._known: list[str] = []
        self.where = where

    def take(self, key: str) -> Any:
        """Return the value of `key`, None if it is absent."""
        self._known.append(key)
        return self._values.pop(key, None)

    def at(self, key: str) -> str:
        """The place of a key in error messages."""
        return f"{self.where}: {key}"

    def finish(self) -> None:
        """Raise `PipelineError` for an unknown key."""
        for key in self._values:
            close = difflib.get_close_matches(key, self._known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(self._known)}"
            raise PipelineError(f"{self.where}: unknown key '{key}'; {hint}")


def text(value: Any, where: str) -> str:
    """A string that is not empty, and that a path can be. Raises `PipelineError`."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise PipelineError(f"{where} is {value!r}; give a string in quotes")
    return value


def texts(value: Any, where: str) -> tuple[str, ...]:
    """A non-empty list of distinct strings; a single string is a list of one. Raises `PipelineError`."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values:
        raise PipelineError(f"{where} is {value!r}; give a list of names")
    names = tuple(text(item, where) for item in values)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PipelineError(f"{where} names '{twice}' twice; name it once")
    return names


def number(value: Any, where: str, low: float, high: float) -> float:
    """A finite number from `low` to `high`. Raises `PipelineError`."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not good or not low <= value <= high:
        allowed = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of at least {low:g}"
        raise PipelineError(f"{where} is {value!r}; give a number {allowed}")
    return float(value)


def table(value: Any, where: str) -> dict[str, Any]:
    """A table that is not empty. Raises `PipelineError`."""
    if not isinstance(value, dict) or not value:
        raise PipelineError(f"{where} is {value!r}; give a table with at least one entry")
    return value
