"""The audit queue: what is drawn and dropped does not depend on outcomes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from gati.engine.exits import BASE, Prediction
from gati.errors import BackendError
from gati.guard.posts import Post
from gati.guard.watch import Watch
from services.inference.counts import Counts
from services.inference.following import Answering, Following, Handling, Shared, audit_share
from services.inference.keeping import ServedStanding
from services.inference.line import Line
from services.inference.queue import RequestQueue
from services.inference.service_times import ServiceTimes
from services.inference.settings import InferenceSettings

X = torch.zeros(1, 1)
GIVEN = np.zeros(1, np.float32)
HIT, MISS = "early", BASE


def prediction(exit: str, class_index: int) -> Prediction:
    return Prediction(class_index, torch.zeros(4), exit, "version")


@dataclass
class Answers:
    """A queue that answers when it is told to."""

    class_index: int = 0
    exit: str = BASE
    asked: list[asyncio.Future[Prediction]] = field(default_factory=list)
    at_once: bool = False
    times: ServiceTimes = field(default_factory=ServiceTimes)

    def put(self, x: Any, *, priority: int, deadline_s: float) -> Any:
        assert deadline_s == float("inf") and priority == 10
        answer: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        self.asked.append(answer)
        if self.at_once:
            self.let_go()
        return type("Ask", (), {"answer": answer})

    def promote(self, ask: Any) -> None: ...

    def drop(self, ask: Any) -> None: ...

    def let_go(self) -> None:
        for answer in self.asked:
            if not answer.done():
                answer.set_result(prediction(self.exit, self.class_index))


class House:
    """Versions of one model, with everything drawn."""

    def __init__(self, places: int = 64, **settings: Any) -> None:
        self.counts = Counts()
        self.line = Line(self.counts, places)
        self.standings = ServedStanding(None)
        chosen = InferenceSettings.model_validate({"name": "small", "audit_budget": 1.0, **settings})
        self.shared = Shared(chosen, self.counts, self.line, self.standings, None)
        self.base = Answers()

    def version(
        self,
        name: str,
        *,
        agreement: float = 0.9,
        proven: bool = True,
        early: Answers | None = None,
        **known: Any,
    ) -> Following:
        watch: Watch = self.standings.watch(name, agreement, proven=proven)
        queue: Any = early or Answers(exit=HIT, at_once=True)
        base: Any = self.base
        engine: Any = None
        answering = Answering(name, engine, queue)
        return Following(answering, Post(answering, watch), base, self.shared, **known)

    async def answer(
        self, of: Following, exit: str, class_index: int, beside: Following | None = None
    ) -> Handling:
        trial = None if beside is None else beside.post
        drawn = of.draw(trial)
        while beside is not None and drawn.place is None:  # a trial costs time, so not all are drawn
            drawn = of.draw(trial)
        of.answered(drawn, X, GIVEN, prediction(exit, class_index), None)
        await settle()
        return drawn


class Learning:
    """Memory that says what it learned."""

    serves, proving = False, None

    def __init__(self) -> None:
        self.learned: list[tuple[Any, int]] = []

    def learn(self, looked: Any, base: Prediction, *, drawn: bool, tried: bool = False) -> None:
        assert drawn
        self.learned.append((looked, base.class_index))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def body() -> None:
        await test()

    asyncio.run(body())


def test_misses_are_settled_behind_the_hits_that_came_before() -> None:
    """Else whatever ends the line in the middle would lose hits only, of which alone are losses."""

    async def test() -> None:
        house = House()
        version = house.version("a")
        await house.answer(version, HIT, 3)  # the reference will say 0: a loss
        for _ in range(5):
            await house.answer(version, MISS, 0)
        assert house.counts.agreed == house.counts.disagreed == 0, "all wait for the first"
        house.base.let_go()
        await settle()
        assert (house.counts.agreed, house.counts.disagreed) == (5, 1)
        assert (version.watch.audits, version.watch.losses) == (6, 1)  # type: ignore[union-attr]

    run(test)


def test_where_there_is_no_time_misses_are_left_out_as_hits_are() -> None:
    async def test() -> None:
        house = House(places=4)
        version = house.version("a")
        for exit in (HIT, MISS) * 20:
            await house.answer(version, exit, 3 if exit == HIT else 0)
        house.base.at_once = True
        house.base.let_go()
        await settle()
        assert (house.counts.agreed, house.counts.disagreed) == (2, 2)
        assert house.counts.left_out == 36
        await house.answer(version, MISS, 0)
        assert house.counts.agreed == 3, "there is room again"

    run(test)


def test_the_share_of_losses_is_right_though_the_reference_is_slow() -> None:
    """Half of the time there is no room: of audits as many are losses as of requests."""

    async def test() -> None:
        house = House(places=8)
        chance = np.random.default_rng(0)
        version = house.version("a", agreement=0.5)
        for request in range(4000):
            hit = chance.random() < 0.3
            await house.answer(version, HIT if hit else MISS, 3 if hit else 0)
            if request % 16 == 15:
                house.base.at_once = True
                house.base.let_go()
                await settle()
                house.base.at_once = False
        audits = house.counts.agreed + house.counts.disagreed
        assert 1000 < audits < 3000 and house.counts.left_out > 1000
        share = house.counts.disagreed / audits
        assert abs(share - 0.3) < 4 * (0.21 / audits) ** 0.5

    run(test)


def test_a_reference_that_fails_drops_everything_drawn_at_that_moment() -> None:
    async def test() -> None:
        house = House()
        version = house.version("a")
        await house.answer(version, MISS, 0)
        await house.answer(version, HIT, 3)
        await house.answer(version, MISS, 0)
        open_request = version.draw(None)  # not answered yet
        house.base.asked[0].set_exception(BackendError("out of memory"))
        await settle()
        assert (house.counts.agreed, house.counts.disagreed, house.counts.left_out) == (1, 0, 3)
        version.answered(open_request, X, GIVEN, prediction(MISS, 0), None)
        await settle()
        assert house.counts.agreed == 1
        await house.answer(version, MISS, 0)
        assert house.counts.agreed == 2, "what is drawn later counts again"

    run(test)


class Ready:
    """A runner that answers each input in the next turn of the event loop."""

    parallel = 1

    def submit(self, x: torch.Tensor) -> Future[Prediction]:
        answer: Future[Prediction] = Future()
        asyncio.get_running_loop().call_soon(answer.set_result, prediction(BASE, 0))
        return answer

    def close(self) -> None: ...


def test_the_guard_is_not_blind_under_a_load_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits waited behind all requests: caches that had become wrong answered for as long as that lasted."""
    monkeypatch.setattr("services.inference.last._PATIENCE_S", 0.0)

    async def test() -> None:
        queue = RequestQueue(Ready(), capacity=64, times=ServiceTimes())
        answered = 0

        def ask_again(_: object = None) -> None:
            nonlocal answered
            answered += 1
            if answered < 5000 and not house.counts.disagreed:
                queue.put(X, priority=2, deadline_s=math.inf).answer.add_done_callback(ask_again)

        house = House()
        house.base = queue  # type: ignore[assignment]
        version = house.version("a")
        for _ in range(2):  # at any time, one waits
            ask_again()
        await house.answer(version, HIT, 3)
        while answered < 5000 and not house.counts.disagreed:
            await asyncio.sleep(0)
        assert answered < 5000
        await queue.close()

    run(test)


def test_a_version_on_trial_that_fails_hides_nothing_of_the_one_that_serves() -> None:
    """All audits were lost with the lookups that failed: the guard was blind."""

    async def test() -> None:
        house, early = House(), Answers(0, HIT)
        house.base.at_once = True
        serving, waiting = house.version("a"), house.version("b", proven=False, early=early)
        for count, (exit, class_index) in enumerate(((HIT, 3), (MISS, 0), (HIT, 0)), 1):
            await house.answer(serving, exit, class_index, beside=waiting)
            early.asked[-1].set_exception(BackendError("out of memory"))
            await settle()
            assert serving.watch is not None and serving.watch.audits == count
            assert waiting.watch is not None and waiting.watch.proof is not None
            assert waiting.watch.proof.losses == waiting.watch.proof.audits == count
        assert (house.counts.agreed, house.counts.disagreed, house.counts.left_out) == (2, 1, 0)

    run(test)


@pytest.mark.parametrize(
    ("error", "is_bug"), [(BackendError("out of memory"), False), (TypeError("x"), True)]
)
def test_lookups_that_fail_by_a_bug_are_told_with_their_traceback(
    caplog: pytest.LogCaptureFixture, error: Exception, is_bug: bool
) -> None:
    async def test() -> None:
        house, early = House(), Answers(0, HIT)
        house.base.at_once = True
        serving, waiting = house.version("a"), house.version("b", proven=False, early=early)
        await house.answer(serving, HIT, 0, beside=waiting)
        early.asked[-1].set_exception(error)
        await settle()

    run(test)
    [told] = [each for each in caplog.records if each.getMessage() == "lookups failed"]
    assert (told.exc_info is not None, vars(told)["version"]) == (is_bug, "b")


def test_a_request_without_an_answer_gives_its_place_back() -> None:
    async def test() -> None:
        house = House(places=2)
        version = house.version("a")
        for _ in range(10):
            version.draw(None).forget()
        assert house.counts.left_out == 0

    run(test)


def test_a_request_that_nobody_waits_for_judges_only_what_did_not_serve() -> None:
    """Misses are slow: without those past their deadline, a version on trial was judged by easy inputs."""

    async def test() -> None:
        house, memory = House(), Learning()
        house.base.at_once = True
        serving = house.version("a", memory=memory)
        waiting = house.version("b", proven=False, early=Answers(3, HIT, at_once=True))
        assert serving.watch is not None and waiting.watch is not None and waiting.watch.proof is not None
        looked: Any = object()
        for count in range(1, 4):
            drawn = serving.draw(waiting.post)
            while drawn.place is None or not drawn.decided.drawn.audit:
                drawn.forget()
                drawn = serving.draw(waiting.post)
            serving.unanswered(drawn, X, GIVEN, looked)
            await settle()
            assert (waiting.watch.proof.audits, waiting.watch.proof.losses) == (count, count)
            assert memory.learned == [(looked, 0)] * count
        assert serving.watch.audits == house.counts.agreed == house.counts.disagreed == 0
        assert house.counts.trials_disagreed == 3

    run(test)


def test_a_request_that_nobody_waits_for_costs_nothing_if_it_judges_nothing() -> None:
    async def test() -> None:
        house = House(places=1)
        serving = house.version("a")
        for _ in range(5):
            drawn = serving.draw(None)
            assert drawn.place is not None
            serving.unanswered(drawn, X, GIVEN, None)
            await settle()
        assert house.base.asked == [] and house.counts.left_out == 0

    run(test)


def test_a_reference_that_fails_for_a_request_that_nobody_waits_for_judges_only_what_did_not_serve() -> None:
    async def test() -> None:
        house = House()
        serving, waiting = house.version("a"), house.version("b", proven=False)
        drawn = serving.draw(waiting.post)
        while drawn.place is None:
            drawn = serving.draw(waiting.post)
        serving.unanswered(drawn, X, GIVEN, None)
        await settle()
        house.base.asked[0].set_exception(BackendError("out of memory"))
        await settle()
        assert serving.watch is not None and waiting.watch is not None and waiting.watch.proof is not None
        assert (serving.watch.audits, waiting.watch.proof.losses) == (0, 1)

    run(test)


def test_audits_count_for_their_own_version_and_epoch_only() -> None:
    async def test() -> None:
        house = House()
        serving = house.version("a")
        waiting = house.version("b", proven=False, early=Answers(2, HIT, at_once=True))
        watch, other = serving.watch, waiting.watch
        assert watch is not None and other is not None and other.proof is not None
        for _ in range(5):
            await house.answer(serving, MISS, 0, beside=waiting)
        assert (watch.audits, watch.losses) == (5, 0)
        assert (other.proof.audits, other.proof.losses) == (5, 5)
        assert (house.counts.trials_agreed, house.counts.trials_disagreed) == (0, 5)
        await house.answer(serving, HIT, 3)  # in the line when the guard stops the caches
        while not serving.stopped:
            watch.audited(agreed=False)
        proof = watch.proof
        assert proof is not None
        house.base.let_go()
        await settle()
        assert proof.audits == 0, "an audit of before says nothing of the proof"

    run(test)


def test_stopped_caches_are_tried_beside_the_base_models_answers() -> None:
    async def test() -> None:
        house = House(trials=1.0)
        version = house.version("a", proven=False)
        assert version.serving is house.base
        while not version.may_hit:
            await house.answer(version, MISS, 0)
            assert house.counts.agreed == house.counts.disagreed == 0, "no answer is an early one"
        assert version.watch is not None
        assert 40 < version.watch.proven_on < 60 and house.base.asked == []

    run(test)


def test_misses_of_reduced_precision_are_compared_with_the_reference() -> None:
    async def test() -> None:
        house = House()
        house.base.at_once = True
        version = house.version("a", exact=False, cost=3.0)
        await asyncio.gather(*(house.answer(version, MISS, 3) for _ in range(60)))
        audits = house.counts.disagreed
        assert house.counts.agreed == 0 and audits == len(house.base.asked)
        assert 5 <= audits <= 38  # a third of 60: an audit costs three runs of the network

    run(test)


def test_a_version_that_goes_is_asked_nothing_more() -> None:
    async def test() -> None:
        house = House()
        serving, early = house.version("a"), Answers(2, HIT)
        going = house.version("b", proven=False, early=early)
        drawn = serving.draw(going.post)
        while drawn.place is None:
            drawn = serving.draw(going.post)
        assert going.post is not None
        going.post.version.gone = True
        serving.answered(drawn, X, GIVEN, prediction(MISS, 0), None)
        await settle()
        assert early.asked == [] and house.counts.agreed == 1

    run(test)


@pytest.mark.parametrize(
    ("budget", "sampling", "cost", "rate"),
    [(0.05, 0.0, 1.0, 0.05), (0.05, 0.0, 4.0, 0.0125), (0.5, 0.2, 1.0, 0.5), (0.05, 0.2, 1.0, 0.2)],
)
def test_samples_count_towards_the_budget(budget: float, sampling: float, cost: float, rate: float) -> None:
    audits = audit_share(budget, sampling, cost)
    assert 1.0 - (1.0 - audits) * (1.0 - sampling) == pytest.approx(rate)


def test_versions_with_the_same_caches_share_a_watch(tmp_path: Any) -> None:
    heard: list[str] = []
    standings = ServedStanding(tmp_path / "a.json")

    def of(identity: str, delta: float = 0.05) -> Watch:
        return standings.of(
            identity, 0.9, proven=False, delta=delta, on_event=lambda event: heard.append(event.state)
        )

    first, again, other = of("a"), of("a"), of("b", delta=0.01)
    assert first is again and other is not first
    assert first.proof is not None and first.proof.delta == 0.05 / 2
    assert other.proof is not None and other.proof.delta == pytest.approx(0.01 / 6)  # of its own confidence
    while not first.may_hit:
        first.audited(agreed=True)
    assert heard == ["serving"]
    standings.close()
    kept = ServedStanding(tmp_path / "a.json")
    assert kept.of("a", 0.9, proven=False, delta=0.05, on_event=lambda event: None).may_hit
    assert kept.spending.used == 2
