"""Waiting for what happens elsewhere: a test says for what, never how long it takes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["LONG_S", "Clock", "in_the_end", "returns", "until"]

# What takes longer than this on any machine, however busy, will never happen.
LONG_S = 600.0

T = TypeVar("T")


class Clock:
    """A clock that shows what it is told."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def until(condition: Callable[[], bool], timeout_s: float = LONG_S, every_s: float | None = None) -> None:
    """Wait for something that another thread or process does; fails when it does not.

    Unless told how often, it looks less often the longer it waits: looking takes time from what it waits for.
    """
    end_s, pause_s = time.monotonic() + timeout_s, 0.005
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(pause_s if every_s is None else every_s)
        pause_s = min(1.2 * pause_s, 0.1)


async def in_the_end(condition: Callable[[], bool]) -> None:
    """`until`, for something that happens in the running event loop."""
    end_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        await asyncio.sleep(0.002)


def returns(call: Callable[[], T], timeout_s: float = LONG_S) -> T:
    """What a call returns that must not wait for anybody; fails when it does wait."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), "the call waits for what does not come"
    assert found, "the call failed, see the traceback of its thread"
    return found[0]
