"""How servers end: what signals do, and in which order a server lets its clients go."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import Any

import pytest

from services.process import on_signals
from services.web import answering
from tests.test_architecture import MODULES, name_of


class FakeServer:
    """Tells what happens to it, in order."""

    should_exit = False

    def __init__(self) -> None:
        self.events: list[str] = []
        self.servers = [self]

    def close(self) -> None:
        self.events.append("closed to new connections")

    async def serve(self, sockets: list[socket.socket]) -> None:
        self.events.append("serves")
        while not self.should_exit:
            await asyncio.sleep(0)
        self.events.append("ended")


def served(server: Any, fails: bool = False) -> None:
    async def drain() -> None:
        server.events.append("drained")

    async def main() -> None:
        with socket.socket() as listening:
            async with answering(server, listening, drain) as running:
                await asyncio.sleep(0)
                assert not running.done()
                server.events.append("asked to end")
                if fails:
                    raise OSError("the terminal is gone")

    asyncio.run(main())


def test_a_server_drains_between_its_last_new_connection_and_its_end() -> None:
    server = FakeServer()
    served(server)
    assert server.events == ["serves", "asked to end", "closed to new connections", "drained", "ended"]


def test_an_error_of_the_block_is_raised_at_once() -> None:
    server = FakeServer()
    with pytest.raises(OSError, match="the terminal is gone"):
        served(server, fails=True)
    assert server.events == ["serves", "asked to end"]


def test_each_signal_is_a_call_in_the_event_loop() -> None:
    told: list[str] = []

    async def main() -> None:
        on_signals(lambda: told.append("end"), reload=lambda: told.append("reload"))
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), each)
            count = len(told)
            async with asyncio.timeout(10):
                while len(told) == count:
                    await asyncio.sleep(0.001)

    asyncio.run(main())
    assert told == ["end", "end", "reload"]


def test_signals_of_services_are_handled_in_one_place() -> None:
    handling = [name_of(path) for path in MODULES if "add_signal_handler" in path.read_text(encoding="utf-8")]
    assert handling == ["services.process"]
