"""Inputs that are kept in memory once they have been decoded, for repeated reading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class KeptInputs:
    """Decoded inputs by index. Nothing is kept until `allow` gives room."""

    def __init__(self, room_bytes: int = 0) -> None:
        self._kept: dict[int, Tensor] = {}
        self._room_bytes = room_bytes

    def allow(self, limit_bytes: int) -> None:
        """Keep up to `limit_bytes` in all, including what is kept already."""
        self._room_bytes = limit_bytes - sum(each.nbytes for each in self._kept.values())

    def __getstate__(self) -> dict[str, Any]:
        """Without the inputs: other processes read their own."""
        return {"_kept": {}, "_room_bytes": self._room_bytes + sum(x.nbytes for x in self._kept.values())}

    def get(self, index: int, read: Callable[[int], Tensor]) -> Tensor:
        """The input at `index`, from `read` unless it is kept."""
        if index in self._kept:
            return self._kept[index]
        found = read(index)
        if found.nbytes <= self._room_bytes:
            self._kept[index] = found
            self._room_bytes -= found.nbytes
        return found
