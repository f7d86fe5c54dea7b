"""Keeps a service's process running: starts it, hears where it listens, restarts it when it dies.

A process that dies is started again after a pause that doubles with every death in a row. What it last said
on stderr is kept: "the worker died" without a cause helps nobody.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from gati.errors import UnavailableError

__all__ = ["Supervised"]

_log = logging.getLogger("gati.supervisor")

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
_HEALTHY_S = 30.0  # who lived so long begins with the first pause again
_LAST_WORDS = 3  # lines of stderr that a cause quotes
_ADDRESS_TIMEOUT_S = 60.0
_PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent)


class Supervised:
    """The process of one service, a package that `python -m` runs with its settings as JSON.

    `start` it once; `address` waits until it takes calls.
    """

    def __init__(self, name: str, package: str, settings: BaseModel) -> None:
        self._name = name
        self._package = package
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._address: asyncio.Future[str] | None = None
        self._words: deque[str] = deque(maxlen=50)
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.restarts = 0
        self.cause = "it has not been started"

    @property
    def running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None and self._process.returncode is None

    def start(self) -> None:
        """Start the process, and keep it running until `stop`."""
        self._stopping = False
        self.cause = "it is being started"
        self._address = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep_running())

    async def address(self) -> str:
        """HOST:PORT of the process, as soon as it listens. Raises `UnavailableError`."""
        try:
            async with asyncio.timeout(_ADDRESS_TIMEOUT_S):
                while self._address is None:
                    await asyncio.sleep(_FIRST_PAUSE_S)
                return await asyncio.shield(self._address)
        except TimeoutError:
            raise UnavailableError(self.cause, retry_after_s=1.0) from None

    async def stop(self, timeout_s: float) -> None:
        """Let the process drain for so long, then end it."""
        self._stopping = True
        self.cause = "it was unloaded"
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(timeout_s):
                    await process.wait()
            except TimeoutError:
                _log.warning("killed: it did not drain in time", extra={"child": self._name})
                process.kill()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    # ----------------------------------------------------------------------------------------------------

    async def _keep_running(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stopping:
            began_s = time.monotonic()
            status = await self._run()
            if self._stopping:
                return
            if time.monotonic() - began_s > _HEALTHY_S:
                pause_s = _FIRST_PAUSE_S
            self.restarts += 1
            self.cause = self._obituary(status)
            _log.error(
                "process died", extra={"child": self._name, "cause": self.cause}
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        if self._address is None or self._address.done():
            self._address = loop.create_future()
        environment = dict(os.environ)
        # -P keeps the working directory, which may have a `services` of its own, off the path.
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (environment.get("PYTHONPATH"), _PACKAGE_PARENT))
        )
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", self._package, self._settings.model_dump_json()),
            stdin=asyncio.subprocess.PIPE,  # its end tells the process that we are gone
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
        readers = [
            asyncio.create_task(self._read_address(process)),
            asyncio.create_task(self._read_words(process)),
        ]
        try:
            return await process.wait()
        finally:
            await asyncio.wait(readers, timeout=1.0)
            if self._address.done():
                self._address = loop.create_future()

    async def _read_address(self, process: asyncio.subprocess.Process) -> None:
        if process.stdout is None:
            raise AssertionError("stdout is a pipe")
        while line := await process.stdout.readline():
            with suppress(ValueError, KeyError, TypeError):
                address = json.loads(line)["listening"]
                if self._address is not None and not self._address.done():
                    self._address.set_result(address)

    async def _read_words(self, process: asyncio.subprocess.Process) -> None:
        if process.stderr is None:
            raise AssertionError("stderr is a pipe")
        while line := await _line(process.stderr):
            text = line.decode("utf-8", "replace")
            sys.stderr.write(text)
            if text.strip():
                self._words.append(text.strip())

    def _obituary(self, status: int) -> str:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        words = [word for word in self._words if not word.startswith("{")][-_LAST_WORDS:]
        return f"its process {how}" + (f"; it last said: {' / '.join(words)}" if words else "")


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line, or as much of a very long one as fits."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await reader.readexactly(error.consumed)
