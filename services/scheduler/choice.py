"""Chooses the replica for a request: two are drawn at random, and the one expected to answer earlier gets it.

The expected time of a request is the replica's number of outstanding inputs times its learned service time
(the power of two choices: Mitzenmacher 2001). Because only two are drawn, several schedulers that do not know
of each other do not all choose the same replica.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, TypeVar

_MEMORY = 0.95  # weight of the old average; a change of speed is learned within about twenty answers
_HALVED_S = 5.0  # without requests, the estimate halves in this time: a replica that was slow is tried again


class ReplicaLoad:
    """The outstanding requests of one replica, and its learned service time per input."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[_Outstanding, None] = {}  # the oldest first
        self._answers = 0
        self._learned_s = 0.0
        self._learned_at_s = 0.0
        self.outstanding = 0  # inputs

    @property
    def seconds_an_input(self) -> float | None:
        """The learned time that each outstanding input adds to an answer; None before the first answer."""
        if not self._answers:
            return None
        return self._learned_s * self._freshness()

    @property
    def overdue_s(self) -> float:
        """How long the oldest outstanding request has waited; a new one is expected to take no less."""
        oldest = next(iter(self._asked), None)
        return 0.0 if oldest is None else self._clock() - oldest.began_s

    def expected_s(self, inputs: int, typical_s: float) -> float:
        """The expected time for `inputs` more inputs; `typical_s` per input if nothing has been learned."""
        each_s = self.seconds_an_input
        return max((self.outstanding + inputs) * (typical_s if each_s is None else each_s), self.overdue_s)

    def asked(self, inputs: int) -> _Outstanding:
        """A context manager: counts a request while it is outstanding, and learns from its answer."""
        return _Outstanding(self, inputs)

    def forget(self) -> None:
        """Forget the service time, because another process answers from now on."""
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
    """An outstanding request with `inputs` inputs, as a context manager."""

    def __init__(self, load: ReplicaLoad, inputs: int) -> None:
        self._load, self._inputs = load, inputs

    def __enter__(self) -> None:
        load = self._load
        load.outstanding += self._inputs
        self.began_s = load._clock()
        self.ahead = load.outstanding  # outstanding inputs when it was sent, including its own
        self.fresh = load._freshness()  # weight of the estimate at that time, from 0 to 1
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
    """Something with a `ReplicaLoad`."""

    @property
    def load(self) -> ReplicaLoad:
        """Its outstanding requests and service time."""
        ...


R = TypeVar("R", bound=Loaded)


class Numbered(Protocol):
    """Something with a number that no other has."""

    @property
    def number(self) -> int:
        """Counted from 0."""
        ...


N = TypeVar("N", bound=Numbered)


def choose(replicas: Sequence[R], inputs: int, chance: random.Random) -> R:
    """The better of two replicas drawn at random, for a request with `inputs` inputs.

    Ties are broken at random. A replica without a learned service time is assumed to be as fast as the other,
    so that it is tried. The cost does not depend on the number of replicas.
    """
    if len(replicas) == 1:
        return replicas[0]
    drawn = chance.sample(replicas, 2)
    known = [each_s for replica in drawn if (each_s := replica.load.seconds_an_input) is not None]
    typical_s = min(known, default=1.0)
    return min(drawn, key=lambda replica: replica.load.expected_s(inputs, typical_s))


def of_place(replicas: Sequence[N], place: str) -> N:
    """The replica whose memory has the place: the same one as long as it is among `replicas`.

    It is the replica with the largest hash of its number and the place (rendezvous hashing: Thaler and
    Ravishankar 1998). When a replica is added or removed, only its own places move.
    """
    return max(replicas, key=lambda replica: zlib.crc32(f"{replica.number} {place}".encode()))
