"""Simulate many replicas behind schedulers that choose as `gati serve` does.

Arrival and service times are given; a replica answers requests one at a time, in order. `TWO_CHOICES` calls
the real `services.scheduler.choice`; each scheduler knows only its own requests. `RANDOM` and `ONE_QUEUE` are
baselines: a random choice, and one queue shared by all replicas, which is optimal.
"""

from __future__ import annotations

import gzip
import heapq
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from services.scheduler.choice import ReplicaLoad, choose

__all__ = ["ONE_QUEUE", "POLICIES", "RANDOM", "TWO_CHOICES", "poisson", "read_arrivals", "traced", "waits_s"]

ONE_QUEUE, RANDOM, TWO_CHOICES = "one queue", "random", "two choices"
POLICIES = (ONE_QUEUE, TWO_CHOICES, RANDOM)

Floats = np.ndarray[Any, np.dtype[np.float64]]


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Known:
    """A scheduler's view of a replica."""

    def __init__(self, number: int, clock: Callable[[], float]) -> None:
        self.number = number
        self.load = ReplicaLoad(clock)


def waits_s(
    arrivals_s: Floats, services_s: Floats, policy: str, replicas: int, *, schedulers: int = 1, seed: int = 0
) -> Floats:
    """Return each request's wait for its replica, given ascending arrivals [n] in seconds and service times.

    Requests go to the schedulers round-robin.
    """
    chance = random.Random(seed)
    if policy == ONE_QUEUE:
        return _one_queue(arrivals_s, services_s, replicas)
    if policy == RANDOM:
        asked = np.array([chance.randrange(replicas) for _ in range(len(arrivals_s))])
        return _in_turn(arrivals_s, services_s, asked)
    return _two_choices(arrivals_s, services_s, replicas, schedulers, chance)


def poisson(rate: float, count: int, seed: int = 0) -> Floats:
    """Return `count` Poisson arrivals at `rate` per second."""
    return np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, count))


def read_arrivals(file: Path) -> Floats:
    """Read seconds since the first request of an Azure trace: gzipped CSV with times in the first column."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        next(lines)
        times = [datetime.fromisoformat(line.partition(",")[0][:26]) for line in lines if line.strip()]
    seconds = np.array([(each - times[0]).total_seconds() for each in times])
    return np.sort(seconds)


def traced(trace_s: Floats, rate: float, count: int, copies: int, seed: int = 0) -> Floats:
    """Return `count` arrivals from several user groups, `rate` per second averaged over the whole trace.

    Each group is a copy of the trace, compressed in time, with its own starting point.
    """
    dice = np.random.default_rng(seed)
    length_s = len(trace_s) * copies / rate
    squeezed = trace_s * (length_s / trace_s[-1])
    groups = [(squeezed + dice.uniform(0.0, length_s)) % length_s for _ in range(copies)]
    together = np.sort(np.concatenate(groups))
    return together[:count]


def _one_queue(arrivals_s: Floats, services_s: Floats, replicas: int) -> Floats:
    free_s = [0.0] * replicas
    waits = np.empty(len(arrivals_s))
    for number, (arrival_s, service_s) in enumerate(zip(arrivals_s, services_s, strict=True)):
        begins_s = max(arrival_s, free_s[0])
        heapq.heapreplace(free_s, begins_s + service_s)
        waits[number] = begins_s - arrival_s
    return waits


def _in_turn(arrivals_s: Floats, services_s: Floats, asked: Sequence[int] | Any) -> Floats:
    free_s: dict[int, float] = {}
    waits = np.empty(len(arrivals_s))
    for number, (arrival_s, service_s, replica) in enumerate(zip(arrivals_s, services_s, asked, strict=True)):
        begins_s = max(arrival_s, free_s.get(replica, 0.0))
        free_s[replica] = begins_s + service_s
        waits[number] = begins_s - arrival_s
    return waits


def _two_choices(
    arrivals_s: Floats, services_s: Floats, replicas: int, schedulers: int, chance: random.Random
) -> Floats:
    clock = _Clock()
    known = [[_Known(number, clock) for number in range(replicas)] for _ in range(schedulers)]
    free_s = [0.0] * replicas
    under_way: list[tuple[float, int, AbstractContextManager[None]]] = []
    waits = np.empty(len(arrivals_s))
    for number, (arrival_s, service_s) in enumerate(zip(arrivals_s, services_s, strict=True)):
        while under_way and under_way[0][0] <= arrival_s:
            clock.now_s, _, request = heapq.heappop(under_way)
            request.__exit__(None, None, None)
        clock.now_s = arrival_s
        one = choose(known[number % schedulers], 1, chance)
        request = one.load.asked(1)
        request.__enter__()
        begins_s = max(arrival_s, free_s[one.number])
        free_s[one.number] = begins_s + service_s
        heapq.heappush(under_way, (free_s[one.number], number, request))
        waits[number] = begins_s - arrival_s
    return waits
