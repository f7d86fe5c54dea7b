"""A process that gives way, threads that take turns, and work that lets requests pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from gati import priority
from gati.priority import RunningRequests, alongside, let_requests_pass, take_turns_often
from tests.waiting import LONG_S, until

PROGRAM = """
import json, os, threading
from gati.priority import give_way
give_way({niceness})
found = []
thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
print(json.dumps([os.sched_getscheduler(0), *found, os.nice(0)]))
"""


def priority_after(niceness: int) -> list[int]:
    """Scheduling classes of the main thread and of a later one, and the niceness, in a process of its own."""
    command = [sys.executable, "-c", PROGRAM.format(niceness=niceness)]
    return list(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the class of idle processes")
def test_a_process_that_gives_way_is_idle_and_so_are_its_threads() -> None:
    before = os.nice(0)
    assert priority_after(max(before, 5)) == [os.SCHED_IDLE, os.SCHED_IDLE, max(before, 5)]
    assert priority_after(0) == [os.sched_getscheduler(0)] * 2 + [before]


# Requests before other work ---------------------------------------------------------------------------------


def test_work_that_is_alongside_nothing_does_not_wait() -> None:
    assert let_requests_pass() == 0.0
    with alongside(RunningRequests()):
        assert let_requests_pass() == 0.0, "no request is running"


def test_work_goes_on_when_the_requests_that_ran_have_ended_though_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a process that always answers some request would never learn."""
    monkeypatch.setattr(priority, "_LONGEST_S", LONG_S)
    requests, passed = RunningRequests(), threading.Event()

    def work() -> None:
        with alongside(requests):
            let_requests_pass()
        passed.set()

    with requests:
        thread = threading.Thread(target=work)
        thread.start()
        until(lambda: requests.waiting == 1)
        assert not passed.is_set()
        requests.__enter__()
    assert passed.wait(LONG_S / 2), "one of the two that run now may be later than the checkpoint"
    requests.__exit__(None, None, None)
    thread.join()


def test_a_request_that_hangs_does_not_stop_the_work_alongside() -> None:
    requests = RunningRequests()
    with requests, alongside(requests):
        waited_s = let_requests_pass()
    assert waited_s > 0.0
    assert let_requests_pass() == 0.0, "outside the context no thread waits"


def test_other_threads_do_not_wait() -> None:
    requests, waited = RunningRequests(), []
    with requests, alongside(requests):
        thread = threading.Thread(target=lambda: waited.append(let_requests_pass()))
        thread.start()
        thread.join()
    assert waited == [0.0]


def test_a_failed_request_has_ended() -> None:
    requests = RunningRequests()
    with pytest.raises(ValueError, match="this one"), requests:
        raise ValueError("this one")
    with alongside(requests):
        assert let_requests_pass() == 0.0


def test_a_process_that_takes_turns_often_keeps_a_shorter_interval() -> None:
    before_s = sys.getswitchinterval()
    try:
        take_turns_often()
        assert sys.getswitchinterval() < 1e-4
        sys.setswitchinterval(1e-6)
        take_turns_often()
        assert sys.getswitchinterval() == pytest.approx(1e-6)
    finally:
        sys.setswitchinterval(before_s)
