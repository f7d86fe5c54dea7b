"""Numbers for the blocks of a trace, in the order in which they first occur."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class NumberedBlocks(NamedTuple):
    """Blocks of requests, one request after the other, numbered from 0 in the order of their first use."""

    blocks: Ints  # [n]
    starts: Ints  # [requests + 1]
    names: Sequence[int | str] | Ints  # identifiers, [distinct]


class BlockNumbering:
    """Numbers the blocks of requests that are added one after another.

    Whole numbers of 64 bits are kept in an array, and only other identifiers in a dictionary: where few
    blocks repeat, its objects take many times the memory of the trace's file.
    """

    def __init__(self, *, flat: bool) -> None:
        self.flat = flat
        self._ends = array("q", [0])
        self._blocks = array("q")  # identifiers, or their numbers as soon as there is a dictionary
        self._numbers: dict[int | str, int] | None = None

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._ends) - 1

    def add(self, request: Iterable[int | str]) -> None:
        """Add the blocks of a request. In a flat trace, a block that is named twice counts once."""
        row = [*dict.fromkeys(request)] if self.flat else [*request]
        if self._numbers is None:
            try:
                self._blocks += array("q", cast("list[int]", row))
            except (TypeError, OverflowError):
                self._numbers = {}
                self._blocks = self._looked_up(self._blocks)
        if self._numbers is not None:
            self._blocks += self._looked_up(row)
        self._ends.append(len(self._blocks))

    def finish(self) -> NumberedBlocks:
        """The blocks of all requests. Nothing can be added afterwards."""
        blocks, starts = np.asarray(self._blocks), np.asarray(self._ends)
        if self._numbers is not None:
            return NumberedBlocks(blocks, starts, list(self._numbers))
        blocks, names = _numbered(blocks)
        return NumberedBlocks(blocks, starts, names)

    def _looked_up(self, row: Iterable[int | str]) -> array[int]:
        assert self._numbers is not None
        numbers = self._numbers
        return array("q", [numbers.setdefault(block, len(numbers)) for block in row])


def first_places(blocks: Ints) -> Ints:
    """Where each block occurs first, [distinct]; blocks are numbered in the order of their first use."""
    return np.flatnonzero(np.diff(np.maximum.accumulate(blocks), prepend=-1))


def _numbered(names: Ints) -> tuple[Ints, Ints]:
    """Number identifiers [n] in the order of their first use; return the numbers, and each name once."""
    order = names.argsort(kind="stable")
    ordered = names[order]
    begins = np.ones(len(names), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=begins[1:])
    del ordered  # the arrays are as large as the file, so each counts
    first = order[begins]  # of equal ones, as the order is stable
    new = np.zeros(len(names), dtype=np.bool_)
    new[first] = True
    counts = np.diff(np.append(np.flatnonzero(begins), len(names)))
    numbers = np.empty(len(names), dtype=np.int64)
    numbers[order] = (np.cumsum(new) - 1)[first].repeat(counts)
    return numbers, names[new]
