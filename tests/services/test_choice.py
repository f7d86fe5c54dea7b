"""Choice of the replica for a request, on a fake clock."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.choice import ReplicaLoad, choose, of_place
from tests.waiting import Clock


class One:
    """A replica that takes `input_s` for each input, one at a time."""

    def __init__(self, clock: Clock, input_s: float) -> None:
        self.load = ReplicaLoad(clock)
        self.input_s = input_s
        self.free_s = clock.now_s


def simulated(seed: int, seconds_an_input: list[float], busy: float, count: int) -> Counter[int]:
    """How many of `count` requests each replica got, arriving at `busy` of what all of them can answer."""
    chance, clock = random.Random(seed), Clock(100.0)
    replicas = [One(clock, each_s) for each_s in seconds_an_input]
    rate = busy * sum(1.0 / each_s for each_s in seconds_an_input)
    asked: Counter[int] = Counter()
    answers: list[tuple[float, int, object]] = []
    arrival_s = clock.now_s
    for number in range(count):
        arrival_s += chance.expovariate(rate)
        while answers and answers[0][0] <= arrival_s:
            clock.now_s, _, request = heapq.heappop(answers)
            request.__exit__(None, None, None)  # type: ignore[attr-defined]
        clock.now_s = arrival_s
        one = choose(replicas, 1, chance)
        asked[replicas.index(one)] += 1
        request = one.load.asked(1)
        request.__enter__()
        one.free_s = max(one.free_s, arrival_s) + one.input_s
        heapq.heappush(answers, (one.free_s, number, request))
    assert sum(one.load.outstanding for one in replicas) == len(answers)
    return asked


def test_one_that_takes_three_times_as_long_gets_a_third_of_the_requests() -> None:
    asked = simulated(1, [0.01, 0.03], busy=0.95, count=20_000)
    assert 2.5 < asked[0] / asked[1] < 3.6


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(2, 5))
def test_equal_replicas_get_equal_shares(seed: int, count: int) -> None:
    asked = simulated(seed, [0.01] * count, busy=0.7, count=600)
    assert min(asked[each] for each in range(count)) > 0.6 * 600 / count


def test_time_of_an_input_is_learned_whatever_is_ahead_of_it() -> None:
    clock = Clock(100.0)
    load = ReplicaLoad(clock)
    assert load.seconds_an_input is None
    requests = [load.asked(inputs) for inputs in (1, 2, 1)]  # answered one after the other, 10 ms an input
    for request in requests:
        request.__enter__()
    assert load.outstanding == 4
    for request, inputs in zip(requests, (1, 2, 1), strict=True):
        clock.now_s += 0.01 * inputs
        request.__exit__(None, None, None)
    assert load.outstanding == 0 and load.seconds_an_input == pytest.approx(0.01)
    assert load.expected_s(3, typical_s=7.0) == pytest.approx(0.03)


def test_a_refused_or_cancelled_request_teaches_nothing() -> None:
    load = ReplicaLoad(Clock(100.0))
    with pytest.raises(ValueError), load.asked(5):
        raise ValueError
    assert load.outstanding == 0 and load.seconds_an_input is None


def test_one_that_does_not_answer_is_asked_no_more() -> None:
    clock = Clock(100.0)
    hangs, works = One(clock, 0.01), One(clock, 0.01)
    for one in (hangs, works):
        with one.load.asked(1):
            clock.now_s += 0.01
    waiting = hangs.load.asked(1)
    waiting.__enter__()
    clock.now_s += 1.0
    with works.load.asked(1), works.load.asked(1):  # one more than the other has
        assert all(choose([hangs, works], 1, random.Random(seed)) is works for seed in range(20))


def test_one_that_was_slow_is_tried_again() -> None:
    """Asked only where it is expected to be better, its time would never be learned anew."""
    clock, chance = Clock(100.0), random.Random(3)
    slow, fast = One(clock, 1.0), One(clock, 0.01)
    for one in (slow, fast):
        with one.load.asked(1):
            clock.now_s += one.input_s

    def asked_in(seconds: float) -> set[One]:
        found = set()
        end_s = clock.now_s + seconds
        while clock.now_s < end_s:
            one = choose([slow, fast], 1, chance)
            found.add(one)
            with one.load.asked(1):
                clock.now_s += 0.01  # both are fast by now
            clock.now_s += 0.2
        return found

    assert asked_in(5.0) == {fast}
    assert asked_in(60.0) == {slow, fast}
    assert slow.load.seconds_an_input is not None and slow.load.seconds_an_input < 0.05


def test_one_of_which_nothing_is_known_is_tried_at_once() -> None:
    clock = Clock(100.0)
    known, new = One(clock, 0.01), One(clock, 0.01)
    with known.load.asked(1):
        clock.now_s += 0.01
    with known.load.asked(1):
        assert choose([known, new], 1, random.Random(0)) is new


@dataclass
class Placed:
    number: int


@given(st.integers(2, 8), st.integers(0, 7))
def test_a_place_stays_where_it_is_known_when_another_replica_goes(count: int, gone: int) -> None:
    replicas = [Placed(number) for number in range(count)]
    left = [each for each in replicas if each.number != gone % count]
    names = [f"camera {number}" for number in range(200)]
    for name in names:
        before = of_place(replicas, name)
        assert before.number == gone % count or of_place(left, name) is before
    assert {of_place(replicas, name).number for name in names} == set(range(count))
