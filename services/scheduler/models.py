"""The models that the scheduler can ask: each an inference service, started here or running elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import secrets
import ssl
from dataclasses import dataclass
from typing import Any, NoReturn

from gati.errors import (
    CompositionError,
    ConfigError,
    DeadlineError,
    GatiError,
    NotFoundError,
    RequestError,
    UnavailableError,
    one_line,
)
from services.again import keep_on
from services.scheduler.kept import KeptVersions
from services.states import BASE_VERSION, STUCK
from services.supervisor import Supervised
from services.wire.client import WireClient, connect_to
from services.wire.codec import Service
from services.wire.gen import Inference
from services.wire.gen.ttypes import InferRequest, VersionSource

__all__ = ["Asked", "Model"]

_log = logging.getLogger("gati.scheduler")

_SERVICE = Service(Inference)
_POLL_S = 0.1
_LONGEST_PAUSE_S = 2.0
_CONTROL_TIMEOUT_S = 10.0
_STATISTICS_TIMEOUT_S = 2.0  # a page over all models must not wait for one that hangs
_HANG_TIMEOUT_S = 60.0
_BEATS = 4  # so often in that time it is asked; it is not ready while it owes an answer for longer
_LOAD_TIMEOUT_S = 600.0
_GRACE_S = 0.25  # the service says itself that a deadline has passed; only a dead one does not
_OBITUARY_S = 0.05  # until it is known what a process died of
_PROCESS = secrets.token_hex(8)  # several schedulers may ask one service
_REQUEST_IDS = itertools.count(1)


@dataclass(frozen=True)
class Asked:
    """A request's parameters. `latency_slo_ms` is the remaining SLO, None without one.

    `place` names what the inputs show, for memory; None uses none.
    """

    time_remaining_ms: float
    latency_slo_ms: float | None
    priority: int
    trace_id: str
    place: str | None = None


class Model:
    """One inference service, by name. `start` keeps it connected until `stop`.

    One that does not answer for `hang_timeout_s` is ended where it is ours, and started again.
    """

    def __init__(
        self,
        name: str,
        *,
        address: str | None = None,
        supervised: Supervised | None = None,
        hang_timeout_s: float = _HANG_TIMEOUT_S,
        secret: bytes | None = None,
        tls: ssl.SSLContext | None = None,
        kept: KeptVersions | None = None,
    ) -> None:
        self.name = name
        self.info: Any = None  # ModelInfo, once it has been ready
        self._fixed_address = address
        self._supervised = supervised
        self._client: WireClient | None = None
        self._ready = False
        self._cause = "it has not been started"
        self._state = "starting"
        self._keeping: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # of now: each change sets it, and leaves a new one
        self._certificates: dict[str, dict[str, Any]] = {}
        self._kept = kept or KeptVersions(name)
        self._hang_timeout_s = hang_timeout_s
        self._secret, self._tls = secret, tls  # for an address
        self._lock = asyncio.Lock()  # starting and stopping take turns
        self.wanted = False  # between `start` and `stop`

    @property
    def ready(self) -> bool:
        """Whether it is loaded, warmed up, connected, and answers health checks."""
        return self.wanted and self._ready and self._client is not None and self._client.connected

    @property
    def hopeless(self) -> str | None:
        """The error that keeps its process from ever serving, if a restart cannot help."""
        return None if self._supervised is None else self._supervised.hopeless

    @property
    def state(self) -> str:
        """The state in one word, for every client: without causes, which may be private."""
        if self.ready:
            return "ready"
        return self._state if self.wanted else "unloaded"

    @property
    def supervised(self) -> bool:
        """Whether its process is ours."""
        return self._supervised is not None

    @property
    def restarts(self) -> int:
        """Number of restarts of its process."""
        return 0 if self._supervised is None else self._supervised.restarts

    @property
    def cause(self) -> str:
        """Why it is not ready."""
        if self._supervised is not None and not self._supervised.running:
            return self._supervised.cause
        return self._cause if self.wanted else "it was unloaded"

    async def start(self) -> None:
        """Start its process if that is ours, and connect; waits for a running `stop`."""
        async with self._lock:
            if self.wanted:
                return
            self.wanted = True
            self._cause, self._state = "it is being started", "starting"
            self._kept.open()
            if self._supervised is not None:
                self._supervised.start()
            self._keeping = asyncio.create_task(
                keep_on(
                    f"connection of model '{self.name}'",
                    self._serve_one_connection,
                    every_s=_POLL_S,
                    longest_s=_LONGEST_PAUSE_S,
                    failed=self._failed,
                    level=logging.DEBUG,
                )
            )

    async def stop(self, timeout_s: float) -> None:
        """Refuse what is new, let what is under way be answered, and end its process where that is ours.

        It completes even if its caller is cancelled.
        """
        await asyncio.shield(asyncio.ensure_future(self._stop(timeout_s)))

    def retire(self) -> None:
        """Start no process again from now on."""
        if self._supervised is not None:
            self._supervised.retire()

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for it.

        **Raises:** `UnavailableError` with the cause after `timeout_s`, or when it is stopped meanwhile;
        `ConfigError` when it will never be.
        """

        def settled() -> bool:
            return self.ready or not self.wanted or self.hopeless is not None

        try:
            async with asyncio.timeout(timeout_s):
                while not settled():
                    await self._changed.wait()
        except TimeoutError:
            raise self._unavailable() from None
        if not self.ready:
            if self.hopeless is not None:
                raise ConfigError(f"model '{self.name}' cannot be served: {self.hopeless}")
            raise self._unavailable()

    # Calls ----------------------------------------------------------------------------------------------

    async def infer(self, tensor: Any, asked: Asked, version: str | None = None) -> Any:
        """Answer a tensor; cancelled, the service drops it, too. Raises what the service refuses with."""
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
        try:
            return await client.call("infer", request, timeout_s=asked.time_remaining_ms / 1e3 + _GRACE_S)
        except asyncio.CancelledError:
            client.post("cancel", request_id)
            raise
        except UnavailableError as error:
            if client.connected:  # it says so itself
                raise
            await asyncio.sleep(_OBITUARY_S)
            raise self._unavailable() from error

    async def statistics(self) -> Any:
        """Its counts, and how its versions stand. Raises `UnavailableError`."""
        found = await self._connected().call("statistics", timeout_s=_STATISTICS_TIMEOUT_S)
        if found.versions and any(version.active for version in found.versions):
            await self._told(found.versions)
        return found

    async def load(self, version: str, composition: str | None) -> None:
        """Load a version and let it answer, at once or when it is proven."""
        client = self._connected()
        source = VersionSource(version=version, composition=composition)
        await client.call("load", source, timeout_s=_LOAD_TIMEOUT_S)
        await client.call("activate", version, timeout_s=_CONTROL_TIMEOUT_S)
        self._kept.loaded(version, composition)
        await self._describe(client)

    async def unload(self, version: str) -> None:
        """Forget a version that is not active."""
        client = self._connected()
        await client.call("unload", version, timeout_s=_CONTROL_TIMEOUT_S)
        self._kept.forget(version)
        await self._describe(client)

    def version(self, name: str) -> Any:
        """The `VersionInfo` of a loaded version. Raises `NotFoundError`."""
        for version in self.info.versions if self.info is not None else ():
            if version.version == name:
                return version
        raise NotFoundError(f"no version '{name}' of model '{self.name}' is loaded")

    def certificate(self, version: str) -> dict[str, Any] | None:
        """The certificate of a loaded version; None where nothing is certified, or it has gone since."""
        return self._certificates.get(version)

    @property
    def pending(self) -> Any:
        """The `VersionInfo` of the version that takes over once it is proven, None if there is none."""
        versions = () if self.info is None else self.info.versions
        return next((version for version in versions if version.pending), None)

    @property
    def active(self) -> Any:
        """The `VersionInfo` of the version that answers."""
        if self.info is None:
            raise self._unavailable()
        return next(version for version in self.info.versions if version.active)

    # ----------------------------------------------------------------------------------------------------

    def _connected(self) -> WireClient:
        if self._client is None or not self.ready:
            raise self._unavailable()
        return self._client

    def _unavailable(self) -> UnavailableError:
        return UnavailableError(f"model '{self.name}' does not answer: {self.cause}", retry_after_s=1.0)

    async def _stop(self, timeout_s: float) -> None:
        async with self._lock:
            self.wanted = False
            self._tell()
            if self._client is not None:
                await self._client.idle(timeout_s)
            if self._keeping is not None:
                self._keeping.cancel()
                await asyncio.wait([self._keeping])
                self._keeping = None
            if self._supervised is not None:
                await self._supervised.stop(timeout_s)
            self._kept.close()

    def _failed(self, error: Exception) -> None:
        """Why there is no connection."""
        self._ready = False
        if not isinstance(error, UnavailableError):
            ours = isinstance(error, GatiError)
            self._cause = str(error) if ours else f"connecting failed: {one_line(error)}"
        self._tell()

    def _tell(self) -> None:
        """Wake up who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _serve_one_connection(self) -> None:
        address = self._fixed_address
        if self._supervised is not None:
            address = await self._supervised.address()
        if address is None:
            raise AssertionError("a model has an address or a process")
        if self._fixed_address:
            self._cause, self._state = f"nothing answers at {address}", "not connected"
        self._client = client = connect_to(_SERVICE, address, secret=self._secret, tls=self._tls)
        await client.connect()
        try:
            self._cause, self._state = "it is loading", "loading"
            while not (await self._health(client)).ready:
                await asyncio.sleep(_POLL_S)
            await self._load_again(client)
            await self._describe(client)
            if self._supervised is not None:
                self._supervised.served = True
            self._ready = True
            self._tell()
            _log.info("model ready", extra={"model": self.name, "version": self.active.version})
            await self._watch(client)
        finally:
            self._ready = False
            self._cause, self._state = "the connection was lost", "restarting"
            await client.close()

    async def _load_again(self, client: WireClient) -> None:
        """Load what had been loaded before the process, or we, began anew; what cannot be is forgotten."""
        found = await client.call("describe", timeout_s=_CONTROL_TIMEOUT_S)
        there = {each.version for each in found.versions}
        answering = self._kept.began(found.versions)
        for version, composition in self._kept.in_turn():
            try:
                # a name that is there may have been given to another composition
                if version not in there or version != (composition or BASE_VERSION):
                    await self._load(client, version, composition)
                if version in answering:
                    await client.call("activate", version, timeout_s=_CONTROL_TIMEOUT_S)
            except (RequestError, NotFoundError, CompositionError) as error:
                self._kept.forget(version)
                _log.warning("not loaded again", extra={"version": version, "reason": str(error)})

    async def _load(self, client: WireClient, version: str, composition: str | None) -> None:
        """Load a version again; one that ends each process is forgotten. Raises what loading raises."""
        source = VersionSource(version=version, composition=composition)
        try:
            await client.call("load", source, timeout_s=_LOAD_TIMEOUT_S)
        except (UnavailableError, DeadlineError):
            if self.wanted and self._kept.failed(version):
                _log.error("not loaded again: each process ended", extra={"version": version})
            raise

    async def _watch(self, client: WireClient) -> None:
        """Ask how it is, again and again, until the connection is lost. One that hangs is ended.

        Raises `UnavailableError` then.
        """
        every_s = self._hang_timeout_s / _BEATS
        while not await client.lost(every_s):
            asking = asyncio.create_task(self._health(client))
            try:
                await asyncio.wait([asking], timeout=every_s)
                if not asking.done():
                    self._ready, self._cause, self._state = False, "it does not answer", "not answering"
                    _log.warning("model does not answer", extra={"model": self.name})
                found = await asking
            finally:
                asking.cancel()
            self._ready = bool(found.ready)
            self._tell()

    async def _health(self, client: WireClient) -> Any:
        """Its health. A process that does not answer, or is stuck, is killed: raises `UnavailableError`."""
        try:
            found = await client.call("health", timeout_s=self._hang_timeout_s)
        except DeadlineError:
            self._hangs(f"it has not answered for {self._hang_timeout_s:g} s")
        if found.state == STUCK:
            self._hangs("its engine has not come to an end")
        return found

    def _hangs(self, why: str) -> NoReturn:
        _log.error("model hangs", extra={"model": self.name, "reason": why})
        if self._supervised is not None:
            self._supervised.kill(why)
        raise UnavailableError(why, retry_after_s=1.0)

    async def _describe(self, client: WireClient) -> None:
        info = await client.call("describe", timeout_s=_CONTROL_TIMEOUT_S)
        if not any(version.active for version in info.versions):
            raise RequestError(f"model '{self.name}' has no active version")
        self.info = info
        await self._told(info.versions)

    async def _told(self, versions: list[Any]) -> None:
        self.info.versions = versions
        self._certificates = {
            each.version: json.loads(each.certificate_json) for each in versions if each.certificate_json
        }
        await self._kept.told(versions)
