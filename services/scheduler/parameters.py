"""The parameters of requests: their names, and what their values may be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gati.errors import RequestError
from services.wire.tensors import LONGEST_PLACE

WISHES = ("latency_slo_ms", "timeout_ms", "priority", "place")
PARAMETERS = (*WISHES, "timeout", "binary_data_output")
FIELDS = ("id", "parameters", "inputs", "outputs")
# Clients of other servers send them; here they have no effect.
UNUSED_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end", "content_type", "headers")
UNUSED_FIELDS = ("model_name", "model_version")
_LARGEST_TIME_MS = 3_600_000.0
_LONGEST_NUMBER = 40  # characters of a number that is sent as text


def check_names(
    given: Iterable[str], known: Sequence[str], *, unused: Sequence[str] = (), what: str = "parameter"
) -> None:
    """Refuse unknown names: who sends `slo`, for example, would believe that an SLO holds.

    Raises `RequestError`, which lists the `known` names; those that are `unused` may be given, too.
    """
    for name in given:
        if name not in known and name not in unused:
            raise RequestError(f"no {what} is called {name[:40]!r}; there are {', '.join(known)}")


def place(value: Any) -> str | None:
    """Check the place of the inputs, such as a camera's name; None without one. Raises `RequestError`."""
    if value is None:
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= LONGEST_PLACE:
        raise RequestError(f"`place` is {shown(value)!r}; give a name of 1 to {LONGEST_PLACE} characters")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, from a form in a strange charset
        raise RequestError("`place` is not valid Unicode") from error
    return value


def positive(values: Mapping[str, Any], name: str, per_ms: float = 1.0) -> float | None:
    """Return a time above zero in milliseconds, of which one has `per_ms` of the sent unit.

    At most `_LARGEST_TIME_MS`; None if missing. Raises `RequestError`.
    """
    value = values.get(name)
    if value is None:
        return None
    try:
        if isinstance(value, bool) or (isinstance(value, str) and len(value) > _LONGEST_NUMBER):
            raise ValueError
        number = float(value)  # query strings and forms contain text
        if not (math.isfinite(number) and number > 0.0):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"`{name}` is {shown(value)!r}; give a number above 0") from None
    return min(number / per_ms, _LARGEST_TIME_MS)


def priority(value: Any) -> int | None:
    """Check a priority: 1 is the highest, 0 the default; None without one. Raises `RequestError`."""
    if value is None:
        return None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _LONGEST_NUMBER:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 10:
        raise RequestError(f"`priority` is {shown(value)}; give a whole number from 1 (first) to 10")
    return value


def timeout(parameters: Mapping[str, Any]) -> float | None:
    """Return the timeout: `timeout`, in microseconds as in Triton, or else `timeout_ms`."""
    timeout_ms = positive(parameters, "timeout", per_ms=1e3)
    return positive(parameters, "timeout_ms") if timeout_ms is None else timeout_ms


def shown(value: Any) -> str:
    """Return the beginning of a value for a message; of lists and objects, which may be deep, the kind."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return str(value)[:40]
