"""Supervision of a service's process: starts it, learns its address, restarts it when it dies.

A process that dies is restarted after a pause that doubles with each consecutive death. Its last output on
stderr is kept, so that the error names a cause. A process that exits with status 2 before it has ever served
has invalid settings, which a restart does not fix.

The process reads its settings from stdin, which stays open. When stdin closes, on purpose or because this
process is gone, the child drains and exits, too. It runs in its own session, so that signals to a terminal's
process group reach only this process.

Most of the startup time is imports. A spare process has finished them and waits for its settings, so the
replacement of a dead process only has to load its model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from gati.errors import ConfigError, one_line
from services.again import Backoff
from services.logs import log_failure
from services.process import USAGE, ProcessSettings
from services.scratch import Scratch
from services.whereabouts import Whereabouts

_log = logging.getLogger("gati.supervisor")

_FIRST_PAUSE_S = 0.2
_SPARE_AFTER_S = 5.0  # after the process listens: until then, a starting spare would slow it down
_LONGEST_PAUSE_S = 30.0
_LAST_WORDS = 3  # lines of stderr that a cause quotes
_PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent)
_LONGEST_PATH = 100  # of a socket, in bytes; the system's limit is slightly higher
_OURS = "GATI_SERVE_"  # prefix of variables that children do not get, because they include keys


class Supervised:
    """The process of one service, a package that `python -m` runs.

    `address` waits until the process accepts calls. After `stop` it may be started again. It listens on a
    Unix socket or, if `for_this_machine` is False, where its settings say. With `spare` a second process
    waits to take over.
    """

    def __init__(
        self,
        name: str,
        package: str,
        settings: ProcessSettings,
        *,
        for_this_machine: bool = True,
        spare: bool = False,
    ) -> None:
        self._for_this_machine = for_this_machine
        self._wants_spare = spare
        self._spare: asyncio.subprocess.Process | None = None
        self._name = name
        self._package = package
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._where = Whereabouts(lambda: self.cause)
        self._words: deque[str] = deque(maxlen=50)
        self._task: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self._end_timeout_s = 0.0
        self._retired = False
        self._killed_for = ""
        self.served = False  # whether it has answered since `start`; set by its client
        self.restarts = 0
        self.cause = "it has not been started"
        self.hopeless: str | None = None  # the error that a restart cannot fix

    @property
    def running(self) -> bool:
        """Whether a process is running."""
        return self._process is not None and self._process.returncode is None

    @property
    def has_spare(self) -> bool:
        """Whether a spare process waits to take over."""
        return self._spare is not None and self._spare.returncode is None

    @property
    def listening(self) -> str | None:
        """The address of the process; None while it does not listen."""
        return self._where.known

    def start(self) -> None:
        """Start the process, and keep it running until `stop`. Does nothing if it is kept running already."""
        if self._task is not None and not self._task.done():
            return
        self._ending.clear()
        self._retired, self.served, self.hopeless = False, False, None
        self.cause = "it is being started"
        self._where.begin()
        self._task = asyncio.create_task(self._keep_running())

    async def address(self) -> str:
        """The address of the process, as soon as it listens. Raises `UnavailableError`, or `ConfigError`."""
        return await self._where.address()

    def kill(self, why: str) -> None:
        """Kill a process that hangs; another one is started."""
        if self._process is not None and self._process.returncode is None:
            self._killed_for = why
            with suppress(ProcessLookupError):
                self._process.kill()

    def retire(self) -> None:
        """Start no other process; the running one continues until `stop`."""
        self._retired = True

    async def stop(self, timeout_s: float) -> None:
        """Let the process drain for that long, then end it. The wait may be cancelled."""
        self._end_timeout_s = timeout_s
        self._ending.set()
        if self._task is not None:
            await asyncio.wait([self._task])
        self.cause = "it was unloaded"

    # ----------------------------------------------------------------------------------------------------

    async def _keep_running(self) -> None:
        try:
            await self._run_again_and_again()
        finally:
            if (spare := self._take_spare()) is not None:
                spare.kill()
                await spare.wait()

    async def _run_again_and_again(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        pause_s = 0.0
        while not self._ending.is_set():
            began_s = time.monotonic()
            try:
                if await self._ends_within(pause_s):
                    return
                began_s = time.monotonic()
                status = await self._run()
                self.cause = self._obituary(status)
            except ConfigError as error:
                status, self.cause = USAGE, str(error)
            except Exception as error:  # of any type: the next attempt may succeed
                status = 1
                self.cause = f"its process cannot be started: {one_line(error)}"
                log_failure(_log, "process not started", error, level=logging.ERROR, child=self._name)
            if self._ending.is_set():
                return
            died = {"child": self._name, "cause": self.cause}
            is_invalid = status == USAGE and not self.served
            if is_invalid or self._retired:
                _log.error("process died", extra=died)
                if is_invalid:
                    self._give_up()
                return
            self.restarts += 1
            pause_s = backoff.after_s(time.monotonic() - began_s)
            _log.error("process died", extra={**died, "restart_in_s": round(pause_s, 1)})

    async def _ends_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._ending.wait()
        return False

    async def _run(self) -> int:
        """Run one process from its start to its end, and return its status."""
        self._where.renew()
        self._killed_for = ""
        self._words.clear()
        scratch = Scratch("socket")
        ended: asyncio.Task[bool] | None = None
        preparing: asyncio.Task[None] | None = None
        exited: asyncio.Task[int] | None = None
        readers: list[asyncio.Task[None]] = []
        process = None
        try:
            told = self._told(scratch.path)
            process = self._process = self._take_spare() or await self._spawn(self._name)
            if process.stdin is None:
                raise AssertionError("stdin is a pipe")
            process.stdin.write(told)
            readers = [
                asyncio.create_task(self._read_address(process)),
                asyncio.create_task(self._read_words(process)),
            ]
            for each in readers:
                each.add_done_callback(self._check_reader)
            preparing = asyncio.create_task(self._prepare_spare())
            exited = asyncio.create_task(process.wait())
            ended = asyncio.create_task(self._ending.wait())
            await asyncio.wait((exited, ended), return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                await self._end(process, exited)
            return await exited
        finally:
            for task in (ended, preparing):
                if task is not None:
                    task.cancel()
            if process is not None and process.returncode is None:  # this task was cancelled
                process.kill()
            try:
                if pending := [task for task in (*readers, exited) if task is not None]:
                    await asyncio.wait(pending, timeout=1.0)
            finally:
                for each in readers:
                    each.cancel()
                scratch.close()
                self._where.renew()

    def _take_spare(self) -> asyncio.subprocess.Process | None:
        spare, self._spare = (self._spare if self.has_spare else None), None
        return spare

    async def _prepare_spare(self) -> None:
        """Start a spare process, some time after the serving one began to listen."""
        if not self._wants_spare:
            return
        await self._where.settled()
        await asyncio.sleep(_SPARE_AFTER_S)
        if not self.has_spare:
            self._spare = await self._spawn(f"{self._name}(spare)")

    async def _spawn(self, name: str) -> asyncio.subprocess.Process:
        """Start a process that waits for its settings; the name is shown by `ps`."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        # -P keeps the working directory, which may contain another `services`, off sys.path.
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (environment.get("PYTHONPATH"), _PACKAGE_PARENT))
        )
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            self._package,
            "-",
            name,
            stdin=asyncio.subprocess.PIPE,  # when it closes, the process knows that this one has ended
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            cwd=_working_folder(),
            start_new_session=True,
        )

    def _told(self, folder: Path) -> bytes:
        """The settings, as a process reads them. Raises `ConfigError` if its socket has too long a path."""
        socket = folder / "s"
        if len(os.fsencode(socket)) > _LONGEST_PATH:
            raise ConfigError(f"socket paths in {folder.parent} are too long; set TMPDIR to a shorter path")
        where = {"socket": socket} if self._for_this_machine else {}
        told = self._settings.model_copy(update={**where, "end_with_stdin": True})
        return told.model_dump_json().encode() + b"\n"

    async def _end(self, process: asyncio.subprocess.Process, exited: asyncio.Task[int]) -> None:
        """Let a process drain, and kill it if that takes too long."""
        if process.stdin is not None:
            process.stdin.close()
        with suppress(ProcessLookupError):
            process.terminate()  # for a process that does not watch its stdin yet
            process.send_signal(signal.SIGCONT)  # see `services.pausing`
        await asyncio.wait([exited], timeout=self._end_timeout_s)
        if not exited.done():
            _log.warning("killed: it did not drain in time", extra={"child": self._name})
            with suppress(ProcessLookupError):
                process.kill()
            await asyncio.wait([exited])

    def _give_up(self) -> None:
        said = [word for word in self._words if word.startswith("error: ")]
        self.hopeless = said[-1].removeprefix("error: ") if said else self.cause
        self.cause = self.hopeless
        self._where.give_up(self.hopeless)

    async def _read_address(self, process: asyncio.subprocess.Process) -> None:
        if process.stdout is None:
            raise AssertionError("stdout is a pipe")
        while line := await _line(process.stdout):
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                self._where.tell(str(json.loads(line)["listening"]))

    async def _read_words(self, process: asyncio.subprocess.Process) -> None:
        if process.stderr is None:
            raise AssertionError("stderr is a pipe")
        while line := await _line(process.stderr):
            text = line.decode("utf-8", "replace")
            with suppress(OSError, ValueError):  # disk full, or closed: the process must not block
                sys.stderr.write(text)
            if text.strip():
                self._words.append(text.strip())

    def _check_reader(self, reader: asyncio.Task[None]) -> None:
        """Kill a process whose output is no longer read: it would block forever."""
        if not reader.cancelled() and (error := reader.exception()) is not None:
            self.kill(f"its output cannot be read: {one_line(error)}")

    def _obituary(self, status: int) -> str:
        if self._killed_for:
            return f"its process was killed: {self._killed_for}"
        how = _killed_by(-status) if status < 0 else f"ended with status {status}"
        words = [word for word in self._words if not word.startswith("{")][-_LAST_WORDS:]
        return f"its process {how}" + (f"; it last said: {' / '.join(words)}" if words else "")


def _working_folder() -> str | None:
    """That of a new process: None for this process's own, the root if that was removed meanwhile.

    In a folder that was removed, oneMKL ends the process that loads it.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        return os.sep
    return None


def _killed_by(number: int) -> str:
    """How a process ended by a signal that this server did not send."""
    name = signal.strsignal(number) or "unknown"
    memory = "; the system kills processes if memory runs out" if number == signal.SIGKILL else ""
    return f"was killed by signal {number} ({name}{memory})"


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line, or the part of a very long one that fits the buffer."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await reader.readexactly(error.consumed)
