"""Running requests of an inference service, by the id that their caller gave them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gati.errors import CancelledError, RequestError
from services.inference.queue import Ask

if TYPE_CHECKING:
    from gati.engine.exits import Prediction


class Requests:
    """All running requests. Not thread-safe: call from the event loop."""

    def __init__(self) -> None:
        self._under_way: dict[str, UnderWay] = {}

    def begin(self, name: str) -> UnderWay:
        """Register a request before its input is read. Raises `RequestError` if the id is in use."""
        if name in self._under_way:
            raise RequestError(f"a request with the id {name[:64]!r} is running; give each its own id")
        found = self._under_way[name] = UnderWay(self, name)
        return found

    def cancel(self, name: str) -> None:
        """Cancel a request; does nothing if none has this id."""
        found = self._under_way.get(name)
        if found is not None:
            found.cancel()


class UnderWay:
    """One request, a context manager: on exit, none of its inputs waits or runs any more."""

    def __init__(self, requests: Requests, name: str) -> None:
        self._requests = requests
        self._name = name
        self._asks: Sequence[Ask] = ()
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel it, now or as soon as its inputs are queued."""
        self._cancelled = True
        for ask in self._asks:
            ask.queue.drop(ask)

    def check(self) -> None:
        """Raise `CancelledError` if it has been cancelled."""
        if self._cancelled:
            raise CancelledError("the caller cancelled the request")

    async def answered(self, asks: Sequence[Ask]) -> None:
        """Wait until all of its inputs are answered or cancelled."""
        self._asks, left = asks, len(asks)
        if not asks:
            return
        done = asyncio.get_running_loop().create_future()

        def ended(_: asyncio.Future[Prediction]) -> None:
            nonlocal left
            left -= 1
            if not left and not done.done():
                done.set_result(None)

        for ask in asks:
            ask.answer.add_done_callback(ended)
        await done

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests._under_way.pop(self._name, None)
        for ask in self._asks:  # also when the connection was lost
            ask.queue.drop(ask)
