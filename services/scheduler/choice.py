"""Which replica is asked: of two drawn at random, the one that is expected to answer earlier.

What a replica has outstanding times the service time learned of it says how long a request would take there
(the power of two choices: Mitzenmacher 2001). Drawing two keeps several schedulers, which do not know of each
other, from all asking the same replica.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, TypeVar

_MEMORY = 0.95  # of the average; a changed speed is believed within about twenty answers
_HALVED_S = 5.0  # an estimate without answers halves in this time: a replica that was slow is tried again


class ReplicaLoad:
    """What one replica was asked and has not answered, and how long an input takes it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[_Outstanding, None] = {}  # the oldest first
        self._answers = 0
        self._learned_s = 0.0
        self._learned_at_s = 0.0
        self.outstanding = 0  # inputs

    @property
    def seconds_an_input(self) -> float | None:
        """How much each outstanding input adds to the time of an answer; None before the first answer."""
        if not self._answers:
            return None
        return self._learned_s * self._freshness()

    @property
    def overdue_s(self) -> float:
        """For how long the oldest outstanding request has waited: no other is expected earlier."""
        oldest = next(iter(self._asked), None)
        return 0.0 if oldest is None else self._clock() - oldest.began_s

    def expected_s(self, inputs: int, typical_s: float) -> float:
        """The expected time of so many more inputs; `typical_s` is an input's where nothing is learned."""
        each_s = self.seconds_an_input
        return max((self.outstanding + inputs) * (typical_s if each_s is None else each_s), self.overdue_s)

    def asked(self, inputs: int) -> _Outstanding:
        """Count a request while it is outstanding, and learn from it when it is answered."""
        return _Outstanding(self, inputs)

    def forget(self) -> None:
        """Unlearn the service time: another process answers from now on."""
        self._answers = 0

    def _freshness(self) -> float:
        idle_s = 0.0 if self._asked else self._clock() - self._learned_at_s
        return float(0.5 ** (idle_s / _HALVED_S))

    def _learn(self, request: _Outstanding) -> None:
        now_s = self._clock()
        each_s = (now_s - request.began_s) / max(1, request.ahead)
        self._answers += 1
        memory = min(_MEMORY, 1.0 - 1.0 / self._answers) * request.fresh
        self._learned_s = memory * self._learned_s + (1.0 - memory) * each_s
        self._learned_at_s = now_s


class _Outstanding:
    """A request of so many inputs, a context manager."""

    def __init__(self, load: ReplicaLoad, inputs: int) -> None:
        self._load, self._inputs = load, inputs

    def __enter__(self) -> None:
        load = self._load
        load.outstanding += self._inputs
        self.began_s = load._clock()
        self.ahead = load.outstanding  # when it was sent, its own included
        self.fresh = load._freshness()  # what the estimate of then is worth, from 0 to 1
        load._asked[self] = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        load = self._load
        if error is None:
            load._learn(self)
        del load._asked[self]
        load.outstanding -= self._inputs


class Loaded(Protocol):
    """What has a `ReplicaLoad`."""

    @property
    def load(self) -> ReplicaLoad:
        """What it was asked."""
        ...


R = TypeVar("R", bound=Loaded)


class Numbered(Protocol):
    """What has a number of its own."""

    @property
    def number(self) -> int:
        """From 0."""
        ...


N = TypeVar("N", bound=Numbered)


def choose(replicas: Sequence[R], inputs: int, chance: random.Random) -> R:
    """The better of two replicas drawn at random, for a request of so many inputs; any of two that are equal.

    One of which nothing is known is taken to be as fast as the other: it is tried. However many there are,
    only two are looked at.
    """
    if len(replicas) == 1:
        return replicas[0]
    drawn = chance.sample(replicas, 2)
    known = [each_s for replica in drawn if (each_s := replica.load.seconds_an_input) is not None]
    typical_s = min(known, default=1.0)
    return min(drawn, key=lambda replica: replica.load.expected_s(inputs, typical_s))


def of_place(replicas: Sequence[N], place: str) -> N:
    """The replica whose memory knows that place: the same one as long as it is among `replicas`.

    The largest of a hash for each (rendezvous hashing: Thaler and Ravishankar 1998): when a replica comes or
    goes, only its own places move.
    """
    return max(replicas, key=lambda replica: zlib.crc32(f"{replica.number} {place}".encode()))
