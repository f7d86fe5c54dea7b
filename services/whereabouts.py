"""The address of a process that may be restarted; callers can wait until it is known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gati.errors import ConfigError, UnavailableError

_TIMEOUT_S = 60.0
_LOOK_S = 0.1  # how often callers check whether `begin` was called


class Whereabouts:
    """The address of a process, known from `tell` until `renew`. Not thread-safe.

    `cause` returns why there is no process.
    """

    def __init__(self, cause: Callable[[], str]) -> None:
        self._cause = cause
        self._found: asyncio.Future[str] | None = None

    @property
    def known(self) -> str | None:
        """The address, or None while it is unknown."""
        found = self._found
        if found is None or not found.done() or found.cancelled() or found.exception() is not None:
            return None
        return found.result()

    def begin(self) -> None:
        """Call before a process starts: forgets the address or error of an earlier one."""
        self._found = asyncio.get_running_loop().create_future()

    def renew(self) -> None:
        """As `begin`, but does nothing while callers may still be waiting for an address."""
        if self._found is None or self._found.done():
            self.begin()

    def tell(self, address: str) -> None:
        """Set the address at which the process listens; further calls do nothing until `renew`."""
        if self._found is not None and not self._found.done():
            self._found.set_result(address)

    def give_up(self, why: str) -> None:
        """Report that there will never be an address; `address` then raises `ConfigError`."""
        if self._found is not None and not self._found.done():
            self._found.set_exception(ConfigError(why))
            self._found.exception()  # marks it as retrieved, as no one may wait for it

    async def settled(self) -> None:
        """Wait until `tell` or `give_up` was called."""
        if self._found is not None:
            await asyncio.wait([self._found])

    async def address(self) -> str:
        """The address, once it is known.

        **Raises:** `UnavailableError` with the cause after 60 s, `ConfigError` after `give_up`.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while self._found is None:
                    await asyncio.sleep(_LOOK_S)
                return await asyncio.shield(self._found)
        except TimeoutError:
            raise UnavailableError(self._cause(), retry_after_s=1.0) from None
