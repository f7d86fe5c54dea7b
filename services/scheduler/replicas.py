"""A replica, one inference service of a model: its process, connection, health, and calls over Thrift."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from gati.errors import (
    DeadlineError,
    GatiError,
    OverloadError,
    RequestError,
    UnavailableError,
    one_line,
)
from services.again import keep_on
from services.hosted import Hosted
from services.scheduler.choice import ReplicaLoad
from services.scheduler.kept import KeptVersions
from services.scheduler.restoring import CONTROL_TIMEOUT_S, LOAD_TIMEOUT_S, load_again
from services.scheduler.sleeping import ASLEEP
from services.states import BROKEN, STUCK
from services.wire.client import WireClient, connect_to
from services.wire.codec import Service
from services.wire.gen import Inference
from services.wire.gen.ttypes import InferRequest, VersionSource
from services.wire.tensors import inputs_in

_log = logging.getLogger("gati.scheduler")

HANG_TIMEOUT_S = 60.0

_SERVICE = Service(Inference)
_POLL_S = 0.1
_LONGEST_PAUSE_S = 2.0
_STATISTICS_TIMEOUT_S = 2.0  # one model that hangs must not delay a page about all models
_BEATS = 4  # health checks per `hang_timeout_s`; a replica is not ready while one is overdue
_LATER_S = 30.0  # until a version is tried again for which the disk was full
_GRACE_S = 0.25  # a service that runs reports a passed deadline itself
_OBITUARY_S = 0.05  # time until the cause of a process's death is known
_PROCESS = secrets.token_hex(8)  # several schedulers may use one service
_REQUEST_IDS = itertools.count(1)


class Asked(NamedTuple):
    """A request's parameters. `latency_slo_ms` is what remains of the SLO, None without one.

    `place` is where the inputs come from; memory is kept per place, and not used if it is None.
    """

    time_remaining_ms: float
    latency_slo_ms: float | None
    priority: int
    trace_id: str
    place: str | None = None


@dataclass(frozen=True)
class Link:
    """Settings of connections to services: when a silent service counts as hung, and credentials."""

    hang_timeout_s: float = HANG_TIMEOUT_S
    secret: bytes | None = None
    tls: ssl.SSLContext | None = None


class _LostError(UnavailableError):
    """The connection was lost. The cause is known a moment later: see `Replica.explained`."""


class RefusedError(OverloadError):
    """A replica's refusal for overload; it had that many outstanding inputs when the request was sent."""

    def __init__(self, error: OverloadError, outstanding: int) -> None:
        super().__init__(str(error), retry_after_s=error.retry_after_s)
        self.outstanding = outstanding


class Replica:
    """One inference service, by number. `start` keeps it connected until `stop`.

    A process of ours that does not answer for `hang_timeout_s` is killed and restarted. `told` is awaited
    whenever its versions have been read; `changed` is called when its readiness may have changed.
    """

    def __init__(
        self,
        model: str,
        number: int,
        where: str | Hosted,
        link: Link,
        kept: KeptVersions,
        *,
        told: Callable[[Replica], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        self.number = number
        self.info: Any = None  # ModelInfo, once it has been ready
        self.load = ReplicaLoad()
        self._model = model
        self._fixed_address = where if isinstance(where, str) else None
        self._hosted = None if isinstance(where, str) else where
        self._link = link
        self._kept = kept
        self._told, self._changed = told, changed
        self._client: WireClient | None = None
        self._ready = False
        self._cause = "it has not been started"
        self._state = "starting"
        self._restarts = 0  # of its process, when it was started or last connected
        self._keeping: asyncio.Task[None] | None = None
        self._asleep = False
        self.wanted = False  # between `start` and `stop`

    @property
    def ready(self) -> bool:
        """Whether it is loaded, warmed up, connected, and answers health checks."""
        return self.wanted and self._ready and self._client is not None and self._client.connected

    @property
    def hopeless(self) -> str | None:
        """The error that a restart cannot fix and because of which its process can never serve, or None."""
        return None if self._hosted is None else self._hosted.hopeless

    @property
    def state(self) -> str:
        """The state in one or two words, which any client may see; causes may be private."""
        if self.ready:
            return "ready"
        if self._asleep:
            return "asleep"
        return self._state if self.wanted else "unloaded"

    @property
    def restarts(self) -> int:
        """Number of restarts of its process."""
        return 0 if self._hosted is None else self._hosted.restarts

    @property
    def cause(self) -> str:
        """The reason why it is not ready."""
        if self._asleep:
            return ASLEEP
        if self._hosted is not None and (not self._hosted.running or self._is_next):
            return self._hosted.cause
        return self._cause if self.wanted else "it was unloaded"

    @property
    def _is_next(self) -> bool:
        """Whether its process runs in place of one that died, and is not connected yet."""
        return self.wanted and self.restarts != self._restarts

    @property
    def active(self) -> Any:
        """The `VersionInfo` of the active version, once it has been ready."""
        return next(version for version in self.info.versions if version.active)

    def start(self, *, woken: bool = False) -> None:
        """Start its process if this server runs it, and connect.

        `woken` means that it has served before; then a process that fails is always restarted.
        """
        self.wanted, self._asleep = True, False
        self._cause, self._state = "it is being started", "starting"
        if self._hosted is not None:
            self._hosted.start()
            self._hosted.served = woken
        self._restarts = self.restarts
        self._keeping = asyncio.create_task(
            keep_on(
                f"connection of model '{self._model}'",
                self._serve_one_connection,
                every_s=_POLL_S,
                longest_s=_LONGEST_PAUSE_S,
                failed=self._failed,
                level=logging.DEBUG,
            )
        )

    async def stop(self, timeout_s: float, *, asleep: bool = False, answers_s: float | None = None) -> None:
        """Refuse new requests, wait for those in progress, and stop its process if this server runs it.

        `asleep` means that the next request starts it again. Requests have `answers_s` (`timeout_s` unless
        given), and then the process has `timeout_s` to end.
        """
        self.wanted, self._asleep = False, asleep
        self._changed()
        if self._client is not None:
            await self._client.idle(timeout_s if answers_s is None else answers_s)
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
            self._keeping = None
        if self._hosted is not None:
            await self._hosted.stop(timeout_s)

    def retire(self) -> None:
        """From now on, do not restart its process."""
        if self._hosted is not None:
            self._hosted.retire()

    def has(self, version: str) -> bool:
        """Whether a version was loaded when its versions were last read."""
        return self.info is not None and any(each.version == version for each in self.info.versions)

    # Calls ----------------------------------------------------------------------------------------------

    async def infer(self, tensor: Any, asked: Asked, version: str | None) -> Any:
        """Answer a tensor. If it is cancelled, the service drops the request. Raises the service's errors."""
        client = self._connected()
        request_id = f"{_PROCESS}-{next(_REQUEST_IDS)}"
        request = InferRequest(
            request_id=request_id,
            input=tensor,
            time_remaining_ms=max(1, round(asked.time_remaining_ms)),
            trace_id=asked.trace_id,
            priority=asked.priority,
            latency_slo_ms=asked.latency_slo_ms,
            version=version,
            place=asked.place,
        )
        outstanding = self.load.outstanding
        try:
            with self.load.asked(inputs_in(tensor)):
                return await client.call("infer", request, timeout_s=asked.time_remaining_ms / 1e3 + _GRACE_S)
        except asyncio.CancelledError:
            client.post("cancel", request_id)
            raise
        except OverloadError as error:
            raise RefusedError(error, outstanding) from error
        except UnavailableError as error:
            if client.connected:  # the service itself has raised it
                raise
            raise _LostError(str(error), retry_after_s=error.retry_after_s) from error

    async def explained(self, error: UnavailableError) -> UnavailableError:
        """Return the error to raise: the service's own one, or, if the connection was lost, the cause."""
        if not isinstance(error, _LostError):
            return error
        await asyncio.sleep(_OBITUARY_S)
        return self.unavailable()

    def unavailable(self) -> UnavailableError:
        """Return an error with the reason why it does not answer."""
        return UnavailableError(f"model '{self._model}' does not answer: {self.cause}", retry_after_s=1.0)

    async def statistics(self) -> Any:
        """Return its `Statistics`, and update its versions from them. Raises `UnavailableError`."""
        found = await self._connected().call("statistics", timeout_s=_STATISTICS_TIMEOUT_S)
        if found.versions and any(version.active for version in found.versions):
            self.info.versions = found.versions
            await self._told(self)
        return found

    async def load_version(self, version: str, composition: str | None) -> None:
        """Load a version while the active one serves."""
        source = VersionSource(version, composition)
        await self._connected().call("load", source, timeout_s=LOAD_TIMEOUT_S)

    async def activate(self, version: str) -> None:
        """Make a loaded version the active one, immediately or once it is proven."""
        await self._connected().call("activate", version, timeout_s=CONTROL_TIMEOUT_S)

    async def unload_version(self, version: str) -> None:
        """Unload a version that is not active."""
        await self._connected().call("unload", version, timeout_s=CONTROL_TIMEOUT_S)

    async def describe(self) -> None:
        """Update the list of its versions."""
        await self._describe(self._connected())

    # ----------------------------------------------------------------------------------------------------

    def _connected(self) -> WireClient:
        if self._client is None or not self.ready:
            raise self.unavailable()
        return self._client

    def _failed(self, error: Exception) -> None:
        """Record why there is no connection."""
        self._ready = False
        if not isinstance(error, UnavailableError):
            ours = isinstance(error, GatiError)
            self._cause = str(error) if ours else f"connecting failed: {one_line(error)}"
        self._changed()

    async def _serve_one_connection(self) -> None:
        address = self._fixed_address
        if self._hosted is not None:
            address = await self._hosted.address()
        if address is None:
            raise AssertionError("a replica has an address or a process")
        if self._fixed_address and self._state != "not connected":  # else it is known why
            self._cause, self._state = f"nothing answers at {address}", "not connected"
        self._client = client = connect_to(_SERVICE, address, secret=self._link.secret, tls=self._link.tls)
        try:
            await client.connect()
        except UnavailableError as error:
            if self._fixed_address:  # its certificate may not be trusted, or the secret be another
                self._cause = str(error)
            raise
        self._restarts = self.restarts
        try:
            self._cause, self._state = "it is loading", "loading"
            while not (await self._health(client)).ready:
                await asyncio.sleep(_POLL_S)
            await self._catch_up(client)
            if self._hosted is not None:
                self._hosted.served = True
            self.load.forget()
            self._ready = True
            self._changed()
            extra = {"model": self._model, "version": self.active.version, "replica": self.number}
            _log.info("model ready", extra=extra)
            later = asyncio.create_task(self._load_later(client))
            try:
                await self._watch(client)
            finally:
                later.cancel()
        finally:
            self._ready = False
            self._cause, self._state = "the connection was lost", "restarting"
            await client.close()

    async def _catch_up(self, client: WireClient) -> None:
        """Load the versions of the other replicas; repeat it if another one was loaded there meanwhile."""
        seen = -1
        while seen != self._kept.changes:
            seen = self._kept.changes
            await load_again(client, self._kept, self.number, lambda: self.wanted)
            await self._describe(client)
        self._kept.caught_up(self.number)

    async def _load_later(self, client: WireClient) -> None:
        """Try again to load versions that were left out, until it has all of them."""
        while self._kept.lacks(self.number):
            await asyncio.sleep(_LATER_S)
            with suppress(GatiError):  # logged, or the connection ends
                await self._catch_up(client)

    async def _watch(self, client: WireClient) -> None:
        """Check its health until the connection is lost. A process that hangs is killed.

        Raises `UnavailableError` if it hangs, or if the connection is lost during a check.
        """
        every_s = self._link.hang_timeout_s / _BEATS
        while not await client.lost(every_s):
            asking = asyncio.create_task(self._health(client))
            try:
                await asyncio.wait([asking], timeout=every_s)
                if not asking.done():
                    self._ready, self._cause, self._state = False, "it does not answer", "not answering"
                    _log.warning("model does not answer", extra={"model": self._model})
                found = await asking
            finally:
                asking.cancel()
            self._ready = bool(found.ready)
            self._changed()

    async def _health(self, client: WireClient) -> Any:
        """Return its health. Kill its process and raise `UnavailableError` if it or its engine fails."""
        timeout_s = self._link.hang_timeout_s
        try:
            found = await client.call("health", timeout_s=timeout_s)
        except DeadlineError:
            self._kill(f"it has not answered for {timeout_s:g} s")
        if found.state in (STUCK, BROKEN):
            self._kill(f"its engine is {found.state}")
        return found

    def _kill(self, why: str) -> NoReturn:
        _log.error("model is replaced", extra={"model": self._model, "reason": why})
        if self._hosted is not None:
            self._hosted.kill(why)
        raise UnavailableError(why, retry_after_s=1.0)

    async def _describe(self, client: WireClient) -> None:
        info = await client.call("describe", timeout_s=CONTROL_TIMEOUT_S)
        if not any(version.active for version in info.versions):
            raise RequestError(f"model '{self._model}' has no active version")
        self.info = info
        await self._told(self)
