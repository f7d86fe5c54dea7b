"""Requests pause the adaptation process while it computes: real processes, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from services.pausing import Pausable, Pausing, can_pause, make_shared

pytestmark = pytest.mark.skipif(not can_pause(), reason="pausing another process needs Linux 5.3 or newer")

_COMPUTES = """
import sys
from pathlib import Path
from services.pausing import Pausable

pausable = Pausable(Path(sys.argv[1]))
for line in sys.stdin:
    if line.strip() == "compute":
        with pausable.computing():
            print("computing", flush=True)
            while not Path(sys.argv[2]).exists():
                pass
    print("idle", flush=True)
"""
_ANSWERS = """
import asyncio, sys
from pathlib import Path
from services.pausing import Pausing

async def answer():
    with Pausing(Path(sys.argv[1]), 2):
        print("answering", flush=True)
        sys.stdin.readline()

asyncio.run(answer())
"""


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
        state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "T"

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
def shared(tmp_path: Path) -> Path:
    return make_shared(tmp_path)


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
    async with asyncio.timeout(60):
        while not process.stopped:
            with pausing:
                await asyncio.sleep(0.001)
                if process.stopped:
                    return


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@_on_a_loop
async def test_what_computes_is_paused_while_a_request_is_answered(
    shared: Path, retraining: Computes
) -> None:
    retraining.begin()
    pausing = Pausing(shared, cores=2)
    for _ in range(3):
        with pausing:
            await _paused(retraining, pausing)
        await _until(lambda: not retraining.stopped)
    retraining.end()


@_on_a_loop
async def test_what_does_not_compute_is_not_paused(shared: Path, retraining: Computes) -> None:
    retraining.begin()
    retraining.end()
    with Pausing(shared, cores=2):
        assert not retraining.stopped


@_on_a_loop
async def test_a_pause_ends_though_the_request_does_not(shared: Path, retraining: Computes) -> None:
    retraining.begin()
    pausing = Pausing(shared, cores=2)
    with pausing:
        await _paused(retraining, pausing)
        await _until(lambda: not retraining.stopped)
        retraining.end()


@_on_a_loop
async def test_under_a_load_without_gaps_it_still_computes(shared: Path, retraining: Computes) -> None:
    """There is always a request, and it ends what it computes nevertheless."""
    retraining.begin()
    pausing = Pausing(shared, cores=2)
    ended = asyncio.create_task(asyncio.to_thread(retraining.end))
    with pausing:
        while not ended.done():
            with pausing:
                await asyncio.sleep(0.005)
    await ended


@_on_a_loop
async def test_where_requests_leave_most_cores_free_nothing_is_paused(
    shared: Path, retraining: Computes
) -> None:
    retraining.begin()
    pausing = Pausing(shared, cores=5)
    with pausing, pausing:
        assert not retraining.stopped
        await _paused(retraining, pausing)
    await _until(lambda: not retraining.stopped)
    retraining.end()


@_on_a_loop
async def test_requests_of_all_processes_count(shared: Path, retraining: Computes) -> None:
    """The requests of one process end, those of another do not: the pause goes on."""
    retraining.begin()
    other = Process(_ANSWERS, shared)
    try:
        assert other.hear() == "answering"
        pausing = Pausing(shared, cores=2)
        async with asyncio.timeout(60):
            stays = False
            while not stays:  # a busy machine may wait for longer than a pause
                await _paused(retraining, pausing)
                stays = retraining.stopped
        other.tell("enough")
        await _until(lambda: not retraining.stopped)
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
    killed.kill()
    Pausing(shared, cores=2)  # the process that takes its place
    await _until(lambda: not retraining.stopped)
    retraining.end()


@_on_a_loop
async def test_a_process_that_has_the_number_of_a_dead_one_is_left_alone(
    shared: Path, retraining: Computes, tmp_path: Path
) -> None:
    retraining.begin()
    dead = shared.read_bytes()
    retraining.kill()
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    number = stranger.pid.to_bytes(8, "little")
    shared.write_bytes(number + dead[8:])
    try:
        with Pausing(shared, cores=2):
            state = Path(f"/proc/{stranger.pid}/stat").read_text().rpartition(")")[2].split()[0]
            assert state != "T"
    finally:
        stranger.kill()
        stranger.wait()
        stranger.stdin.close()  # type: ignore[union-attr]


@_on_a_loop
async def test_a_retraining_that_was_killed_makes_room_for_its_successor(
    shared: Path, retraining: Computes, tmp_path: Path
) -> None:
    retraining.begin()
    pausing = Pausing(shared, cores=2)
    with pausing:
        await _paused(retraining, pausing)
        retraining.kill()
    successor = Computes(shared, tmp_path)
    try:
        successor.begin()
        with pausing:
            await _paused(successor, pausing)
        await _until(lambda: not successor.stopped)
        successor.end()
    finally:
        successor.kill()


@_on_a_loop
async def test_without_a_shared_file_requests_are_answered_as_ever() -> None:
    with Pausable(None).computing(), Pausing(None, cores=1):
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
            with pausing:
                assert not retraining.stopped
    assert len(caplog.records) == 1
    retraining.end()
