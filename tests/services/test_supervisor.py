"""The supervisor, with real scripted processes; and a model in front of one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import types
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from gati.errors import ConfigError, UnavailableError
from services import supervisor as module
from services import whereabouts
from services.process import ProcessSettings
from services.supervisor import Supervised
from tests.waiting import LONG_S, in_the_end


class ChildSettings(ProcessSettings):
    deed: Literal["serves", "wrong", "dies", "floods", "deaf"] = "serves"
    diary: Path
    secret: str = "postgresql://me:password@host/records"


class Kept:
    """A supervised child, and what it wrote into its diary."""

    def __init__(self, folder: Path, deed: Any = "serves", *, spare: bool = False) -> None:
        self._diary = folder / "diary"
        self._diary.touch()
        settings = ChildSettings(deed=deed, diary=self._diary)
        self.child = Supervised("child", "tests.services.child", settings, spare=spare)

    @property
    def lines(self) -> list[str]:
        return self._diary.read_text(encoding="utf-8").splitlines()

    @property
    def pids(self) -> list[int]:
        return [int(line.split()[0]) for line in self.lines if line[0].isdigit()]

    @property
    def alive(self) -> list[int]:
        return [pid for pid in self.pids if _exists(pid)]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.01)


def test_a_process_that_dies_comes_back_with_a_cause(tmp_path: Path) -> None:
    async def test() -> None:
        kept = Kept(tmp_path)
        kept.child.start()
        first = await kept.child.address()
        os.kill(kept.pids[0], signal.SIGKILL)
        await in_the_end(lambda: len(kept.pids) == 2)
        assert await kept.child.address() != first and kept.child.restarts == 1
        assert kept.child.cause.startswith("its process was killed by signal 9 (Killed; ")
        await kept.child.stop(LONG_S)
        assert not kept.alive and kept.child.cause == "it was unloaded"
        assert not Path(first.removeprefix("unix:")).parent.exists()

    run(test)


def test_a_process_is_started_again_where_the_working_folder_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of an old release. Libraries did not load there, so a model that died never came back."""
    (tmp_path / "release").mkdir()
    monkeypatch.chdir(tmp_path / "release")

    async def test() -> None:
        kept = Kept(tmp_path)
        kept.child.start()
        await kept.child.address()
        (tmp_path / "release").rmdir()
        os.kill(kept.pids[0], signal.SIGKILL)
        await in_the_end(lambda: len(kept.pids) == 2)
        folder = os.readlink(f"/proc/{kept.pids[-1]}/cwd")
        await kept.child.stop(LONG_S)
        assert folder == os.sep

    run(test)


def test_a_spare_process_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SPARE_AFTER_S", 0.0)

    async def test() -> None:
        kept = Kept(tmp_path, spare=True)
        kept.child.start()
        for number in range(2):
            await kept.child.address()
            await in_the_end(lambda: kept.child.has_spare)
            assert len(kept.pids) == number + 1  # it has not been told anything
            os.kill(kept.pids[-1], signal.SIGKILL)
            await in_the_end(lambda number=number: len(kept.pids) == number + 2)  # type: ignore[misc]
        names = [line for line in kept.lines if line[0].isdigit()]
        assert ["child(spare)" in line for line in names] == [False, True, True]
        await kept.child.address()
        await in_the_end(lambda: kept.child.has_spare)
        await kept.child.stop(LONG_S)
        assert not kept.alive and not kept.child.has_spare

    run(test)


def test_settings_and_keys_are_nobody_elses_business(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATI_SERVE_API_KEY", "one")

    async def test() -> None:
        kept = Kept(tmp_path)
        kept.child.start()
        address = await kept.child.address()
        folder = Path(address.removeprefix("unix:")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        command = Path(f"/proc/{kept.pids[0]}/cmdline").read_bytes()
        assert b"password" not in command and b"child" in command
        assert not any(line.startswith("environment") for line in kept.lines)
        await kept.child.stop(LONG_S)

    run(test)


def test_a_signal_for_all_of_a_terminal_is_for_us_alone(tmp_path: Path) -> None:
    """Children drained first, and were restarted while we drained."""

    async def test() -> None:
        kept = Kept(tmp_path)
        kept.child.start()
        await kept.child.address()
        assert kept.lines[0].endswith("True")  # it leads a session of its own
        for each in (signal.SIGINT, signal.SIGTERM):
            os.kill(kept.pids[0], each)  # as systemd does to all processes of a service
        other = Kept(tmp_path / "..")
        other.child.start()  # what it would have done on a signal it has done by the time this one is there
        await other.child.address()
        assert kept.child.running
        kept.child.retire()
        os.kill(kept.pids[0], signal.SIGKILL)
        await in_the_end(lambda: not kept.child.running)
        await other.child.stop(LONG_S)
        assert len(kept.pids) == 1
        await kept.child.stop(LONG_S)

    (tmp_path / "one").mkdir()
    run(test)


@pytest.mark.parametrize("error", [BlockingIOError(11, "no process now"), ValueError("embedded null byte")])
def test_what_fails_once_at_starting_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """One EAGAIN ended the supervision without a word."""
    original, failures = asyncio.create_subprocess_exec, [error, error]

    async def failing(*arguments: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return await original(*arguments, **named)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", failing)

    async def test() -> None:
        kept = Kept(tmp_path)
        kept.child.start()
        await kept.child.address()
        assert kept.child.restarts == 2 and "cannot be started" in kept.child.cause
        await kept.child.stop(LONG_S)

    run(test)


class Interrupting:
    """Makes the tasks of an event loop; those of some coroutines are interrupted, once, at one await."""

    def __init__(self, at: int, *names: str) -> None:
        self.at, self.names, self.seen = at, names, 0

    def __call__(self, loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        if coroutine.__qualname__.removeprefix("Supervised.") in self.names:
            coroutine = self._interrupted(coroutine)
        return asyncio.Task(coroutine, loop=loop, **options)

    @types.coroutine
    def _interrupted(self, coroutine: Any) -> Any:
        go, given = coroutine.send, None
        while True:
            try:
                awaited = go(given)
            except StopIteration as end:
                return end.value
            self.seen += 1
            if self.seen == self.at:
                go, given = coroutine.throw, OSError(5, "at an await")
                continue
            try:
                go, given = coroutine.send, (yield awaited)
            except BaseException as error:
                go, given = coroutine.throw, error


async def kept_through(kept: Kept, interrupting: Interrupting) -> None:
    """Start a process, see it replaced when it is killed, and end it."""
    asyncio.get_running_loop().set_task_factory(interrupting)
    kept.child.start()
    await kept.child.address()
    before = kept.pids
    for pid in before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await in_the_end(lambda: len(kept.pids) > len(before))
    await kept.child.address()
    await kept.child.stop(LONG_S)
    assert not kept.alive


@pytest.mark.slow
@pytest.mark.parametrize("names", [("_keep_running",), ("_read_address", "_read_words")])
def test_an_exception_at_any_await_ends_no_supervision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    interrupting = Interrupting(0, *names)
    run(lambda: kept_through(Kept(tmp_path), interrupting))
    assert interrupting.seen > 2
    for at in range(1, interrupting.seen + 1):
        (tmp_path / "diary").unlink()
        run(lambda at=at: kept_through(Kept(tmp_path), Interrupting(at, *names)))  # type: ignore[misc]
        assert not [each for each in tmp_path.iterdir() if each.name.startswith("gati-")], at


def test_output_without_lines_stops_nobody(tmp_path: Path) -> None:
    async def test() -> None:
        kept = Kept(tmp_path, "floods")
        kept.child.start()
        assert (await kept.child.address()).startswith("unix:")
        await kept.child.stop(LONG_S)
        assert not kept.alive

    run(test)


def test_what_a_restart_cannot_mend_is_not_tried_again(tmp_path: Path) -> None:
    async def test() -> None:
        kept = Kept(tmp_path, "wrong")
        kept.child.start()
        with pytest.raises(ConfigError, match="^nobody can mend this by a restart$"):
            await kept.child.address()
        assert kept.child.hopeless == kept.child.cause and kept.child.restarts == 0
        await kept.child.stop(LONG_S)
        assert len(kept.pids) == 1
        kept.child.start()  # told to, it tries again
        with pytest.raises(ConfigError):
            await kept.child.address()
        assert len(kept.pids) == 2
        served = Kept(tmp_path / "..", "wrong")
        served.child.start()
        served.child.served = True  # it has been right before: the library may come back
        await in_the_end(lambda: served.child.restarts >= 2)
        await served.child.stop(LONG_S)

    run(test)


def test_a_path_that_is_too_long_for_a_socket_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gati serve` tried for ever, with a traceback each time, and never said what to do."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    async def test() -> None:
        kept = Kept(tmp_path)
        kept.child.start()
        with pytest.raises(ConfigError, match="are too long; set TMPDIR to a shorter path$"):
            await kept.child.address()
        assert kept.child.hopeless is not None and kept.child.restarts == 0
        await kept.child.stop(LONG_S)
        assert kept.pids == [] and not kept.child.running

    run(test)


def test_dying_again_and_again_is_told_with_its_last_words(tmp_path: Path) -> None:
    async def test() -> None:
        kept = Kept(tmp_path, "dies")
        kept.child.start()
        await in_the_end(lambda: kept.child.restarts >= 2)
        assert kept.child.cause == "its process ended with status 3; it last said: it hurts"
        await kept.child.stop(LONG_S)
        assert not kept.alive

    run(test)


def test_a_process_that_does_not_drain_is_killed(tmp_path: Path) -> None:
    async def test() -> None:
        kept = Kept(tmp_path, "deaf")
        kept.child.start()
        await kept.child.address()
        await kept.child.stop(0.01)
        assert not kept.alive

    run(test)


def test_starting_and_stopping_at_once_leaves_one_process_or_none(tmp_path: Path) -> None:
    """Stopped while it was being spawned, a child was left behind; two starts made two."""

    async def test() -> None:
        kept = Kept(tmp_path)
        kept.child.start()
        kept.child.start()
        await asyncio.sleep(0)
        await kept.child.stop(LONG_S)
        kept.child.start()
        await kept.child.address()
        stopping = [asyncio.create_task(kept.child.stop(LONG_S)) for _ in range(3)]
        stopping[0].cancel()
        await asyncio.wait(stopping)
        assert not kept.alive and len(kept.pids) <= 2
        with pytest.raises(UnavailableError):
            whereabouts._TIMEOUT_S, before = 0.0, whereabouts._TIMEOUT_S
            try:
                await kept.child.address()
            finally:
                whereabouts._TIMEOUT_S = before

    run(test)
