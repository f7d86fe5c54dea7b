"""The address of a process that comes and goes, for those who wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gati.errors import ConfigError, UnavailableError

_TIMEOUT_S = 60.0
_LOOK_S = 0.1  # before it is started for the first time


class Whereabouts:
    """Known from `tell` until `renew`. `cause` says why there is no process. Not thread-safe."""

    def __init__(self, cause: Callable[[], str]) -> None:
        self._cause = cause
        self._found: asyncio.Future[str] | None = None

    @property
    def known(self) -> str | None:
        """The address; None while it is unknown."""
        found = self._found
        if found is None or not found.done() or found.cancelled() or found.exception() is not None:
            return None
        return found.result()

    def begin(self) -> None:
        """A process is about to start: forget the address or error of an earlier one."""
        self._found = asyncio.get_running_loop().create_future()

    def renew(self) -> None:
        """As `begin`, where something was said; who waits goes on waiting."""
        if self._found is None or self._found.done():
            self.begin()

    def tell(self, address: str) -> None:
        """The process listens there; only the first time counts."""
        if self._found is not None and not self._found.done():
            self._found.set_result(address)

    def give_up(self, why: str) -> None:
        """There will never be one."""
        if self._found is not None and not self._found.done():
            self._found.set_exception(ConfigError(why))
            self._found.exception()  # there may be no waiter

    async def settled(self) -> None:
        """Wait until it is told or given up."""
        if self._found is not None:
            await asyncio.wait([self._found])

    async def address(self) -> str:
        """The address, as soon as it is told.

        Raises `UnavailableError`, or `ConfigError` where it is given up.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while self._found is None:
                    await asyncio.sleep(_LOOK_S)
                return await asyncio.shield(self._found)
        except TimeoutError:
            raise UnavailableError(self._cause(), retry_after_s=1.0) from None
