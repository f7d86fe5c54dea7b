"""In which order requests are computed: little work goes before much, but not for ever.

In the order of arrival, every short request behind a burst of long ones waits for all of them. So a
request's turn comes as if it had arrived later by `PATIENCE` times the time that its own prompt takes: it is
overtaken only by those that arrive before then, and the longer it takes anyway, the longer it may wait.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator

from gati.evict.engine.generation import Generation

PATIENCE = 2.0
_MEMORY = 0.99  # decay of the time that work takes, per step


def work_of(start: int, stop: int, growth: float) -> float:
    """The work of a prompt's tokens from `start` to `stop`, in first tokens: each takes `growth` more."""
    return (stop - start) * (1.0 + 0.5 * growth * (start + stop))


class WaitingLine:
    """Requests that wait to be admitted, in the order of their turns. Not thread-safe."""

    def __init__(self) -> None:
        self._line: list[Generation] = []
        self._took_s = self._work = 0.0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._line)

    @property
    def first(self) -> Generation:
        """The request whose turn it is."""
        return self._line[0]

    def took(self, seconds: float, work: float) -> None:
        """A step of that much work took so long."""
        self._took_s = _MEMORY * self._took_s + seconds
        self._work = _MEMORY * self._work + work

    def enter(self, generation: Generation, work: float) -> None:
        """A request arrives that much work is to be done for."""
        expected_s = work * self._took_s / self._work if self._work else 0.0
        generation.turn_s = generation.arrived_s + PATIENCE * expected_s
        insort(self._line, generation, key=_turn)

    def enter_again(self, generation: Generation) -> None:
        """A request that was admitted before goes before all others."""
        generation.turn_s = -math.inf
        self._line.insert(0, generation)

    def leave(self, generation: Generation) -> bool:
        """Remove a request; returns whether it was waiting."""
        if generation not in self._line:
            return False
        self._line.remove(generation)
        return True

    def clear(self) -> None:
        """Remove all requests."""
        self._line.clear()


def _turn(generation: Generation) -> float:
    return generation.turn_s
