"""How many threads torch uses in the threads that answer, whatever other threads set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from gati.engine import placement
from gati.engine.concurrent import ConcurrentEngine
from gati.engine.engine import Engine
from gati.engine.placement import WorkerLookups
from gati.engine.threads import limit_threads, one_thread, work_alongside
from services.inference.runner import open_runner
from tests.engine.networks import traced_network
from tests.engine.test_graph_backends import exits, requests
from tests.waiting import LONG_S


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def in_thread(work: Callable[[], int]) -> int:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result(LONG_S)


def test_a_limit_lasts_and_is_of_its_thread_only() -> None:
    limited, changed = threading.Event(), threading.Event()

    def work() -> int:
        limit_threads(1)
        limited.set()
        changed.wait(LONG_S)
        torch.ones(10).sum()
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as thread:
        counted = thread.submit(work)
        limited.wait(LONG_S)
        assert in_thread(torch.get_num_threads) == 3
        torch.set_num_threads(2)
        changed.set()
        assert counted.result(LONG_S) == 1
    assert torch.get_num_threads() == in_thread(torch.get_num_threads) == 2


def test_threads_that_are_limited_together_leave_the_others_as_they_were() -> None:
    for _ in range(20):
        begin = threading.Barrier(8)

        def work(begin: threading.Barrier = begin) -> int:
            begin.wait(LONG_S)
            work_alongside(0)
            return torch.get_num_threads()

        with ThreadPoolExecutor(8) as threads:
            assert {each.result(LONG_S) for each in [threads.submit(work) for _ in range(8)]} == {1}
        assert torch.get_num_threads() == in_thread(torch.get_num_threads) == 3


def test_threads_started_inside_one_thread_have_one() -> None:
    with one_thread():
        assert in_thread(torch.get_num_threads) == 1
    assert in_thread(torch.get_num_threads) == 3


@pytest.mark.parametrize("early", [True, False])
def test_the_workers_of_a_concurrent_engine_compute_on_one_thread_each(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(traced_network(), exits(0.45))
    counts: list[int] = []
    prediction = Engine.prediction

    def counting(self: Engine, scores: Tensor, exit: str):
        counts.append(torch.get_num_threads())
        return prediction(self, scores, exit)

    with ConcurrentEngine(engine, early=early, workers=2) as shared, ThreadPoolExecutor(8) as clients:
        monkeypatch.setattr(Engine, "prediction", counting)
        list(clients.map(shared, requests(40).split(1)))
    assert counts and set(counts) == {1}


def test_overlapped_lookups_keep_to_the_one_core_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "usable_cores", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(placement, "_pin", lambda cores: None)
    counts: dict[threading.Thread, int] = {}
    counted = threading.Event()

    def lookup(hidden: Tensor) -> tuple[Tensor, Tensor]:
        counts[threading.current_thread()] = torch.get_num_threads()
        counted.set()
        return hidden, hidden.sum().reshape(1)

    with WorkerLookups() as lookups:
        assert torch.get_num_threads() == 3
        lookups.submit(lookup, torch.ones(1, 1))
        assert counted.wait(LONG_S)
        lookups.answer()
    counts.pop(threading.current_thread(), None)
    assert list(counts.values()) == [1]


def test_where_no_worker_can_be_started_the_calling_thread_keeps_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[set[int]] = []
    monkeypatch.setattr(placement, "usable_cores", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(placement, "_pin", pinned.append)
    before, lookups = torch.get_num_threads(), WorkerLookups()

    def no_more(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_more)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            lookups.open()
        lookups.close()
    assert torch.get_num_threads() == before
    with lookups:
        assert {0, 1, 2} in pinned
    assert pinned[-1] == {0, 1, 2, 3} and torch.get_num_threads() == before


def test_engines_that_take_turns_share_a_thread_and_close_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(traced_network(), exits(0.45))
    found: set[threading.Thread] = set()
    prediction = Engine.prediction

    def noting(self: Engine, scores: Tensor, exit: str):
        found.add(threading.current_thread())
        return prediction(self, scores, exit)

    monkeypatch.setattr(Engine, "prediction", noting)
    first, base = open_runner(engine, workers=1), open_runner(engine, early=False, workers=1)
    x = requests(1)
    first.submit(x).result(LONG_S)
    base.submit(x).result(LONG_S)
    assert len(found) == 1
    first.close()
    assert base.submit(x).result(LONG_S).exit == "base"
    base.close()
