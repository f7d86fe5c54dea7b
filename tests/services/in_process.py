"""An inference service in the test's own process, without a server in front."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from services.inference.service import InferenceService
from services.inference.settings import InferenceSettings

Test = Callable[[InferenceService], Awaitable[None]]


def run(folder: Path, test: Test, **settings: Any) -> None:
    """Let `test` use a service of the library in `folder`, with one worker on one thread."""
    chosen = {"threads": 1, "workers": 1, **settings}

    async def main() -> None:
        told = InferenceSettings(name="m", library=folder / "library", **chosen)
        service = InferenceService(told)
        await service.start()
        try:
            await test(service)
        finally:
            await service.drain()

    asyncio.run(main())
