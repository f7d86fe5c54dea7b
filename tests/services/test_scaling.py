"""The number of replicas, on a fake clock."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.scaling import Bounds, Sizing
from services.scheduler.sleeping import Sleep
from tests.waiting import Clock

INPUT_S = 0.05


class Simulation:
    """Replicas that answer one request at a time, and one more that comes after `start_s`."""

    def __init__(self, bounds: Bounds, seed: int = 0, start_s: float = 3.0) -> None:
        self.clock = Clock()
        self.bounds = bounds
        self.sizing = Sizing(bounds, self.clock)
        self.free_s = [0.0] * bounds.fewest  # when each replica has answered what it has
        self.changes: list[tuple[float, int]] = []
        self._chance = random.Random(seed)
        self._start_s = start_s
        self._looked_s = 0.0
        self._answers: list[tuple[float, float]] = []

    def run(self, seconds: float, rate: float) -> int:
        """So many requests a second for a while; the number of replicas afterwards."""
        end_s = self.clock.now_s + seconds
        arrival_s = self.clock.now_s
        while self.clock.now_s < end_s:
            arrival_s += self._chance.expovariate(rate) if rate else seconds
            while self._looked_s + 1.0 <= min(arrival_s, end_s):
                self._look(self._looked_s + 1.0)
            if arrival_s >= end_s:
                break
            self._settle(arrival_s)
            number = min(range(len(self.free_s)), key=self.free_s.__getitem__)
            begins_s = max(arrival_s, self.free_s[number])
            self.free_s[number] = begins_s + INPUT_S
            heapq.heappush(self._answers, (begins_s + INPUT_S, 1e3 * (begins_s - arrival_s)))
        return len(self.free_s)

    def _settle(self, now_s: float) -> None:
        while self._answers and self._answers[0][0] <= now_s:
            self.clock.now_s, waited_ms = heapq.heappop(self._answers)
            self.sizing.answered(waited_ms, INPUT_S)
        self.clock.now_s = now_s

    def _look(self, now_s: float) -> None:
        self._settle(now_s)
        self._looked_s = now_s
        count = len(self.free_s)
        starting = sum(free_s - now_s > 100.0 for free_s in self.free_s)
        wanted = self.sizing.wanted(count, count - starting)
        assert self.bounds.fewest <= wanted <= self.bounds.most and abs(wanted - count) <= 1
        if wanted != count:
            self.changes.append((now_s, wanted))
            self.free_s = (self.free_s + [now_s + self._start_s])[:wanted]


BOUNDS = Bounds(1, 6, delay_ms=100.0)


def test_load_brings_replicas_and_calm_takes_them() -> None:
    found = Simulation(BOUNDS)
    assert found.run(120.0, rate=0.3 / INPUT_S) == 1
    busy = found.run(300.0, rate=2.6 / INPUT_S)
    assert 3 <= busy <= 6
    assert found.run(600.0, rate=0.3 / INPUT_S) <= 2
    assert found.run(600.0, rate=0.0) == 1


def test_no_more_than_what_is_allowed_and_no_fewer() -> None:
    found = Simulation(Bounds(2, 3, delay_ms=100.0))
    assert found.run(200.0, rate=9.0 / INPUT_S) == 3
    assert found.run(2000.0, rate=0.0) == 2


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), busy=st.floats(0.1, 4.0))
def test_a_steady_load_does_not_swing_for_long(seed: int, busy: float) -> None:
    found = Simulation(BOUNDS, seed)
    found.run(400.0, rate=busy / INPUT_S)
    before = len(found.changes)
    found.run(240.0, rate=busy / INPUT_S)
    assert len(found.free_s) >= busy
    assert len(found.changes) - before <= 5, found.changes  # without patience, 8
    for (earlier_s, many), (later_s, few) in zip(found.changes, found.changes[1:], strict=False):
        assert later_s - earlier_s >= (BOUNDS.up_s if few > many else BOUNDS.down_s)


def test_none_comes_before_the_last_has_come() -> None:
    clock = Clock()
    sizing = Sizing(BOUNDS, clock)
    counts = []
    for second in range(36):
        clock.now_s += 1.0
        for _ in range(10):
            sizing.refused()
        counts.append(sizing.wanted(2, ready=1 if second < 30 else 2))
    assert counts == [2] * 34 + [3, 2]


def test_one_that_never_comes_goes_when_it_is_not_needed() -> None:
    clock = Clock()
    sizing = Sizing(BOUNDS, clock)
    counts = set()
    for _ in range(70):
        clock.now_s += 1.0
        counts.add(sizing.wanted(2, ready=1))
    assert counts == {1, 2}


@pytest.mark.parametrize(("late", "count"), [(0, 1), (1, 1), (2, 2)])
def test_one_of_ten_may_wait(late: int, count: int) -> None:
    clock = Clock()
    sizing = Sizing(BOUNDS, clock)
    counts = []
    for _ in range(6):
        clock.now_s += 1.0
        for number in range(10):
            sizing.answered(110.0 if number < late else 0.0, 0.0)
        counts.append(sizing.wanted(1, ready=1))
    assert counts == [1, 1, 1, 1, count, 1]


def test_a_start_is_expected_to_take_what_the_last_one_took_and_given_up_when_it_does_not_end() -> None:
    clock = Clock()
    sleep = Sleep(clock)
    sleep.begin(woken=False)
    clock.now_s = 4.0
    assert (sleep.idle_s, sleep.waking) == (0.0, False)
    sleep.answers()
    clock.now_s = 10.0
    assert (sleep.idle_s, sleep.start_s) == (6.0, 4.0)
    with sleep.asked():
        clock.now_s = 11.0
        assert sleep.idle_s == 0.0
    sleep.fall_asleep()
    assert sleep.asleep and sleep.expected_s == 4.0
    sleep.begin(woken=True)
    clock.now_s = 14.0
    assert sleep.waking and sleep.expected_s == 1.0 and sleep.idle_s == 0.0
    clock.now_s = 24.0
    assert not sleep.waking and sleep.expected_s == 0.0
