"""Sizes, durations and shares as people write them (`256MiB`, `1.5GB`, `10m`, `500ms`, `94.4 %`)."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from gati.errors import GatiError

_SIZES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_DURATIONS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes that `text` means; a bare number is bytes, `k`, `m`, `g` are binary.

    Raises GatiError for text that is not a size, and for sizes below one byte.
    """
    value, unit = _split(str(text), _SIZES, "a size; write for example 256MiB, 1.5GB or 1048576")
    size = int(value * _SIZES[unit])
    if size < 1:
        raise GatiError(f"{text!r} is less than one byte; write for example 256MiB, 1.5GB or 1048576")
    return size


def parse_duration(text: str | float) -> float:
    """Return the seconds that `text` means, such as `10m`, `90s`, `500ms`, `1.5h`; a bare number is seconds.

    Raises GatiError for text that is not a duration, and for durations of zero.
    """
    value, unit = _split(str(text), _DURATIONS, "a duration; write for example 10m, 90s or 500ms")
    if value <= 0.0:
        raise GatiError(f"{text!r} is not above zero; write for example 10m, 90s or 500ms")
    return value * _DURATIONS[unit]


def format_bytes(size: int) -> str:
    """Return `size` in the largest binary unit that keeps the number at one or above, such as `1.5 MiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024.0:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024.0
    return f"{value:.1f} TiB"


def percent(share: float, digits: int = 1) -> str:
    """Return a share as a percentage, such as `94.4 %` for 0.944."""
    return f"{100 * share:.{digits}f} %"


def at_least(share: float, digits: int = 2) -> str:
    """Return a lower limit of a share as a percentage without its sign, rounded down: `98.99` for 0.98996."""
    return _limit(share, digits, ROUND_FLOOR)


def at_most(share: float, digits: int = 2) -> str:
    """Return an upper limit of a share as a percentage without its sign, rounded up: `0.31` for 0.00304."""
    return _limit(share, digits, ROUND_CEILING)


def _limit(share: float, digits: int, rounding: str) -> str:
    # from the shortest decimal number: 100 * 0.29 is below 29
    percentage = Decimal(repr(float(share))).scaleb(2)
    return f"{percentage.quantize(Decimal(1).scaleb(-digits), rounding=rounding):f}"


def _split(text: str, units: dict[str, int] | dict[str, float], wanted: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise GatiError(f"{text!r} is not {wanted}")
    return float(match[1]), match[2].lower()
