"""How many threads torch uses in the threads that answer, whatever other threads set."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gati.engine.concurrent import ConcurrentEngine
from gati.engine.cores import check_lookup_cores, most_lookup_cores
from gati.engine.engine import Engine
from gati.engine.placement import WorkerLookups
from gati.engine.threads import let_others_first, limit_threads, one_thread, work_alongside
from gati.errors import BackendError
from services.inference.runner import open_runner
from tests.engine.cores import Cores, grant
from tests.engine.networks import exits as overlapped_exits
from tests.engine.networks import traced_network
from tests.engine.test_graph_backends import exits, requests
from tests.waiting import LONG_S, returns


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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities per thread")
def test_a_thread_of_lower_priority_is_not_raised() -> None:
    """Under `nice -n 15` few users may: the thread ended, and whoever started it waited for ever."""

    def lowered_to(niceness: int) -> int:
        let_others_first(niceness)
        return os.getpriority(os.PRIO_PROCESS, 0)

    before = os.getpriority(os.PRIO_PROCESS, 0)
    with ThreadPoolExecutor(1) as thread:
        found = [thread.submit(lowered_to, niceness).result(LONG_S) for niceness in (0, 15, 10, 16)]
    assert found == [before, max(before, 15), max(before, 15), max(before, 16)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_system_that_refuses_priorities_hinders_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr(os, "setpriority", refuse, raising=False)
    runner = open_runner(Engine(traced_network()), workers=1)
    assert runner.submit(requests(1)).result(LONG_S).exit == "base"
    with ConcurrentEngine(Engine(traced_network()), workers=2, niceness=19) as shared:
        assert shared(requests(1)).exit == "base"


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


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Cores:
    return Cores.instead(4, monkeypatch)


@pytest.mark.parametrize(
    ("wanted", "ours", "theirs"),
    [
        pytest.param(1, {0, 1, 2}, {3}, id="one"),
        pytest.param(2, {0, 1}, {2, 3}, id="half"),
        pytest.param(3, {0}, {1, 2, 3}, id="all but one"),
        pytest.param(8, {0}, {1, 2, 3}, id="more than there are"),
    ],
)
def test_overlapped_lookups_have_the_last_cores_and_as_many_threads(
    wanted: int, ours: set[int], theirs: set[int], cores: Cores
) -> None:
    counts: dict[threading.Thread, int] = {}
    counted = threading.Event()

    def lookup(hidden: Tensor) -> tuple[Tensor, Tensor]:
        counts[threading.current_thread()] = torch.get_num_threads()
        counted.set()
        return hidden, hidden.sum().reshape(1)

    lookups = WorkerLookups(wanted)
    with lookups:
        assert cores.ours == (ours, min(3, len(ours)))
        with lookups.released():
            assert cores.ours == ({0, 1, 2, 3}, 3)
        assert cores.ours == (ours, min(3, len(ours)))
        lookups.submit(lookup, torch.ones(1, 1))
        assert counted.wait(LONG_S)
        lookups.answer()
    assert cores.ours == ({0, 1, 2, 3}, 3)
    for thread in (counts, cores.bound):
        thread.pop(threading.current_thread(), None)
    assert list(counts.values()) == [len(theirs)]
    assert list(cores.bound.values()) == [[theirs]]


@pytest.mark.parametrize(
    ("quota", "wanted", "ours", "theirs"),
    [(2, 1, 1, 1), (4, 1, 3, 1), (4, 3, 1, 3), (4, 8, 1, 3), (1, 1, 1, 1)],
)
def test_where_a_quota_limits_time_lookups_have_a_part_of_it_on_any_core(
    quota: int, wanted: int, ours: int, theirs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups of all containers on a machine were pinned to its last cores."""
    cores = Cores.instead(8, monkeypatch)
    grant(quota, tmp_path, monkeypatch)
    counts: list[int] = []
    counted = threading.Event()

    def lookup(hidden: Tensor) -> tuple[Tensor, Tensor]:
        counts.append(torch.get_num_threads())
        counted.set()
        return hidden, hidden.sum().reshape(1)

    with WorkerLookups(wanted) as lookups:
        assert cores.ours == (set(range(8)), min(3, ours))
        assert most_lookup_cores() == max(1, quota - 1)
        lookups.submit(lookup, torch.ones(1, 1))
        assert counted.wait(LONG_S)
        lookups.answer()
    assert cores.ours == (set(range(8)), 3)
    assert counts[0] == theirs
    assert {frozenset(each) for bound in cores.bound.values() for each in bound} == {frozenset(range(8))}


@pytest.mark.parametrize(
    ("count", "device", "text"),
    [
        (-1, "cpu", "lookup_cores is -1; give at least 1"),
        (4, "cpu", r"lookup_cores is 4, but of the usable cores \(4\) the network needs .*most 3"),
        (2, "cuda:0", "lookup_cores is 2, but on cuda:0 lookups run on a stream, not on cores: leave it out"),
    ],
)
def test_cores_that_lookups_cannot_have_are_refused(count: int, device: str, text: str, cores: Cores) -> None:
    with pytest.raises(BackendError, match=text):
        check_lookup_cores(count, torch.device(device))


def test_lookups_may_always_have_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of one core they share it with the network."""
    Cores.instead(1, monkeypatch)
    for device in ("cpu", "cuda:0"):
        check_lookup_cores(1, torch.device(device))


def test_cores_that_are_reserved_already_are_there_for_other_lookups(cores: Cores) -> None:
    with WorkerLookups(2):
        assert most_lookup_cores() == 3
        check_lookup_cores(3, torch.device("cpu"))


def overlapped_engine(lookup_cores: int) -> Engine:
    exits = overlapped_exits((0.5,) * 3, "overlapped")
    return Engine(traced_network(), exits, lookup_cores=lookup_cores)


@pytest.mark.parametrize("first", [1, 2])
def test_engines_that_are_open_at_once_leave_the_caller_what_the_largest_share_leaves(
    first: int, cores: Cores
) -> None:
    small, large = overlapped_engine(1), overlapped_engine(2)
    small.open()
    assert cores.ours == ({0, 1, 2}, 3)
    large.open()
    assert cores.ours == ({0, 1}, 2)
    closing = (small, large) if first == 1 else (large, small)
    closing[0].close()
    assert cores.ours == (({0, 1}, 2) if first == 1 else ({0, 1, 2}, 3))
    assert len(closing[1](requests(1))) == 1
    closing[1].close()
    assert cores.ours == ({0, 1, 2, 3}, 3)


def test_lookups_that_are_collected_while_others_reserve_cores_give_theirs_back(
    cores: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when Python collects garbage in the middle of it."""
    gone, lookups = [WorkerLookups(3)], WorkerLookups(1)
    gone[0].open()
    assert cores.ours == ({0}, 1)
    bind = os.sched_setaffinity

    def collecting(thread: int, those: set[int]) -> None:
        if threading.current_thread() is threading.main_thread():
            gone.clear()
        bind(thread, those)

    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_setaffinity", collecting)
        lookups.open()
    assert not gone
    assert cores.ours == ({0, 1, 2}, 3)
    lookups.close()
    assert cores.ours == ({0, 1, 2, 3}, 3)


@pytest.mark.parametrize("also_open", [True, False])
def test_closing_in_another_thread_gives_back_cores_at_once_and_threads_when_it_can(
    also_open: bool, cores: Cores
) -> None:
    """It left the closed engine among those that reserve cores, so the thread stayed confined for good."""
    small, large = overlapped_engine(1), overlapped_engine(3)
    left = ({0, 1, 2} if also_open else {0, 1, 2, 3}, 3)
    if also_open:
        small.open()
    for again in (large.open, large.close):
        large.open()
        assert cores.ours == ({0}, 1)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(large.close).result(LONG_S)
        assert cores.ours[0] == left[0]
        again()
        large.close()
        assert cores.ours == left
    small.close()
    assert cores.ours == ({0, 1, 2, 3}, 3)


def test_a_number_of_threads_that_was_set_after_closing_elsewhere_stays(cores: Cores) -> None:
    lookups = WorkerLookups(2)
    lookups.open()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lookups.close).result(LONG_S)
    torch.set_num_threads(4)
    with lookups:
        assert cores.ours == ({0, 1}, 2)
    assert cores.ours == ({0, 1, 2, 3}, 4)


def test_a_system_that_binds_no_threads_hinders_no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker ended before it had begun, and the caller waited for it for ever."""

    def refuse(_: int, cores: set[int]) -> None:
        raise PermissionError("not permitted")

    def looked_up() -> float:
        with WorkerLookups() as lookups:
            lookups.submit(lambda hidden: (hidden, hidden.sum().reshape(1)), torch.ones(1, 1))
            return lookups.answer().score

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    assert returns(looked_up) == 1.0


def test_where_no_worker_can_be_started_the_calling_thread_keeps_its_cores(
    cores: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, lookups = cores.ours, WorkerLookups()

    def no_more(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_more)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            lookups.open()
        lookups.close()
    assert cores.ours == before
    with lookups:
        assert cores.ours == ({0, 1, 2}, 3)
    assert cores.ours == before


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
