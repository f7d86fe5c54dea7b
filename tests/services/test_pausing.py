"""Requests pause the adaptation process while it computes: real processes, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, suppress
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.pausing import Pausable, Pausing, Takes, can_pause, shared_memory
from tests.waiting import LONG_S, Clock, in_the_end, until

pytestmark = pytest.mark.skipif(not can_pause(), reason="pausing another process needs Linux 5.3 or newer")

_COMPUTES = """
import os, sys
from pathlib import Path
from services.pausing import Pausable

parent = os.getppid()
pausable = Pausable(Path(sys.argv[1]))
for line in sys.stdin:
    if line.strip() == "compute":
        with pausable.computing():
            print("computing", flush=True)
            while not Path(sys.argv[2]).exists() and os.getppid() == parent:
                pass
    print("idle", flush=True)
"""
_PARENT = """
import os, subprocess, sys
from services.pausing import shared_memory

code = "import sys; from pathlib import Path; from services.pausing import Pausable; "
code += "Pausable(Path(sys.argv[1])); print(0, flush=True); sys.stdin.read()"
with shared_memory() as path:
    program = [sys.executable, "-c", code, path]
    child = subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    child.stdout.readline()
    print(child.pid, flush=True)
    sys.stdin.read()
"""
_ANSWERS = """
import asyncio, sys
from pathlib import Path
from services.pausing import Pausing

async def answer():
    with Pausing(Path(sys.argv[1]), cores=2).answering():
        print("answering", flush=True)
        sys.stdin.readline()

asyncio.run(answer())
"""


def _state(pid: int) -> str:
    """The state of a process, T if it is stopped; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


class Process:
    """A Python process that reads and writes lines."""

    def __init__(self, code: str, *arguments: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    @property
    def stopped(self) -> bool:
        return _state(self.pid) == "T"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


class Computes(Process):
    """The process that retrains; it computes from `begin` to `end`."""

    def __init__(self, shared: Path, folder: Path) -> None:
        self._enough = folder / "enough"
        super().__init__(_COMPUTES, shared, self._enough)

    def begin(self) -> None:
        self.tell("compute")
        assert self.hear() == "computing"

    def end(self) -> None:
        self._enough.touch()
        assert self.hear() == "idle"


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_memory() as path:
        assert path is not None
        yield path


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[signal.Signals]:
    """Signals that this process would have sent: none is."""
    signals: list[signal.Signals] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda _, number: signals.append(number))
    return signals


@pytest.fixture
def retraining(shared: Path, tmp_path: Path) -> Iterator[Computes]:
    process = Computes(shared, tmp_path)
    yield process
    process.kill()


def _on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the test on an event loop of its own."""

    @wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run


async def _paused(process: Process, pausing: Pausing) -> None:
    """Wait until it is paused. Requests come and go, because a single pause may pass unseen."""
    async with asyncio.timeout(LONG_S):
        while not process.stopped:
            with pausing.answering():
                await asyncio.sleep(0.001)
                if process.stopped:
                    return


@_on_a_loop
async def test_what_computes_is_paused_while_a_request_is_answered(
    shared: Path, retraining: Computes
) -> None:
    retraining.begin()
    pausing = Pausing(shared, cores=2)
    for _ in range(3):
        with pausing.answering():
            await _paused(retraining, pausing)
        await in_the_end(lambda: not retraining.stopped)
    retraining.end()


@_on_a_loop
async def test_what_does_not_compute_is_not_paused(
    shared: Path, retraining: Computes, sent: list[signal.Signals]
) -> None:
    retraining.begin()
    retraining.end()
    with Pausing(shared, cores=2).answering():
        assert signal.SIGSTOP not in sent


@_on_a_loop
async def test_a_pause_ends_though_the_request_does_not(shared: Path, retraining: Computes) -> None:
    retraining.begin()
    pausing = Pausing(shared, cores=2)
    with pausing.answering():
        await _paused(retraining, pausing)
        await in_the_end(lambda: not retraining.stopped)
        retraining.end()


@_on_a_loop
async def test_under_a_load_without_gaps_it_still_computes(shared: Path, retraining: Computes) -> None:
    """There is always a request, and it ends what it computes nevertheless."""
    retraining.begin()
    pausing = Pausing(shared, cores=2)
    ended = asyncio.create_task(asyncio.to_thread(retraining.end))
    with pausing.answering():
        while not ended.done():
            with pausing.answering():
                await asyncio.sleep(0.005)
    await ended


@pytest.mark.parametrize(
    ("busy_s", "gap_s", "least", "most"),
    [
        (0.005, 0.0, 0.08, 0.12),
        (0.005, 0.0003, 0.08, 0.18),
        (0.005, 0.015, 0.74, 0.76),
        (0.005, 1.0, 0.99, 1.0),
    ],
)
@_on_a_loop
async def test_it_always_gets_a_share_and_more_is_left_to_requests(
    shared: Path,
    retraining: Computes,
    sent: list[signal.Signals],
    monkeypatch: pytest.MonkeyPatch,
    busy_s: float,
    gap_s: float,
    least: float,
    most: float,
) -> None:
    """Requests one after the other, with gaps; the clock is the test's."""
    retraining.begin()
    pausing, clock = Pausing(shared, cores=2), Clock(100.0)
    monkeypatch.setattr("services.pausing.time", SimpleNamespace(monotonic=clock))
    began_s, paused_s, runs_s = clock.now_s, clock.now_s, 0.0

    def passes(seconds: float) -> None:
        nonlocal paused_s, runs_s
        if sent and sent[-1] == signal.SIGSTOP:
            assert clock.now_s + seconds - paused_s < 0.22, "the longest pause"
        else:
            runs_s += seconds
            paused_s = clock.now_s + seconds
        clock.now_s += seconds

    while clock.now_s - began_s < 20.0:
        with pausing.answering():
            passes(busy_s)
        passes(gap_s)
    assert least <= runs_s / (clock.now_s - began_s) <= most
    retraining.end()


@_on_a_loop
async def test_where_requests_leave_most_cores_free_nothing_is_paused(
    shared: Path, retraining: Computes, sent: list[signal.Signals]
) -> None:
    retraining.begin()
    pausing = Pausing(shared, cores=5)
    with ExitStack() as requests:
        for _ in range(9):
            requests.enter_context(pausing.answering(Takes(1, most=2)))
        assert signal.SIGSTOP not in sent, "however many wait, they take two cores"
        with pausing.answering(Takes(2, most=2)):  # of another engine, on the same two cores
            assert signal.SIGSTOP not in sent
    with pausing.answering(Takes(3, most=3)):
        assert sent[-1] == signal.SIGSTOP
    retraining.end()


@_on_a_loop
async def test_requests_of_all_processes_count(shared: Path, retraining: Computes) -> None:
    """The requests of one process end, those of another do not: the pause goes on."""
    retraining.begin()
    pausing = Pausing(shared, cores=2)
    other = Process(_ANSWERS, shared)
    try:
        assert other.hear() == "answering"
        async with asyncio.timeout(LONG_S):
            stays = False
            while not stays:  # a busy machine may wait for longer than a pause
                await _paused(retraining, pausing)
                stays = retraining.stopped
        other.tell("enough")
        await in_the_end(lambda: not retraining.stopped)
    finally:
        other.kill()
    retraining.end()


@_on_a_loop
async def test_an_inference_process_that_is_killed_during_a_pause_leaves_nothing_paused(
    shared: Path, retraining: Computes
) -> None:
    retraining.begin()
    killed = Process(_ANSWERS, shared)
    assert killed.hear() == "answering"
    await in_the_end(lambda: retraining.stopped)
    killed.kill()
    Pausing(shared, cores=2)  # the process that takes its place
    await in_the_end(lambda: not retraining.stopped)
    retraining.end()


@_on_a_loop
async def test_what_another_process_paused_that_was_killed_runs_on_after_the_next_request(
    shared: Path, retraining: Computes
) -> None:
    retraining.begin()
    pausing, killed = Pausing(shared, cores=9), Process(_ANSWERS, shared)
    assert killed.hear() == "answering"
    await in_the_end(lambda: retraining.stopped)
    killed.kill()
    with pausing.answering():
        pass
    await in_the_end(lambda: not retraining.stopped)
    retraining.end()


@_on_a_loop
async def test_what_stopped_computing_in_a_pause_runs_on(
    shared: Path, retraining: Computes, sent: list[signal.Signals]
) -> None:
    """It may say so just before the signal arrives."""
    retraining.begin()
    pausing = Pausing(shared, cores=2)
    with pausing.answering():
        assert sent[-1] == signal.SIGSTOP
        retraining.end()
        with pausing.answering():
            assert sent[-1] == signal.SIGCONT
    with pausing.answering():
        assert sent[-1] == signal.SIGCONT


def test_where_no_memory_can_be_shared_nothing_is_paused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    with caplog.at_level("INFO", logger="gati.pausing"), shared_memory() as path:
        assert path is None
    assert len(caplog.records) == 1


@_on_a_loop
async def test_requests_of_a_process_that_was_killed_are_forgotten(
    shared: Path, retraining: Computes
) -> None:
    retraining.begin()
    first, killed = Process(_ANSWERS, shared), Process(_ANSWERS, shared)  # two places
    assert [first.hear(), killed.hear()] == ["answering", "answering"]
    first.kill()
    killed.kill()
    pausing = Pausing(shared, cores=2)
    with pausing.answering():
        await _paused(retraining, pausing)
    await in_the_end(lambda: not retraining.stopped)
    for _ in range(3):
        with pausing.answering():
            pass
        assert sum(pausing._shared.memory[64:]) == 0  # type: ignore[union-attr]
    retraining.end()


@_on_a_loop
async def test_a_process_that_has_the_number_of_a_dead_one_is_left_alone(
    shared: Path, retraining: Computes, sent: list[signal.Signals]
) -> None:
    retraining.begin()
    retraining.kill()
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    memory = os.open(shared, os.O_RDWR)
    os.pwrite(memory, stranger.pid.to_bytes(8, "little"), 0)
    try:
        with Pausing(shared, cores=2).answering():
            assert not sent
    finally:
        os.close(memory)
        stranger.kill()
        stranger.wait()
        stranger.stdin.close()  # type: ignore[union-attr]


def test_a_process_whose_parent_is_killed_during_a_pause_runs_on(tmp_path: Path) -> None:
    """It sees that its parent is gone only if it runs, and would stay in memory for ever."""
    parent = Process(_PARENT, tmp_path / "enough")
    child = int(parent.hear())
    os.kill(child, signal.SIGSTOP)
    until(lambda: _state(child) == "T")
    parent.kill()
    try:
        until(lambda: _state(child) != "T")
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@_on_a_loop
async def test_a_retraining_that_was_killed_makes_room_for_its_successor(
    shared: Path, retraining: Computes, tmp_path: Path
) -> None:
    retraining.begin()
    pausing = Pausing(shared, cores=2)
    with pausing.answering():
        await _paused(retraining, pausing)
        retraining.kill()
    successor = Computes(shared, tmp_path)
    try:
        successor.begin()
        with pausing.answering():
            await _paused(successor, pausing)
        await in_the_end(lambda: not successor.stopped)
        successor.end()
    finally:
        successor.kill()


@_on_a_loop
async def test_without_shared_memory_requests_are_answered_as_ever() -> None:
    with Pausable(None).computing(), Pausing(None, cores=1).answering():
        assert os.getpid()


@_on_a_loop
async def test_a_sandbox_that_forbids_signals_is_told_once(
    shared: Path, retraining: Computes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError("Operation not permitted")

    retraining.begin()
    pausing = Pausing(shared, cores=2)
    monkeypatch.setattr(signal, "pidfd_send_signal", forbidden)
    with caplog.at_level("INFO", logger="gati.pausing"):
        for _ in range(3):
            with pausing.answering():
                assert not retraining.stopped
    assert len(caplog.records) == 1
    assert not any(shared.read_bytes()[64:]), "its requests would count for ever in other processes"
    retraining.end()


@_on_a_loop
async def test_memory_that_is_gone_keeps_nothing_from_being_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with shared_memory() as path:
        gone = path
    caplog.set_level("INFO", logger="gati.pausing")
    with Pausable(gone).computing(), Pausing(gone, cores=1).answering():
        assert len(caplog.records) == 2
