"""`GET /v1/adaptation` says why the adaptation process does not answer, and shows the rest."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.scheduler import adapting
from services.wire.codec import Service
from services.wire.gen import Adaptation
from services.wire.server import WireServer


def test_a_slow_adaptation_process_hides_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs when nothing else wants a core, so on a busy machine it may not answer in time."""
    monkeypatch.setattr(adapting, "_TIMEOUT_S", 0.2)

    async def never() -> Any:
        await asyncio.Event().wait()

    async def main() -> None:
        server = WireServer(Service(Adaptation), {"status": never})
        port = await server.start("127.0.0.1", 0)

        async def address() -> str:
            return f"127.0.0.1:{port}"

        supervised: Any = SimpleNamespace(address=address, cause="")
        found = await adapting.adaptation_status({}, supervised)
        assert found["models"] == []
        assert found["error"].startswith("the adaptation process does not answer: no answer within 200 ms")
        await server.drain(0.0)

    asyncio.run(main())
