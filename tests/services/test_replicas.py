"""A model with several replicas, in front of fake services."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gati.errors import (
    CompositionError,
    ConfigError,
    DeadlineError,
    NotFoundError,
    OverloadError,
    RequestError,
    UnavailableError,
)
from services.scheduler.metrics import Metrics
from services.scheduler.models import Asked, Model
from services.scheduler.parking import Parking
from services.scheduler.replicas import RefusedError
from services.scheduler.scaling import Autoscaler, Bounds
from services.scheduler.sleeping import Sleep
from services.wire.gen.ttypes import ExitStatistics, Histogram, Tensor
from services.wire.server import WireServer
from tests.services.engines import SERVICE, Engine
from tests.waiting import LONG_S, Clock, in_the_end

ASKED = Asked(1e3 * LONG_S, None, 2, "0" * 32)
TENSOR = Tensor("FP32", [1], b"\0" * 4)


class Place:
    """Where a replica runs: it can die, and come back empty."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.engine = Engine()
        self.running, self.served = False, False
        self.hopeless: str | None = None
        self.cause, self.restarts = "it was unloaded", 0
        self.starts = 0
        self.handlers = self.engine.handlers()
        self._server: WireServer | None = None
        self._address = ""

    def start(self) -> None:
        self.starts += 1
        self.running, self.served = True, False

    async def address(self) -> str:
        if not self.running:
            raise UnavailableError(self.cause)
        if self._server is None:
            self._server = WireServer(SERVICE, self.handlers)
            self._address = f"127.0.0.1:{await self._server.start('127.0.0.1', 0)}"
        return self._address

    async def die(self) -> None:
        self.running, self.cause = False, f"replica {self.number} was killed"
        assert self._server is not None
        server, self._server = self._server, None
        await server.drain(0.0)
        self.engine = Engine()
        self.handlers = self.engine.handlers()

    def come_back(self) -> None:
        self.restarts += 1
        self.running = True

    def kill(self, why: str) -> None:
        raise AssertionError("no one hangs")

    def retire(self) -> None:
        raise AssertionError("nobody drains")

    async def stop(self, timeout_s: float) -> None:
        if self._server is not None:
            await self.die()


Test = Callable[[Model, list[Any]], Awaitable[None]]


def run(test: Test, count: int = 2) -> None:
    async def main() -> None:
        places: list[Any] = []

        def host(number: int) -> Any:
            places.append(Place(number))
            return places[-1]

        model = Model("m", host=host, replicas=count, chance=random.Random(0))
        await model.start()
        await all_ready(model)
        try:
            await test(model, places)
        finally:
            for place in places:
                place.engine.answers.set()
            await model.stop(LONG_S)

    asyncio.run(main())


async def all_ready(model: Model) -> None:
    await in_the_end(lambda: all(replica.ready for replica in model.replicas))


def test_requests_are_spread_and_counted() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        for place in places:
            place.engine.answers.clear()
        asking = [asyncio.create_task(model.infer(TENSOR, ASKED)) for _ in range(12)]
        await in_the_end(lambda: sum(place.engine.begun for place in places) == 12)
        assert [place.engine.begun for place in places] == [4, 4, 4]
        assert [replica.load.outstanding for replica in model.replicas] == [4, 4, 4]
        for place in places:
            place.engine.answers.set()
        await asyncio.gather(*asking)
        assert [replica.load.outstanding for replica in model.replicas] == [0, 0, 0]
        assert all(replica.load.seconds_an_input for replica in model.replicas)

    run(test, count=3)


def test_what_a_dead_replica_was_asked_another_one_answers() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        for place in places:
            place.engine.answers.clear()
        asking = [asyncio.create_task(model.infer(TENSOR, ASKED)) for _ in range(6)]
        await in_the_end(lambda: sum(place.engine.begun for place in places) == 6)
        await places[0].die()
        await in_the_end(lambda: places[1].engine.begun == 6)
        assert not any(task.done() for task in asking) and model.ready
        places[1].engine.answers.set()
        assert {(await task).version for task in asking} == {"first"}
        assert model.dispatcher.asked_again == 3
        places[0].come_back()
        await all_ready(model)
        assert [replica.restarts for replica in model.replicas] == [1, 0]

    run(test)


def test_what_a_request_waited_before_it_was_sent_counts_as_queueing() -> None:
    """As time outside the service it would have had requests with an SLO refused until it was forgotten."""

    async def test(model: Model, places: list[Place]) -> None:
        for place in places:
            place.engine.answers.clear()
        asking = asyncio.create_task(model.infer(TENSOR, ASKED))
        await in_the_end(lambda: any(place.engine.begun for place in places))
        victim = next(place for place in places if place.engine.begun)
        await asyncio.sleep(0.05)  # lost with the replica
        await victim.die()
        other = next(place for place in places if place is not victim)
        await in_the_end(lambda: other.engine.begun == 1)
        other.engine.places = 1
        parked = asyncio.create_task(model.infer(TENSOR, ASKED))
        await in_the_end(lambda: model.dispatcher.parking.parked == 1)
        await asyncio.sleep(0.05)
        other.engine.answers.set()
        for found in await asyncio.gather(asking, parked):
            assert found.latency_ms >= found.queue_ms >= 50.0

    run(test)


def test_what_a_dead_replica_cannot_do_waits_until_it_is_back() -> None:
    """Half of it was refused until then, for the queue of the other one was full."""

    async def test(model: Model, places: list[Place]) -> None:
        # In front of the replicas the time stands still, or who has 20 ms may be too late to wait.
        now_s = time.monotonic()
        model.dispatcher.parking._clock = lambda: now_s
        there, dead = places[1], places[0]
        there.engine.places = 4
        there.engine.answers.clear()
        await dead.die()
        await in_the_end(lambda: [replica.ready for replica in model.replicas] == [False, True])
        hurried = ASKED._replace(latency_slo_ms=1e3 * LONG_S)
        asking = [asyncio.create_task(model.infer(TENSOR, ASKED)) for _ in range(20)]
        await in_the_end(lambda: there.engine.begun == 4 and model.dispatcher.parking.parked == 16)
        with pytest.raises(OverloadError, match="the queue is full"):
            await model.infer(TENSOR, hurried)  # whoever has an SLO is told at once
        with pytest.raises(DeadlineError, match="before a replica had room"):
            await model.infer(TENSOR, ASKED._replace(time_remaining_ms=20.0))
        asking[10].cancel()
        await in_the_end(lambda: model.dispatcher.parking.parked == 15)
        there.engine.answers.set()  # an answer is a place for another one
        await in_the_end(lambda: model.dispatcher.parking.parked < 15)
        there.engine.answers.clear()
        dead.engine.places = 4
        dead.come_back()
        await all_ready(model)
        there.engine.answers.set()
        done = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(each) for each in done].count(asyncio.CancelledError) == 1
        assert sum(each.version == "first" for each in done if not isinstance(each, BaseException)) == 19
        assert model.dispatcher.parking.parked == 0

    run(test)


def test_what_has_gathered_is_done_after_a_replica_is_back() -> None:
    """Whoever came then was refused: nobody was away, and all places were taken by those who had waited."""

    async def test() -> None:
        now_s = 0.0
        load = SimpleNamespace(outstanding=4, seconds_an_input=0.5)
        here = SimpleNamespace(number=0, info="known", load=load, wanted=True, ready=True)
        away = SimpleNamespace(number=1, info="known", load=load, wanted=True, ready=False)
        parking = Parking(lambda: (here, away), lambda: now_s)
        full = True

        async def once(asked: Asked) -> str:
            if full:
                raise refusal(load)
            return "answered"

        waits = [asyncio.create_task(parking.ask(once, 1, ASKED))]
        await in_the_end(lambda: parking.parked == 1)
        away.ready, now_s = True, 10.0
        waits.append(asyncio.create_task(parking.ask(once, 1, ASKED)))
        await in_the_end(lambda: parking.parked == 2)
        now_s = 41.0
        with pytest.raises(OverloadError, match="2 requests already wait"):
            await parking.ask(once, 1, ASKED)
        full, load.outstanding = False, 0
        parking.look()
        assert await asyncio.gather(*waits) == ["answered"] * 2
        full = True
        with pytest.raises(OverloadError, match="the queue is full"):  # as ever
            await parking.ask(once, 1, ASKED)

    asyncio.run(test())


def test_who_waits_too_long_or_leaves_is_told_so_and_takes_no_turn() -> None:
    """One that was cancelled could be taken out of the queue twice: ValueError in place of the reason."""

    async def test() -> None:
        load = SimpleNamespace(outstanding=4, seconds_an_input=0.01)
        here = SimpleNamespace(number=0, info="known", load=load, wanted=True, ready=True)
        away = SimpleNamespace(number=1, info="known", load=load, wanted=True, ready=False)
        parking = Parking(lambda: (here, away))
        full = True

        async def once(asked: Asked) -> str:
            if full:
                raise refusal(load)
            return "answered"

        late = asyncio.create_task(parking.ask(once, 1, ASKED))
        await in_the_end(lambda: parking.parked == 1)
        waits = asyncio.create_task(parking.ask(once, 1, ASKED))
        await in_the_end(lambda: parking.parked == 2)
        late.cancel()  # its place is cancelled, but its task does not know yet
        full, load.outstanding = False, 3
        parking.look()
        assert await asyncio.wait_for(waits, LONG_S) == "answered"
        with pytest.raises(asyncio.CancelledError):
            await late
        assert parking.parked == 0
        full = True
        first = asyncio.create_task(parking.ask(once, 1, ASKED))
        await in_the_end(lambda: parking.parked == 1)
        second, third = (asyncio.create_task(parking.ask(once, 1, ASKED)) for _ in range(2))
        await in_the_end(lambda: parking.parked == 3)
        first.cancel()
        await asyncio.wait([first])
        full, load.outstanding = False, 2
        parking.look()  # room for one, who has been woken and leaves at once
        second.cancel()
        assert await asyncio.wait_for(third, LONG_S) == "answered"

    asyncio.run(test())


def test_what_waits_for_a_replica_of_a_model_that_is_unloaded_is_told_so_at_once() -> None:
    """It waited for its deadline."""

    async def test(model: Model, places: list[Place]) -> None:
        there = places[1].engine
        there.places = 1
        there.answers.clear()
        await places[0].die()
        await in_the_end(lambda: [replica.ready for replica in model.replicas] == [False, True])
        busy = asyncio.create_task(model.infer(TENSOR, ASKED))
        await in_the_end(lambda: there.begun == 1)
        waiting = asyncio.create_task(model.infer(TENSOR, ASKED._replace(time_remaining_ms=6e4)))
        await in_the_end(lambda: model.dispatcher.parking.parked == 1)
        stopping = asyncio.create_task(model.stop(LONG_S))
        with pytest.raises(UnavailableError, match="'m' does not answer"):
            await waiting
        assert not busy.done()
        there.answers.set()
        await asyncio.gather(busy, stopping)

    run(test)


def refusal(load: SimpleNamespace) -> RefusedError:
    """Of a replica with that load."""
    return RefusedError(OverloadError("the queue is full"), load.outstanding)


def parking_with_one_away(load: SimpleNamespace) -> Parking:
    """For two replicas with that load, of which one is lost for now, at a clock that stands still."""
    replicas = with_the_last_away(load, load)
    return Parking(lambda: replicas, lambda: 0.0)


def with_the_last_away(*loads: SimpleNamespace) -> list[Any]:
    """Stand-ins for replicas with these loads, of which the last one is lost for now."""
    last = len(loads) - 1
    return [
        SimpleNamespace(number=number, info="known", load=load, wanted=True, ready=number < last)
        for number, load in enumerate(loads)
    ]


def test_turns_are_taken_by_priority_and_then_by_arrival() -> None:
    """Of those that a replica refused, the last one was the first to be sent again, whatever its priority."""

    async def test() -> None:
        load = SimpleNamespace(outstanding=1, seconds_an_input=0.01)
        parking = parking_with_one_away(load)
        full, answered = True, []

        def ask(name: str, priority: int) -> asyncio.Task[None]:
            async def once(asked: Asked) -> None:
                await asyncio.sleep(0)  # all are sent before the first refusal
                if full:
                    raise refusal(load)
                answered.append(name)

            return asyncio.create_task(parking.ask(once, 1, ASKED._replace(priority=priority)))

        asking = [ask("one", 2), ask("two", 2), ask("low", 3), ask("three", 2), ask("high", 1)]
        await in_the_end(lambda: parking.parked == 5)
        asking.append(ask("late", 2))
        await in_the_end(lambda: parking.parked == 6)
        full, load.outstanding = False, 0
        parking.look()
        await asyncio.gather(*asking)
        assert answered == ["high", "one", "two", "three", "late", "low"]

    asyncio.run(test())


def test_a_request_is_sent_at_once_where_only_lower_priorities_wait() -> None:
    """One parked request of the lowest priority was enough to park or refuse those of the highest."""

    async def test() -> None:
        load = SimpleNamespace(outstanding=4, seconds_an_input=0.01)
        parking = parking_with_one_away(load)
        full = True

        async def refused(asked: Asked) -> None:
            if full:
                raise refusal(load)

        async def answered(asked: Asked) -> str:
            return "answered"

        low = asyncio.create_task(parking.ask(refused, 1, ASKED._replace(priority=3)))
        await in_the_end(lambda: parking.parked == 1)
        load.outstanding = 5  # more than its refusal allows
        hurried = ASKED._replace(time_remaining_ms=10.0)  # too little to wait
        assert await parking.ask(answered, 1, hurried._replace(priority=1)) == "answered"
        assert parking.parked == 1
        with pytest.raises(OverloadError, match="1 requests already wait"):
            await parking.ask(answered, 1, hurried._replace(priority=3))
        full, load.outstanding = False, 0
        parking.look()
        await low

    asyncio.run(test())


def test_a_batch_takes_its_turn_though_requests_with_an_slo_do_not_wait() -> None:
    """They took each place that became free, and a batch, which needed many, waited until its deadline."""

    async def test() -> None:
        load = SimpleNamespace(outstanding=4, seconds_an_input=0.01)
        parking = parking_with_one_away(load)
        sent: list[str] = []
        answers: dict[str, asyncio.Event] = {}

        def ask(name: str, inputs: int, **changes: Any) -> asyncio.Task[None]:
            answers[name] = asyncio.Event()

            async def once(asked: Asked) -> None:
                sent.append(name)
                await asyncio.sleep(0)
                if load.outstanding >= 4:
                    raise refusal(load)
                load.outstanding += inputs
                await answers[name].wait()
                load.outstanding -= inputs

            return asyncio.create_task(parking.ask(once, inputs, ASKED._replace(**changes)))

        asking = [ask("batch", 4)]
        await in_the_end(lambda: parking.parked == 1)
        asking.append(ask("behind", 1))
        await in_the_end(lambda: parking.parked == 2)
        parking.look()
        with pytest.raises(OverloadError, match="2 requests already wait"):  # they have five inputs
            await ask("late", 1, time_remaining_ms=120.0)
        assert sent == ["batch"]
        load.outstanding = 3
        asking.append(ask("hurried", 1, latency_slo_ms=50.0))  # is first at the place that both are sent to
        await in_the_end(lambda: sent == ["batch", "hurried", "batch"] and parking.parked == 2)
        answers["hurried"].set()
        await in_the_end(lambda: load.outstanding == 7)
        assert parking.parked == 1
        for answer in answers.values():
            answer.set()
        await asyncio.gather(*asking)
        assert sent[3:] == ["batch", "behind"]

    asyncio.run(test())


def test_a_refusal_does_not_count_what_a_batch_has_overfilled_elsewhere() -> None:
    """Each answer of that replica let a request continue, only to be refused: 3,900 sends for 800."""

    async def test() -> None:
        loads = [SimpleNamespace(outstanding=count, seconds_an_input=0.01) for count in (7, 4)]
        replicas = with_the_last_away(*loads, loads[0])
        parking, full, sent = Parking(lambda: replicas, lambda: 0.0), True, 0

        async def once(asked: Asked) -> None:
            nonlocal sent
            sent += 1
            if full:
                raise refusal(loads[1])

        asking = asyncio.create_task(parking.ask(once, 1, ASKED))
        await in_the_end(lambda: parking.parked == 1)
        for loads[0].outstanding in (6, 5, 4):
            parking.look()
            assert (parking.parked, sent) == (1, 1)
        full, loads[0].outstanding = False, 3
        parking.look()
        await asking
        assert sent == 2

    asyncio.run(test())


@pytest.mark.parametrize("of_slow", [1, 0])
def test_room_in_a_replica_that_is_not_chosen_lets_none_continue_until_an_answer_has_come(
    of_slow: int,
) -> None:
    """Where the other one was four times as fast, 800 requests were sent 31,000 times."""

    async def test() -> None:
        loads = [SimpleNamespace(outstanding=count, seconds_an_input=0.01) for count in (4, of_slow, 0)]
        replicas = with_the_last_away(*loads)
        parking, full, sent = Parking(lambda: replicas, lambda: 0.0), True, 0

        async def once(asked: Asked) -> None:
            nonlocal sent
            sent += 1
            if full:
                raise refusal(loads[0])

        asking = [asyncio.create_task(parking.ask(once, 1, ASKED)) for _ in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
            parking.look()
        assert (parking.parked, sent) == (3, 1)
        full, replicas[2].ready = False, True
        parking.look()
        assert parking.parked == 0, "a replica is back"
        await asyncio.gather(*asking)

    asyncio.run(test())


def test_what_others_fill_is_not_asked_again_and_again() -> None:
    """Requests that were refused let each other continue, thousands of times until their deadlines."""

    async def test() -> None:
        asked_times = 0
        load = SimpleNamespace(outstanding=0, seconds_an_input=0.01)
        parking = parking_with_one_away(load)

        async def once(asked: Asked) -> None:
            nonlocal asked_times
            asked_times += 1
            error = refusal(load)  # another scheduler's requests fill the queue
            load.outstanding += 1
            await asyncio.sleep(0)
            load.outstanding -= 1
            if asked_times > 100:
                return
            raise error

        done = await asyncio.gather(*(parking.ask(once, 1, ASKED) for _ in range(4)), return_exceptions=True)
        assert [type(each) for each in done] == [RefusedError] * 4 and asked_times <= 8

    asyncio.run(test())


def test_a_replica_that_is_slow_at_first_keeps_nobody_from_waiting() -> None:
    async def test() -> None:
        loads = [SimpleNamespace(outstanding=4, seconds_an_input=each_s) for each_s in (0.1, 1e3)]
        replicas = [
            SimpleNamespace(number=number, info="known", load=load, wanted=True, ready=True)
            for number, load in enumerate(loads)
        ]
        away = SimpleNamespace(number=2, info="known", load=loads[0], wanted=True, ready=False)
        parking = Parking(lambda: (*replicas, away), lambda: 0.0)

        async def full(asked: Asked) -> None:
            raise refusal(loads[0])

        waits = asyncio.create_task(parking.ask(full, 1, ASKED))
        await in_the_end(lambda: parking.parked == 1)
        waits.cancel()
        await asyncio.wait([waits])
        hurried = ASKED._replace(time_remaining_ms=100.0)
        with pytest.raises(OverloadError, match="the queue is full"):  # too late: eight are ahead of it
            await parking.ask(full, 1, hurried)

    asyncio.run(test())


def test_nobody_is_asked_a_third_time_and_the_cause_is_told() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        for place in places:
            place.engine.answers.clear()
        asking = asyncio.create_task(model.infer(TENSOR, ASKED))
        for _ in range(2):
            await in_the_end(lambda: any(place.engine.begun for place in places))
            victim = next(place for place in places if place.engine.begun)
            await victim.die()
        with pytest.raises(UnavailableError, match=f"'m' does not answer: {victim.cause}"):
            await asking
        assert model.ready and model.dispatcher.asked_again == 1

    run(test, count=3)


def test_no_other_replica_is_asked_when_no_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("services.scheduler.dispatch.time", SimpleNamespace(monotonic=clock))

    async def test(model: Model, places: list[Place]) -> None:
        for place in places:
            place.engine.answers.clear()
        asking = asyncio.create_task(model.infer(TENSOR, ASKED))
        await in_the_end(lambda: any(place.engine.begun for place in places))
        victim = next(place for place in places if place.engine.begun)
        clock.now_s += ASKED.time_remaining_ms / 1e3
        await victim.die()
        with pytest.raises(UnavailableError):
            await asking
        assert model.dispatcher.asked_again == 0

    run(test)


def test_a_version_is_loaded_by_all_and_each_answer_says_its_version() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        versions: Counter[str] = Counter()
        ended = asyncio.Event()

        async def ask() -> None:
            while not ended.is_set():
                versions[(await model.infer(TENSOR, ASKED)).version] += 1

        asking = [asyncio.create_task(ask()) for _ in range(4)]
        await in_the_end(lambda: versions["first"] > 20)
        await model.load("next", "fast")
        assert [place.engine.calls for place in places] == [["load next fast"]] * 2
        assert model.active.version == "next"
        before = versions["next"]
        await in_the_end(lambda: versions["next"] > before + 20)
        ended.set()
        await asyncio.gather(*asking)
        assert set(versions) == {"first", "next"}
        assert (await model.infer(TENSOR, ASKED, "first")).version == "first"
        await model.unload("first")
        assert all(place.engine.versions == ["next"] for place in places)
        with pytest.raises(RequestError, match="active"):
            await model.unload("next")

    run(test)


def test_the_active_name_is_not_loaded_again_by_one_replica_after_the_other() -> None:
    """Meanwhile two compositions would answer under one name, with one certificate."""

    async def test(model: Model, places: list[Place]) -> None:
        with pytest.raises(CompositionError, match="version 'first' is active on 2 replicas"):
            await model.load("first", "fast")
        assert not any(place.engine.calls for place in places)
        await model.load("next", "fast")
        await model.load("first", "fast")
        assert model.active.version == "first"

    run(test)


def test_versions_are_loaded_one_after_the_other() -> None:
    """Two that were loaded at once could be activated in another order by each replica: both answered."""

    async def test(model: Model, places: list[Place]) -> None:
        for place in places:
            place.engine.loads.clear()
        loading = [asyncio.create_task(model.load(name, "fast")) for name in ("one", "two")]
        await in_the_end(lambda: any(place.engine.calls for place in places))
        for _ in range(10):
            await model.statistics()
        begun = [list(place.engine.calls) for place in places]
        for place in places:
            place.engine.loads.set()
        await asyncio.gather(*loading)
        assert begun == [["load one fast"], []]
        for place in places:
            assert place.engine.calls == ["load one fast", "load two fast"]
            assert place.engine.active == "two"

    run(test)


def test_a_version_that_one_replica_cannot_load_none_has() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        places[1].engine.refused = "next"
        with pytest.raises(CompositionError):
            await model.load("next", "fast")
        assert all(place.engine.versions == ["first"] for place in places)
        with pytest.raises(NotFoundError):
            model.version("next")
        assert (await model.infer(TENSOR, ASKED)).version == "first"

    run(test)


def test_a_replica_that_was_away_loads_what_the_others_have() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        await places[1].die()
        await in_the_end(lambda: not model.replicas[1].ready)
        await model.load("next", "fast")
        places[1].come_back()
        await all_ready(model)
        assert places[1].engine.calls == ["load next fast"] and places[1].engine.active == "next"

    run(test)


def test_a_replica_that_comes_while_a_version_is_loaded_loads_it_too() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        await places[1].die()
        await in_the_end(lambda: not model.replicas[1].ready)
        places[0].engine.loads.clear()
        loading = asyncio.create_task(model.load("next", "fast"))
        await in_the_end(lambda: places[0].engine.calls == ["load next fast"])
        places[1].come_back()
        await all_ready(model)
        places[0].engine.loads.set()
        await loading
        assert [place.engine.active for place in places] == ["next", "next"]

    run(test)


def test_loading_fails_where_replicas_die_of_it_in_turns() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        attempts = [0, 0, 0]
        crashing: list[Any] = []

        def make_fragile(place: Place) -> None:
            async def load(source: Any) -> Any:
                attempts[place.number] += 1
                if sum(attempts) > 1:
                    await in_the_end(lambda: model.replicas[3 - place.number].ready)
                crashing.append(asyncio.create_task(crash()))
                await asyncio.Event().wait()

            async def crash() -> None:
                await place.die()
                make_fragile(place)
                place.come_back()

            place.handlers["load"] = load

        for place in places[1:]:
            make_fragile(place)
        with pytest.raises(UnavailableError):
            await model.load("next", "fast")
        assert attempts == [0, 2, 1] and places[0].engine.versions == ["first"]
        await asyncio.gather(*crashing)

    run(test, count=3)


def test_a_version_is_asked_of_who_has_it() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        places[1].engine.versions = ["first", "7"]  # of the repository; the other one has not seen it yet
        await model.statistics()
        for _ in range(10):
            assert (await model.infer(TENSOR, ASKED, "7")).version == "7"
        assert model.active.version == "first" and model.version("7").active is False
        with pytest.raises(NotFoundError):
            await model.infer(TENSOR, ASKED, "8")

    run(test)


def test_a_version_that_died_with_its_replica_is_not_called_unknown() -> None:
    """404 says that asking again is in vain."""

    async def test(model: Model, places: list[Place]) -> None:
        places[1].engine.versions = ["first", "7"]
        await model.statistics()
        places[1].engine.answers.clear()
        asking = asyncio.create_task(model.infer(TENSOR, ASKED, "7"))
        await in_the_end(lambda: places[1].engine.begun == 1)
        await places[1].die()
        with pytest.raises(UnavailableError, match="'m' does not answer: replica 1 was killed"):
            await asking
        assert model.dispatcher.asked_again == 0

    run(test)


def test_replicas_come_and_go_while_requests_are_answered() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        places[0].engine.answers.clear()
        asking = asyncio.create_task(model.infer(TENSOR, ASKED))
        await in_the_end(lambda: places[0].engine.begun == 1)
        await model.load("next", "fast")
        await model.scale(3, LONG_S)
        await all_ready(model)
        assert [place.number for place in places] == [0, 1, 2]
        assert places[2].engine.calls == ["load next fast"] and places[2].engine.active == "next"
        places[2].engine.answers.clear()
        last = asyncio.create_task(model.replicas[2].infer(TENSOR, ASKED, None))
        await in_the_end(lambda: places[2].engine.begun == 1)
        await model.scale(1, LONG_S)
        assert len(model.replicas) == 1
        await in_the_end(lambda: not places[1].running)
        assert not last.done() and places[2].running
        places[2].engine.answers.set()
        assert (await last).version == "next"
        places[0].engine.answers.set()
        assert (await asking).version in ("first", "next")
        await model.scale(2, LONG_S)
        await all_ready(model)
        assert places[3].number == 1

    run(test, count=1)


def test_a_model_grows_when_its_requests_wait() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        scaler = Autoscaler(model, Bounds(1, 2, delay_ms=5.0, up_s=0.5, down_s=1e9), LONG_S)
        original = places[0].engine.infer

        async def late(request: Any) -> Any:
            response = await original(request)
            response.queue_ms = 50.0
            return response

        places[0].handlers["infer"] = late
        looking = asyncio.create_task(scaler.keep_looking())
        while len(model.replicas) < 2:
            await model.infer(TENSOR, ASKED)
        await all_ready(model)
        looking.cancel()
        assert len(places) == 2

    run(test, count=1)


@pytest.mark.slow
def test_a_version_that_always_crashes_one_replica_is_given_up_though_another_answers() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        await model.load("next", "fast")
        crashes: list[str] = []
        restarts: list[asyncio.Task[None]] = []

        async def restart() -> None:
            await places[1].die()
            places[1].handlers["load"] = crash
            places[1].come_back()

        async def crash(source: Any) -> Any:
            crashes.append(source.version)
            restarts.append(asyncio.create_task(restart()))
            await asyncio.Event().wait()

        await restart()
        await in_the_end(lambda: not model.replicas[1].ready)
        while not model.replicas[1].ready and len(crashes) < 4:
            await model.statistics()  # as every second: the other replica says what it has
            await asyncio.sleep(0.01)
        assert crashes == ["next"] * 3 and model.replicas[1].ready

    run(test)


def test_a_model_sleeps_and_the_next_requests_wake_it() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        scaler = Autoscaler(model, Bounds(1, 2, delay_ms=1e9, idle_s=0.01), LONG_S)
        await model.load("next", "fast")
        places[0].engine.answers.clear()
        asking = asyncio.create_task(model.replicas[0].infer(TENSOR, ASKED, None))
        busy = asyncio.create_task(model.infer(TENSOR, ASKED))
        await in_the_end(lambda: sum(place.engine.begun for place in places) >= 2 or busy.done())
        places[0].engine.answers.set()
        await asyncio.gather(asking, busy)
        looking = asyncio.create_task(scaler.keep_looking())
        await in_the_end(lambda: model.state == "asleep" and not any(place.running for place in places))
        looking.cancel()
        assert model.available and not model.ready and [each.state for each in model.replicas] == ["asleep"]
        page = Metrics().render({}, {"m": model}, {}).decode()
        assert 'gati_asleep{model="m"} 1.0' in page and 'gati_replicas{model="m"} 0.0' in page
        found = await asyncio.gather(*(model.infer(TENSOR, ASKED) for _ in range(3)))
        assert all(each.version == "next" and each.latency_ms >= each.queue_ms > 0.0 for each in found)
        assert [place.starts for place in places] == [2, 1] and model.state == "ready"

    run(test)


def test_a_model_that_is_asked_does_not_fall_asleep_and_one_that_is_unloaded_does_not_wake() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        places[0].engine.answers.clear()
        asking = asyncio.create_task(model.infer(TENSOR, ASKED))
        await in_the_end(lambda: places[0].engine.begun == 1)
        await model.fall_asleep(0.0, LONG_S)
        assert model.ready
        places[0].engine.answers.set()
        await asking
        await model.fall_asleep(0.0, LONG_S)
        assert model.state == "asleep"
        await model.stop(LONG_S)
        assert model.state == "unloaded" and not model.available
        with pytest.raises(UnavailableError, match="'m' does not answer"):
            await model.infer(TENSOR, ASKED)

    run(test, count=1)


def test_requests_that_are_refused_bring_replicas() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        outcomes: list[Any] = []
        model.dispatcher.on_outcome = outcomes.append
        places[0].engine.places = 0
        with pytest.raises(OverloadError, match="the queue is full"):
            await model.infer(TENSOR, ASKED)
        assert outcomes == [None]

    run(test, count=1)


def test_what_woke_a_model_waits_until_there_is_room_though_it_has_an_slo() -> None:
    """All were sent at once when it was ready, and those that its queue had no place for were refused."""

    async def test(model: Model, places: list[Place]) -> None:
        await model.fall_asleep(0.0, LONG_S)
        engine = places[0].engine  # the one that will be started
        engine.places = 2
        engine.answers.clear()
        hurried = ASKED._replace(latency_slo_ms=1e3 * LONG_S)
        asking = [asyncio.create_task(model.infer(TENSOR, each)) for each in (ASKED, hurried) * 5]
        await in_the_end(lambda: engine.begun == 2 and model.dispatcher.parking.parked == 8)
        engine.answers.set()
        assert {found.version for found in await asyncio.gather(*asking)} == {"first"}
        assert model.dispatcher.parking.parked == 0

    run(test, count=1)


def test_who_has_no_time_for_a_start_is_told_how_long_it_takes() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        model.sleep.start_s = 1e4
        await model.fall_asleep(0.0, LONG_S)
        short = ASKED._replace(time_remaining_ms=2e3)
        with pytest.raises(UnavailableError, match=r"takes about 10000.0 s; the request has 2.0 s") as told:
            await model.infer(TENSOR, short)
        assert told.value.retry_after_s == 1e4
        await all_ready(model)  # it was started all the same
        await model.fall_asleep(0.0, LONG_S)
        model.sleep.start_s = 1e4
        strict = ASKED._replace(latency_slo_ms=20.0)
        with pytest.raises(UnavailableError, match="the request has 0.0 s"):
            await model.infer(TENSOR, strict)
        await all_ready(model)

    run(test, count=1)


def test_a_start_that_fails_is_told() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        async def never() -> str:
            raise ConfigError("the library has gone") if places[0].hopeless else UnavailableError("no room")

        places[0].address = never  # type: ignore[method-assign]
        await model.fall_asleep(0.0, LONG_S)
        model.sleep.start_s = 0.0
        with pytest.raises(DeadlineError, match="while the model was being started"):
            await model.infer(TENSOR, ASKED._replace(time_remaining_ms=20.0))
        assert places[0].served  # so that it is started again, whatever it ends with
        places[0].hopeless = places[0].cause = "the library has gone"
        places[0].running = False
        with pytest.raises(UnavailableError, match="'m' does not answer: the library has gone"):
            await model.infer(TENSOR, ASKED)

    run(test, count=1)


def test_why_a_process_died_is_told_until_the_next_one_listens() -> None:
    """Next to nothing was told for most of the time in which a process died again and again."""

    async def test(model: Model, places: list[Place]) -> None:
        place, listening = places[0], asyncio.Event()
        own_address = place.address

        async def address() -> str:
            await listening.wait()
            return await own_address()

        place.address = address  # type: ignore[method-assign]
        await place.die()
        place.come_back()
        await in_the_end(lambda: not model.ready)
        with pytest.raises(UnavailableError, match="'m' does not answer: replica 0 was killed"):
            await model.infer(TENSOR, ASKED)
        listening.set()
        await all_ready(model)

    run(test, count=1)


def test_a_start_that_took_too_long_is_hardly_learned_from() -> None:
    now_s = [0.0]
    sleep = Sleep(lambda: now_s[0])

    def start(took_s: float) -> float | None:
        sleep.begin(woken=True)
        now_s[0] += took_s
        sleep.answers()
        return sleep.start_s

    assert [start(4.0), start(8.0), start(3600.0), start(2.0)] == [4.0, 8.0, 24.0, 2.0]


def test_counts_are_added_and_metrics_tell_replicas_apart() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        for place, inputs in zip(places, (3, 4), strict=True):
            found = await place.engine.statistics()
            found.inputs, found.refused, found.stopped = inputs, {"UNAVAILABLE": inputs}, inputs == 4
            found.exits = [ExitStatistics("first", "base", inputs, inputs)]
            found.queue_seconds = Histogram([1.0], [inputs, 1], float(inputs))

            async def statistics(found: Any = found) -> Any:
                return found

            place.handlers["statistics"] = statistics
        merged = await model.statistics()
        assert (merged.inputs, merged.refused, merged.stopped) == (7, {"UNAVAILABLE": 7}, True)
        assert [(row.exit, row.queries, row.hits) for row in merged.exits] == [("base", 7, 7)]
        assert (merged.queue_seconds.counts, merged.queue_seconds.sum_s) == ([7, 2], 7.0)
        page = Metrics().render({"m": await model.statistics_by_replica()}, {"m": model}, {}).decode()
        assert 'gati_exits_total{block="base",model="m",replica="1",version="first"} 4.0' in page
        assert 'gati_replicas{model="m"} 2.0' in page and 'gati_replicas_ready{model="m"} 2.0' in page
        assert 'gati_asked_again_total{model="m"} 0.0' in page

    run(test)


def test_one_replica_has_no_label() -> None:
    async def test(model: Model, places: list[Place]) -> None:
        page = Metrics().render({"m": await model.statistics_by_replica()}, {"m": model}, {}).decode()
        assert 'gati_queue_inputs{model="m"} 0.0' in page and "replica=" not in page

    run(test, count=1)


def test_a_model_that_may_have_several_replicas_keeps_their_label() -> None:
    """With and without the label, each counter was there twice after the number had changed."""

    async def test(model: Model, places: list[Place]) -> None:
        async def page() -> str:
            return Metrics().render({"m": await model.statistics_by_replica()}, {"m": model}, {}).decode()

        Autoscaler(model, Bounds(1, 1, delay_ms=5.0), LONG_S)
        assert "replica=" not in await page()
        Autoscaler(model, Bounds(1, 2, delay_ms=5.0), LONG_S)
        assert 'gati_queue_inputs{model="m",replica="0"} 0.0' in await page()
        model.numbered = False
        for count in (2, 1):
            await model.scale(count, LONG_S)
            await all_ready(model)
            assert 'gati_queue_inputs{model="m",replica="0"} 0.0' in await page()
            assert 'gati_queue_inputs{model="m"}' not in await page()

    run(test, count=1)


def test_nothing_is_merged_of_one() -> None:
    from services.scheduler.merging import merged_statistics, merged_versions

    only = SimpleNamespace(version="a")
    assert merged_versions([[only]])[0] is only and merged_statistics([only], []) is only
