"""What the guard of a watch has withdrawn: told to other processes, and kept in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Withdrawal(NamedTuple):
    """The guard withdrew settings for the time of that `number`, counted from 1, so that `left` were left."""

    number: int
    left: int


def withdrawals_in(document: Mapping[str, Any], before: int | None = None) -> tuple[Withdrawal, ...]:
    """What the guard of a saved watch has withdrawn; `before`: settings left, if it does not say so.

    Raises KeyError, TypeError or ValueError for a document that `Watch.to_json` did not write.
    """
    if "withdrawals" in document:
        return tuple(Withdrawal(int(number), int(left)) for number, left in document["withdrawals"])
    left = int_or_none(document.get("withdrawn_to", before))
    return () if left is None else (Withdrawal(1, left),)


def int_or_none(value: Any) -> int | None:
    """A number of a document that may be missing."""
    return None if value is None else int(value)
