"""Many clients at once: the engine's own answers, whoever joins whom; cancelling, closing, failing."""

from __future__ import annotations

import os
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from gati.engine.backends import BACKENDS
from gati.engine.concurrent import ConcurrentEngine, _Request
from gati.engine.engine import Engine
from gati.engine.exits import Prediction
from gati.errors import BackendError, DataError
from tests.engine.networks import BLOCKS, traced_network
from tests.engine.test_graph_backends import exits, requests
from tests.waiting import LONG_S, returns, until

backends = pytest.mark.parametrize(
    "backend",
    [
        "torch",
        pytest.param(
            "onnxruntime",
            marks=pytest.mark.skipif(not BACKENDS["onnxruntime"].installed(), reason="not installed"),
        ),
    ],
)


@pytest.mark.slow
@backends
@pytest.mark.parametrize("early", [True, False])
def test_every_client_gets_the_engines_own_answer(backend: str, early: bool) -> None:
    engine = Engine(traced_network(), exits(0.45, 0.4), backend=backend)
    x = requests(80)
    alone = [(engine(row) if early else engine.base(row))[0] for row in x.split(1)]
    with ConcurrentEngine(engine, early=early) as shared, ThreadPoolExecutor(8) as clients:
        together = list(clients.map(shared, x.split(1)))
    for ours, theirs in zip(together, alone, strict=True):
        assert (ours.exit, ours.class_index) == (theirs.exit, theirs.class_index)
        assert torch.allclose(ours.probabilities, theirs.probabilities, atol=1e-5)
    assert early == (len({answer.exit for answer in together}) > 1)


def test_inputs_that_wait_are_run_as_one_batch_and_those_that_hit_leave_it() -> None:
    engine = Engine(traced_network(), exits(0.45, 0.4))
    sizes: list[tuple[int, int]] = []
    with ConcurrentEngine(engine, workers=1) as shared:
        gate = threading.Event()
        first, *rest = shared._work.segments

        def counted(position: int, run):
            def counting(carried):
                if position == 0:
                    gate.wait(LONG_S)
                sizes.append((position, carried[0].shape[0]))
                return run(carried)

            return counting

        shared._work.segments = tuple(
            type(each)(counted(position, each.run), each.takes_rows)
            for position, each in enumerate((first, *rest))
        )
        waiting = [shared.submit(row) for row in requests(21).split(1)]
        gate.set()
        left = [answer.result(LONG_S).exit for answer in waiting]
    entered = [size for position, size in sizes if position == 0]
    assert sum(entered) == 21 and max(entered) >= 20 / 2
    assert len(entered) <= 3
    later = sum(size for position, size in sizes if position == 1)
    assert later == sum(exit != BLOCKS[0] for exit in left)


def test_a_cancelled_request_is_not_run() -> None:
    engine = Engine(traced_network(), exits(0.45))
    with ConcurrentEngine(engine, workers=1) as shared:
        gate = threading.Event()
        first = shared._work.segments[0]

        def slow(carried):
            gate.wait(LONG_S)
            return first.run(carried)

        shared._work.segments = (type(first)(slow, first.takes_rows), *shared._work.segments[1:])
        running, waiting = (shared.submit(row) for row in requests(2).split(1))
        until(lambda: shared.waiting <= 1)
        waiting.cancel()
        gate.set()
        assert running.result(LONG_S).exit in (BLOCKS[0], "base")
        with pytest.raises(CancelledError):
            waiting.result(LONG_S)


def test_closing_answers_what_waits_and_refuses_what_comes() -> None:
    shared = ConcurrentEngine(Engine(traced_network(), exits(0.45))).start()
    answers = [shared.submit(row) for row in requests(10).split(1)]
    shared.close()
    assert all(answer.result(0).exit for answer in answers)
    with pytest.raises(BackendError, match="the engine is closed"):
        shared.submit(requests(1))


def test_an_engine_that_is_gone_answers_what_waits_and_leaves_no_worker_behind() -> None:
    """As where a cell of a notebook that starts one runs again."""
    others = set(threading.enumerate())
    shared = ConcurrentEngine(Engine(traced_network(), exits(0.45)), workers=2).start()
    answers = [shared.submit(row) for row in requests(10).split(1)]
    workers = set(threading.enumerate()) - others
    assert len(workers) == 2
    del shared
    for worker in workers:
        worker.join(LONG_S)
        assert not worker.is_alive()
    assert all(answer.result(0).exit for answer in answers)


def test_an_engine_whose_answers_know_their_user_is_gone_with_the_user() -> None:
    """The callbacks of the last answer refer to the engine, and the worker waits for the next input."""

    class User:
        def __init__(self) -> None:
            self.shared = ConcurrentEngine(Engine(traced_network()), workers=1).start()
            self.told = threading.Event()

        def tell(self, _: Future[Prediction]) -> None:
            self.told.set()

    user = User()
    user.shared.submit(requests(1)).add_done_callback(user.tell)
    assert user.told.wait(LONG_S)
    (worker,) = user.shared._threads
    del user
    worker.join(LONG_S)
    assert not worker.is_alive()


def test_who_gets_an_answer_may_close_the_engine() -> None:
    """The callback runs in a worker, which cannot wait for itself."""
    shared, closed = ConcurrentEngine(Engine(traced_network()), workers=1).start(), threading.Event()

    def close(_: Future[Prediction]) -> None:
        shared.close()
        closed.set()

    with shared._work.changed:  # no worker takes the input before there is a callback
        shared.submit(requests(1)).add_done_callback(close)
    assert closed.wait(LONG_S)
    shared.close()
    assert not shared._threads[0].is_alive()


def test_a_failure_reaches_the_client_and_the_next_request_is_served() -> None:
    with ConcurrentEngine(Engine(traced_network(), exits(0.45)), workers=1) as shared:
        whole = shared._work.segments
        first = whole[0]

        def failing(carried):
            raise RuntimeError("out of memory")

        shared._work.segments = (type(first)(failing, first.takes_rows), *whole[1:])
        with pytest.raises(RuntimeError, match="out of memory"):
            shared(requests(1))
        shared._work.segments = whole
        assert shared(requests(1)).exit in (BLOCKS[0], "base")


@pytest.mark.parametrize("lacking", ["a worker", "what limits it"])
def test_where_a_worker_cannot_be_started_none_stays(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others waited for it for ever, and so did who started them."""
    start, workers = threading.Thread.start, 0

    def start_one(thread: threading.Thread) -> None:
        nonlocal workers
        workers += thread.name == "gati-engine"
        if workers > 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    def refuse(_: int) -> None:
        raise RuntimeError("can't start new thread")

    shared = ConcurrentEngine(Engine(traced_network(), exits(0.45)), workers=3)
    others = set(threading.enumerate())

    def workers_of_this() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "gati-engine" and each not in others]

    def fails() -> bool:
        with pytest.raises(BackendError, match="3 workers cannot be started .can't start new thread.: give"):
            shared.start()
        return True

    with monkeypatch.context() as patch:
        if lacking == "a worker":
            patch.setattr(threading.Thread, "start", start_one)
        else:
            patch.setattr("gati.engine.concurrent.work_alongside", refuse)
        assert returns(fails)
    until(lambda: not workers_of_this())
    with shared:
        assert shared(requests(1)).class_index >= 0


def test_it_runs_nothing_before_it_is_started() -> None:
    others = set(threading.enumerate())  # of which some may end meanwhile
    shared = ConcurrentEngine(Engine(traced_network()), workers=1)
    with pytest.raises(BackendError, match="the engine is not started; use it in a `with` block"):
        shared.submit(requests(1))
    shared.close()  # nothing to stop
    shared = ConcurrentEngine(Engine(traced_network()), workers=1)
    assert not set(threading.enumerate()) - others
    with shared.start():  # started once, however often that is asked for
        assert len(set(threading.enumerate()) - others) == 1
        assert shared(requests(1)).exit == "base"


def test_bad_inputs_are_refused_before_they_wait() -> None:
    with ConcurrentEngine(Engine(traced_network())) as shared:
        with pytest.raises(DataError, match="the network takes a tensor of shape"):
            shared.submit(torch.zeros(1, 3, 9, 9))
        with pytest.raises(DataError, match="2 inputs in one tensor; submit each of them"):
            shared.submit(requests(2))
        assert shared.waiting == 0
    with pytest.raises(BackendError, match="at least 1"):
        ConcurrentEngine(Engine(traced_network()), workers=0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="overlapped lookups need a core of their own")
def test_workers_have_all_cores_where_the_engine_has_reserved_one_for_lookups() -> None:
    leaving = [replace(each, placement="overlapped") for each in exits(0.4)]
    cores = os.sched_getaffinity(0)
    with Engine(traced_network(), leaving) as engine:
        assert len(os.sched_getaffinity(0)) < len(cores)
        with ConcurrentEngine(engine, workers=1) as shared:
            (worker,) = shared._threads
            assert worker.native_id is not None and os.sched_getaffinity(worker.native_id) == cores
    assert os.sched_getaffinity(0) == cores


def test_the_number_of_torchs_threads_is_left_as_it_was() -> None:
    before = torch.get_num_threads()
    with ConcurrentEngine(Engine(traced_network(), exits(0.4))) as shared:
        shared(requests(1))
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before


class CancelledJustNow(Future[Prediction]):
    """Its client cancels it before the worker's exception arrives."""

    def set_exception(self, exception: BaseException | None) -> None:
        self.cancel()
        super().set_exception(exception)


def test_a_request_that_is_cancelled_while_its_batch_fails_does_not_end_the_worker() -> None:
    engine = Engine(traced_network(), exits(0.45, 0.4))
    x = requests(1)
    with ConcurrentEngine(engine, workers=1) as shared:
        (first, *rest), fails = shared._work.segments, threading.Event()

        def failing(carried):
            if not fails.is_set():
                fails.set()
                raise RuntimeError("out of memory")
            return first.run(carried)

        shared._work.segments = (replace(first, run=failing), *rest)
        with shared._work.changed:
            shared._work.queues[0].append(_Request((x,), x, CancelledJustNow()))
            shared._work.changed.notify()
        assert fails.wait(LONG_S)
        assert shared.submit(x).result(LONG_S).class_index == engine(x)[0].class_index
