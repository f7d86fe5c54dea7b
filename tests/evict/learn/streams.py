"""A stream on which LRU never hits: some prefixes return, just too late for it, others never."""

from __future__ import annotations

from collections.abc import Iterator

from gati.evict.learn.reading import AccessRecord

CAPACITY = 64
_HOT, _LENGTH = 10, 4


def hot_and_cold(requests: int, *, first: int = 0) -> Iterator[list[int]]:
    """In turns one of ten paths that return every 20 requests, and one that is never seen again.

    Between two visits of a path 80 blocks are requested. Requests are numbered from `first`.
    """
    for number in range(first, first + requests):
        begin = (number // 2) % _HOT * 100 if number % 2 == 0 else 10_000 + number * 100
        yield list(range(begin, begin + _LENGTH))


def records(requests: int, *, first: int = 0, engine: str = "engine") -> Iterator[AccessRecord]:
    """The stream as an access log has it, a request a second."""
    for number, ids in enumerate(hot_and_cold(requests, first=first), start=first):
        yield AccessRecord(engine, float(number), ids, 0, CAPACITY, {})
