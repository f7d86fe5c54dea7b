"""The queue in front of a runner, with a fake runner that answers on command."""

from __future__ import annotations

import asyncio
import gc
import math
import time
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gati.engine.exits import Prediction
from gati.errors import CancelledError, DeadlineError, OverloadError, UnavailableError
from services.inference import queue as queue_module
from services.inference.last import ask_last
from services.inference.queue import Ask, RequestQueue
from services.inference.service_times import ServiceTimes
from tests.waiting import LONG_S, in_the_end

ANSWER = Prediction(1, torch.zeros(2), "base", "v")


class Runner:
    """Keeps what it is asked, until `answer` is called."""

    def __init__(self, parallel: int = 1) -> None:
        self.parallel = parallel
        self.asked: list[tuple[int, Future[Prediction]]] = []
        self.closed = False

    def submit(self, x: torch.Tensor) -> Future[Prediction]:
        future: Future[Prediction] = Future()
        self.asked.append((int(x.item()), future))
        return future

    def answer(self) -> None:
        for _, future in self.asked:
            if not future.done():
                future.set_result(ANSWER)

    def close(self) -> None:
        self.closed = True

    @property
    def order(self) -> list[int]:
        return [number for number, _ in self.asked]


def run(
    test: Callable[[RequestQueue, Runner], Awaitable[None]],
    *,
    capacity: int = 4,
    parallel: int = 1,
    **times: Any,
) -> None:
    async def main() -> None:
        runner = Runner(parallel)
        await test(RequestQueue(runner, capacity=capacity, times=ServiceTimes(**times)), runner)

    asyncio.run(main())


def put(
    queue: RequestQueue,
    number: int,
    *,
    priority: int = 2,
    within_s: float = LONG_S,
    of_s: float | None = None,
) -> Ask:
    deadline_s = (time.monotonic() if of_s is None else of_s) + within_s
    return queue.put(torch.tensor(number), priority=priority, deadline_s=deadline_s)


async def outcome(ask: Ask) -> Any:
    await asyncio.wait([ask.answer], timeout=LONG_S)
    return ask.answer.exception() or ask.answer.result()


def test_the_higher_priority_goes_first_and_equals_in_order() -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        asks = [put(queue, 0), put(queue, 1), put(queue, 2), put(queue, 3, priority=1)]
        assert queue.waiting == 3 and queue.running == 1
        for ask in (asks[0], asks[3], asks[1], asks[2]):
            runner.answer()
            await in_the_end(ask.answer.done)
        assert [await outcome(ask) for ask in asks] == [ANSWER] * 4
        assert runner.order == [0, 3, 1, 2]

    run(test)


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        for number in range(5):  # one runs, four wait
            put(queue, number)
        with pytest.raises(OverloadError, match="the queue is full \\(4 inputs go first; ") as refused:
            queue.admit(1, 2, None)
        assert refused.value.retry_after_s == pytest.approx(0.01)

    run(test, seconds_an_input=0.01)


def test_a_batch_gets_the_next_free_place_as_a_single_input_does() -> None:
    """It needed as many as it has inputs, which single ones that came in between took: it never got in."""

    async def test(queue: RequestQueue, runner: Runner) -> None:
        for number in range(5):
            put(queue, number)
        with pytest.raises(OverloadError):
            queue.admit(4, 2, None)
        runner.answer()
        await in_the_end(lambda: queue.waiting == 3)
        with queue.reserve(4, 2, None):
            assert queue.waiting == 7  # which is the most: all others are refused until four have begun
            with pytest.raises(OverloadError) as refused:
                queue.admit(1, 2, None)
            assert refused.value.retry_after_s == pytest.approx(4 * queue.times.seconds_an_input)

    run(test)


def test_a_batch_of_lower_priority_keeps_no_higher_one_out() -> None:
    """Until most of it had started, each request was refused, whatever its priority."""

    async def test(queue: RequestQueue, runner: Runner) -> None:
        put(queue, 0)
        low = [queue.reserve(inputs, 3, None) for inputs in (3, 4)]
        with pytest.raises(OverloadError, match="7 inputs go first"):
            queue.admit(1, 3, None)
        for priority in (2, 1):  # each may fill the queue once
            for _ in range(4):
                queue.admit(1, priority, None)
                put(queue, 1, priority=priority)
            with pytest.raises(OverloadError, match="4 inputs go first"):
                queue.admit(1, priority, None)
        for each in low:
            each.give_back()
        assert queue.waiting == 8

    run(test)


def test_admission_counts_those_ahead() -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        queue.admit(1, 2, 0.005)  # nobody is ahead, and at best it takes 4 ms
        with pytest.raises(OverloadError):
            queue.admit(1, 2, 0.003)
        for number in range(3):
            put(queue, number)
        queue.admit(1, 2, 0.041)
        queue.admit(1, 1, 0.021)  # two with the usual priority wait behind it
        with pytest.raises(OverloadError, match="expected to take 40.0 ms, but 39.0 ms of the SLO are left"):
            queue.admit(1, 2, 0.039)
        with pytest.raises(OverloadError, match="expected to take 40.0 ms, but 0.0 ms of the SLO are left"):
            queue.admit(1, 2, -0.2)  # it arrives too late
        with pytest.raises(OverloadError):
            queue.admit(2, 2, 0.041)

    run(test, mean_s=0.01, least_s=0.004, seconds_an_input=0.01)


def test_admission_counts_inputs_of_one_request_that_run_together() -> None:
    """Of four inputs next to one that runs, three start at once and the last one waits for one to end."""

    async def test(queue: RequestQueue, runner: Runner) -> None:
        put(queue, 0)
        queue.admit(4, 2, 0.051)
        with pytest.raises(OverloadError, match="expected to take 50.0 ms, but 49.0 ms of the SLO are left"):
            queue.admit(4, 2, 0.049)

    run(test, parallel=4, mean_s=0.01, least_s=0.004, seconds_an_input=0.01)


def test_what_was_learned_while_starved_does_not_refuse_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first request that took long on a busy machine; nothing is let in that could correct it."""

    async def test(queue: RequestQueue, runner: Runner) -> None:
        queue.times.add(2.0, running=1.0)
        for _ in range(20):
            with pytest.raises(OverloadError):
                queue.admit(8, 2, 0.06)
        # Time has passed, and from now on stands still: the next input takes none.
        later_s = time.monotonic() + 0.6
        monkeypatch.setattr(queue_module, "time", SimpleNamespace(monotonic=lambda: later_s))
        queue.admit(8, 2, 0.06)
        ask = put(queue, 0)
        runner.answer()  # at once: the machine is free again
        await outcome(ask)
        queue.admit(8, 2, 0.06)

    run(test, capacity=16)


def test_what_waits_expires_by_a_timer_though_the_runner_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    # Timers run, but this clock stands still: however late this process is, what is put is begun in time.
    monkeypatch.setattr(queue_module, "time", SimpleNamespace(monotonic=lambda: 0.0))

    async def test(queue: RequestQueue, runner: Runner) -> None:
        stuck = put(queue, 0, of_s=0.0)
        waiting = put(queue, 1, within_s=0.05, of_s=0.0)
        assert str(await outcome(waiting)) == "the deadline passed in the queue"
        assert not stuck.answer.done() and queue.waiting == 0
        queue.drop(stuck)
        await in_the_end(lambda: queue.running == 0)
        running = put(queue, 2, within_s=0.05, of_s=0.0)
        assert str(await outcome(running)) == "the deadline passed while the network ran"
        assert runner.order == [0, 2] and runner.asked[1][1].cancelled()  # the next segment finds that
        assert queue.waiting == 0

    run(test)


def test_what_expired_is_not_begun() -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        put(queue, 0)
        late = put(queue, 1, within_s=-0.001)
        fresh = put(queue, 2)
        runner.answer()  # before the loop comes to the timer
        assert isinstance(await outcome(late), DeadlineError)
        runner.answer()
        assert await outcome(fresh) == ANSWER
        assert runner.order == [0, 2]

    run(test)


def test_dropped_by_its_caller() -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        running, waiting, last = put(queue, 0), put(queue, 1), put(queue, 2)
        queue.drop(waiting)
        queue.drop(running)
        assert isinstance(await outcome(waiting), CancelledError)
        assert runner.asked[0][1].cancelled()
        await in_the_end(lambda: runner.order == [0, 2])
        runner.answer()
        assert await outcome(last) == ANSWER
        assert (runner.order, queue.waiting, queue.running) == ([0, 2], 0, 0)
        queue.drop(last)  # too late to matter

    run(test)


def test_a_failing_engine_fails_its_requests_alone() -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        bad, good = put(queue, 0), put(queue, 1)
        runner.asked[0][1].set_exception(ZeroDivisionError())
        failed = await outcome(bad)
        assert str(failed) == "the engine failed: ZeroDivisionError"
        assert isinstance(failed, UnavailableError), "another replica may answer it"
        runner.answer()
        assert await outcome(good) == ANSWER

    run(test)


@pytest.mark.parametrize("works", [True, False], ids=["invalid inputs", "a broken engine"])
def test_an_engine_is_broken_if_it_fails_for_its_own_example_too(works: bool) -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        def broken() -> bool:
            return queue.broken(lambda: torch.tensor(100))

        for number in range(5):
            assert not broken()
            bad = put(queue, number)
            runner.asked[-1][1].set_exception(IndexError())
            await outcome(bad)
        assert not broken() and runner.order[-1] == 100, "now it is asked"
        assert not broken(), "it has not answered yet"
        if works:
            runner.answer()
        else:
            runner.asked[-1][1].set_exception(IndexError())
        await in_the_end(lambda: queue.running == 0)
        assert broken() is not works
        if not works:
            assert broken() and runner.order.count(100) == 2, "it stays broken while it is asked again"
            runner.answer()
            await in_the_end(lambda: queue.running == 0)
        assert not broken()

    run(test)


def test_closing_answers_what_waits_and_takes_nothing_new() -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        asks = [put(queue, 0), put(queue, 1)]
        closing = asyncio.create_task(queue.close())
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError):
            queue.admit(1, 2, None)
        for ask in asks:
            runner.answer()
            await in_the_end(ask.answer.done)
        await closing
        assert runner.closed and [await outcome(ask) for ask in asks] == [ANSWER, ANSWER]

    run(test)


def test_service_times_follow_a_changed_load() -> None:
    times = ServiceTimes()
    for _ in range(50):
        times.add(0.010, running=2.0)
    assert times.mean_s == pytest.approx(0.010) and times.seconds_an_input == pytest.approx(0.005)
    for _ in range(100):
        times.add(0.030, running=1.0)
    assert times.mean_s == pytest.approx(0.030, rel=0.05) and times.bound_s(1) >= times.expected_s(1)


@given(
    alone_ms=st.floats(1.0, 50.0),
    each_ms=st.floats(0.0, 20.0),
    counts=st.lists(st.integers(1, 16), min_size=60, max_size=120).filter(
        lambda found: len(set(found[-20:])) > 5
    ),
)
def test_an_input_among_many_is_expected_to_take_longer(
    alone_ms: float, each_ms: float, counts: list[int]
) -> None:
    each_ms = min(each_ms, alone_ms)  # inputs that run together take no longer than one after the other
    times = ServiceTimes()
    for running in counts:
        times.add(1e-3 * (alone_ms + each_ms * (running - 1)), running=running)
    for running in (1, 4, 16):
        took_s = 1e-3 * (alone_ms + each_ms * (running - 1))
        assert times.expected_s(running) == pytest.approx(took_s, rel=0.15)


def test_times_of_a_full_engine_do_not_refuse_when_it_is_nearly_idle() -> None:
    """Under overload 16 inputs ran at once; once refused, all others were, down to a single one running."""
    times = ServiceTimes()
    for _ in range(200):
        times.add(0.032, running=16.0)
    assert times.expected_s(16) == pytest.approx(0.032)
    for running in (16, 14, 12, 9, 7, 4, 2, 1):
        times.add(0.002 * running, running=running)
    assert times.expected_s(2) < 0.010


def test_places_are_kept_from_admission_until_the_inputs_are_put() -> None:
    """39 inputs were admitted to a queue of 4 while they were being resized."""

    async def test(queue: RequestQueue, runner: Runner) -> None:
        running = put(queue, 0)
        first = queue.reserve(3, 2, None)
        assert queue.waiting == 3
        second = queue.reserve(1, 2, None)
        with pytest.raises(OverloadError, match="4 inputs go first"):
            queue.reserve(1, 2, None)
        second.give_back()
        with first:
            first.give_back()
            asks = [put(queue, number) for number in (1, 2, 3)]
            assert queue.waiting == 3
        assert queue.waiting == 3
        with queue.reserve(1, 2, None):
            closing = asyncio.create_task(queue.close())
            runner.answer()
            for number, ask in enumerate((running, *asks)):
                await in_the_end(lambda: len(runner.asked) > number)  # noqa: B023
                runner.answer()
                assert await outcome(ask) == ANSWER
            await asyncio.sleep(0)
            assert not runner.closed  # somebody is still to put an input
        await closing
        assert runner.closed

    run(test)


def test_what_expires_behind_a_stuck_engine_is_not_kept() -> None:
    """564 inputs were held behind one, in a queue of 16."""

    async def test(queue: RequestQueue, runner: Runner) -> None:
        put(queue, 0)
        references = []
        for number in range(600):
            ask = put(queue, number, within_s=0.0, of_s=0.0)  # late when it came
            references.append(weakref.ref(ask.x))
            await outcome(ask)
            del ask
        gc.collect()
        assert sum(each() is not None for each in references) <= 70
        assert queue.working_s() > 0.0 and queue.running == 1

    run(test)


def test_what_waits_is_counted_by_priority_however_it_ends() -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        def ahead(*priorities: int) -> list[int]:
            return [queue._ahead(each) for each in priorities]

        def wait(priority: int, deadline_s: float = math.inf) -> Ask:
            return queue.put(torch.tensor([float(priority)]), priority=priority, deadline_s=deadline_s)

        asks = [wait(1), wait(2), wait(3)]
        assert ahead(1, 2, 3) == [1, 2, 3]
        queue.drop(asks[1])
        assert ahead(1, 2, 3) == [1, 1, 2]
        late = wait(1, time.monotonic())
        await in_the_end(late.answer.done)
        runner.answer()
        await in_the_end(lambda: runner.order == [1, 3])
        assert ahead(10) == [1]
        runner.answer()
        await in_the_end(lambda: not queue.running)
        assert ahead(10) == [0] and queue.waiting == 0

    run(test, seconds_an_input=1.0, inputs=10)


def test_a_promoted_input_starts_before_all_others_and_once() -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        asks = [put(queue, number, priority=number) for number in (1, 2, 3, 10)]
        queue.promote(asks[3])
        queue.promote(asks[0])  # it runs already
        assert queue.waiting == 3
        while not all(ask.answer.done() for ask in asks):
            runner.answer()
            await asyncio.sleep(0.001)
        queue.promote(asks[3])  # it has an answer
        assert runner.order == [1, 10, 2, 3]
        assert (queue.waiting, queue.running) == (0, 0)
        await queue.close()

    run(test)


def test_an_input_that_expired_or_was_dropped_is_not_dropped_again() -> None:
    """A request drops all of its inputs when it ends: they were counted out of the queue twice."""

    async def test(queue: RequestQueue, runner: Runner) -> None:
        put(queue, 0), put(queue, 1)
        expired, dropped = put(queue, 2, within_s=0.0), put(queue, 3)
        assert isinstance(await outcome(expired), DeadlineError)
        for _ in range(2):
            queue.drop(expired)
            queue.drop(dropped)
            assert queue.waiting == 1
        runner.answer()
        await in_the_end(lambda: runner.order == [0, 1])
        runner.answer()
        await queue.close()

    run(test)


def test_the_order_stays_when_many_are_abandoned() -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        asks = [put(queue, number, priority=1 + 7 * number % 10) for number in range(300)]
        stay = [ask for number, ask in enumerate(asks) if number % 11 == 5]
        for ask in asks[1:]:
            if ask not in stay:
                queue.drop(ask)
        while not all(ask.answer.done() for ask in stay):
            runner.answer()
            await asyncio.sleep(0)
        wanted = sorted((ask.priority, int(ask.x.item())) for ask in stay)
        assert runner.order == [0, *(number for _, number in wanted)]

    run(test)


def test_the_wait_of_what_no_client_waits_for_refuses_no_request() -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        for _ in range(50):
            audit = queue.put(torch.tensor(1), priority=10, deadline_s=math.inf)
            audit.arrived_s -= 100.0
            runner.answer()
            await audit.answer
        assert queue.times.bound_s(1) < 50.0

    run(test)


def test_a_promoted_input_goes_before_the_highest_priority() -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        asks = [put(queue, number, priority=priority) for number, priority in enumerate((1, 1, 10, 10))]
        queue.promote(asks[2])
        queue.promote(asks[3])
        while not all(ask.answer.done() for ask in asks):
            runner.answer()
            await asyncio.sleep(0.001)
        assert runner.order == [0, 2, 3, 1]

    run(test)


def test_a_promoted_input_is_not_started_again_while_it_runs() -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        asks = [put(queue, number, priority=priority) for number, priority in enumerate((2, 2, 10, 10))]
        queue.promote(asks[2])
        for number in (0, 1):
            runner.asked[number][1].set_result(ANSWER)
            await asks[number].answer
        assert runner.order == [0, 1, 2, 3]
        runner.answer()
        await queue.close()

    run(test, parallel=2)


@pytest.mark.parametrize(
    ("expected_s", "budget", "patience_s"), [(0.02, 0.05, [1.0]), (0.2, 0.05, [4.0]), (0.2, 0.0, [])]
)
def test_an_audit_goes_first_once_a_second_or_as_often_as_its_budget_says(
    expected_s: float, budget: float, patience_s: list[float]
) -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        loop, waits_s = asyncio.get_running_loop(), list[float]()
        timer = loop.call_later

        def call_later(delay_s: float, *call: Any) -> asyncio.TimerHandle:
            waits_s.append(delay_s)
            return timer(delay_s, *call)

        loop.call_later = call_later  # type: ignore[method-assign, assignment]
        asked = asyncio.create_task(ask_last(queue, torch.tensor(1), budget))
        await in_the_end(lambda: bool(runner.asked))
        asked.cancel()
        await asyncio.wait([asked])
        runner.answer()
        assert [each for each in waits_s if each >= 1.0] == pytest.approx(patience_s)

    run(test, mean_s=expected_s)


def test_a_promoted_input_that_nobody_waits_for_is_not_started() -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        running, dropped = put(queue, 1), put(queue, 10, priority=10)
        queue.promote(dropped)
        queue.drop(dropped)
        runner.answer()
        await running.answer
        await queue.close()
        assert runner.order == [1]

    run(test)


def test_an_audit_that_is_cancelled_leaves_the_queue() -> None:
    async def test(queue: RequestQueue, runner: Runner) -> None:
        running = put(queue, 1)
        audit = asyncio.create_task(ask_last(queue, torch.tensor(2), 0.5))
        await in_the_end(lambda: queue.waiting == 1)
        audit.cancel()
        await asyncio.wait([audit])
        assert queue.waiting == 0
        runner.answer()
        await running.answer
        await queue.close()
        assert runner.order == [1]

    run(test)
