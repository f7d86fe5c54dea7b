"""`gati serve` in a thread of the test's own process, with the services of its models."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvloop

from services.config import read_config
from services.inference.service import InferenceService
from services.inference.settings import InferenceSettings
from services.scheduler.app import create_app
from services.scheduler.front import Front
from services.scratch import Scratch
from services.serve import build_scheduler
from services.web import answering, listen, url_of, web_server
from services.wire.client import UNIX
from services.wire.server import WireServer
from tests.services.engines import CALLS, SERVICE
from tests.services.running import Asked
from tests.waiting import LONG_S

__all__ = ["Inside"]


class Inside(Asked):
    """A server like `Serving` that starts in a moment.

    It has no processes that can be killed, and starts no adaptation.
    """

    def __init__(self, target: Path, environment: dict[str, str] | None = None) -> None:
        self.said: list[str] = []
        self.url = ""
        self._target, self._environment = target, environment or {}
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._failed: BaseException | None = None
        self._end: Callable[[], object] = lambda: None

    def __enter__(self) -> Self:
        self._log = _Lines(self.said)
        root = logging.getLogger()
        root.addHandler(self._log)
        root.setLevel(logging.INFO)
        self._thread.start()
        assert self._started.wait(LONG_S), self.said[-20:]
        if self._failed is not None:
            raise self._failed
        return self.connect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        with suppress(RuntimeError):  # it has failed, and its loop is closed
            self._end()
        self._thread.join(LONG_S)
        logging.getLogger().removeHandler(self._log)
        assert not self._thread.is_alive(), "it does not end"
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test's thread raises it
            self._failed = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        end = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._end = lambda: loop.call_soon_threadsafe(end.set)
        config = read_config(self._target, {"port": 0}, environment=self._environment).config
        listening = listen(config)
        scheduler = build_scheduler(config, _ThisProcess())
        await scheduler.start()
        server = web_server(config, Front(create_app(scheduler)))
        async with answering(server, listening, scheduler.drain):
            for model in scheduler.models.values():
                await model.wait_until_ready(LONG_S)
            self.url = url_of(config, listening)
            self._started.set()
            await end.wait()


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.getMessage()} {vars(record)}")


class _ThisProcess:
    """A `services.hosted.Hosting` whose services run in the event loop of the scheduler."""

    secret: bytes | None = None
    pausing: Path | None = None

    def threads(self, replicas: int) -> int:
        return 1

    def host(self, settings: InferenceSettings) -> Any:
        return _Service(settings)


class _Service:
    """A `services.hosted.Hosted` that is a service in the running event loop."""

    restarts = 0
    cause = "it was unloaded"
    served = False

    def __init__(self, settings: InferenceSettings) -> None:
        self._settings = settings
        self._scratch: Scratch | None = None
        self._running: asyncio.Task[str] | None = None
        self._parts: tuple[InferenceService, WireServer] | None = None

    @property
    def running(self) -> bool:
        return self._running is not None

    @property
    def hopeless(self) -> str | None:
        task = self._running
        return str(task.exception()) if task is not None and task.done() and task.exception() else None

    def start(self) -> None:
        self._running = asyncio.create_task(self._start())

    async def _start(self) -> str:
        service = InferenceService(self._settings)
        await service.start()
        server = WireServer(SERVICE, {name: getattr(service, name) for name in CALLS})
        self._scratch = Scratch("socket")
        path = self._scratch.path / "s"
        await server.start_unix(path)
        self._parts = service, server
        return f"{UNIX}{path}"

    async def address(self) -> str:
        assert self._running is not None
        return await asyncio.shield(self._running)

    def kill(self, why: str) -> None:
        raise AssertionError(f"killed: {why}")

    def retire(self) -> None:
        pass

    async def stop(self, timeout_s: float) -> None:
        if self._parts is not None:
            service, server = self._parts
            await asyncio.gather(service.drain(), server.drain(timeout_s))
        self._running = self._parts = None
        if self._scratch is not None:
            self._scratch.close()
