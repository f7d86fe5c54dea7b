"""An inference service without an engine, on a socket in this process, for tests of its callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from gati.errors import CompositionError, NotFoundError, OverloadError
from services.config import ServeConfig
from services.scheduler.app import create_app
from services.scheduler.front import Front
from services.scheduler.models import Model
from services.scheduler.pipelines import ServedPipeline
from services.scheduler.scheduler import Scheduler
from services.wire.codec import Service
from services.wire.gen import Inference
from services.wire.gen.ttypes import (
    Answer,
    Health,
    Histogram,
    InferResponse,
    ModelInfo,
    Statistics,
    VersionInfo,
)
from services.wire.server import WireServer
from tests.waiting import LONG_S

__all__ = ["CALLS", "SERVICE", "Engine", "reply_of", "served"]

SERVICE = Service(Inference)
CALLS = ("infer", "health", "describe", "statistics", "cancel", "load", "activate", "unload")


class Engine:
    """A service whose answers a test can hold back."""

    def __init__(self) -> None:
        self.answers, self.healthy, self.loads = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for event in (self.answers, self.healthy, self.loads):
            event.set()
        self.state = "serving"
        self.begun = self.at_work = 0
        self.places = 1000
        self.versions, self.active = ["first"], "first"
        self.calls: list[str] = []
        self.refused = ""
        self.tells_sources = True
        self._sources: dict[str, Any] = {}

    async def infer(self, request: Any) -> Any:
        if self.at_work >= self.places:
            raise OverloadError("the queue is full", retry_after_s=0.1)
        self.begun += 1
        self.at_work += 1
        try:
            await self.answers.wait()
        finally:
            self.at_work -= 1
        if request.version not in (None, *self.versions):
            raise NotFoundError(f"no version '{request.version}'")
        answering = request.version or (self.active if self.active in self.versions else "first")
        return InferResponse([Answer(1, b"\0" * 8, "base")], answering, 0.0, 0.0)

    async def health(self) -> Any:
        await self.healthy.wait()
        return Health(self.state == "serving", False, self.state)

    async def describe(self) -> Any:
        active = self.active if self.active in self.versions else "first"
        versions = [
            VersionInfo(
                name,
                name == active,
                "torch",
                exits=["base"],
                memory_bytes=0,
                source=self._sources.get(name) if self.tells_sources else None,
            )
            for name in self.versions
        ]
        return ModelInfo("m", [1], 2, None, [1, 1, 1], 1, versions)

    async def statistics(self) -> Any:
        await self.healthy.wait()
        nothing = Histogram([], [0], 0.0)
        versions = (await self.describe()).versions
        return Statistics(0, {}, [], nothing, nothing, 0, 0, 0.0, 0, 0, 0, False, versions)

    async def load(self, source: Any) -> Any:
        self.calls.append(f"load {source.version} {source.composition}")
        if source.version == self.refused:
            raise CompositionError("it has gone")
        await self.loads.wait()
        self._sources[source.version] = source
        self.versions = [*(name for name in self.versions if name != source.version), source.version]
        return VersionInfo(source.version, False, "torch", exits=["base"], memory_bytes=0)

    async def activate(self, version: str) -> None:
        self.active = version

    async def unload(self, version: str) -> None:
        self.versions = [name for name in self.versions if name != version]

    async def cancel(self, request_id: str) -> None:
        raise AssertionError("nobody cancels")

    def handlers(self) -> dict[str, Any]:
        """What it answers, by call."""
        return {name: getattr(self, name) for name in CALLS}


@contextmanager
def served(service: Any = None) -> Iterator[str]:
    """The address of a service, by default of an `Engine` that answers at once, in a thread of its own."""
    answering = Engine() if service is None else service
    started = threading.Event()
    told: list[Any] = []

    async def serve() -> None:
        handlers = {name: getattr(answering, name) for name in CALLS}
        server, ended = WireServer(SERVICE, handlers), asyncio.Event()
        if service is not None:
            await service.start()
        port = await server.start("127.0.0.1", 0)
        told.extend((f"127.0.0.1:{port}", asyncio.get_running_loop(), ended))
        started.set()
        await ended.wait()
        if service is not None:
            await service.drain()
        await server.drain(0.0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait()
    address, loop, ended = told
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()


def reply_of(
    name: str,
    address: str,
    method: str,
    path: str,
    pipelines: Callable[[Model], dict[str, ServedPipeline]] = lambda model: {},
    config: ServeConfig | None = None,
    **request: Any,
) -> httpx.Response:
    """What a scheduler in this process replies, with the model `name` at `address`."""

    async def main() -> httpx.Response:
        model = Model(name, address=address)
        scheduler = Scheduler(config or ServeConfig(), {name: model}, pipelines(model))
        await scheduler.start()
        await model.wait_until_ready(LONG_S)
        transport = httpx.ASGITransport(Front(create_app(scheduler)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            reply = await client.request(method, path, **request)
        await scheduler.drain()
        return reply

    return asyncio.run(main())
