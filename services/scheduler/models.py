"""The models that the scheduler can ask: each an inference service, started here or running elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gati.errors import GatiError, NotFoundError, RequestError, UnavailableError
from services.supervisor import Supervised
from services.wire.client import WireClient
from services.wire.codec import Service
from services.wire.gen import Inference
from services.wire.gen.ttypes import InferRequest, VersionSource

__all__ = ["Asked", "Model"]

_log = logging.getLogger("gati.scheduler")

_SERVICE = Service(Inference)
_POLL_S = 0.1
_LONGEST_PAUSE_S = 2.0
_CONTROL_TIMEOUT_S = 10.0
_LOAD_TIMEOUT_S = 600.0
_GRACE_S = 0.25  # the service says itself that a deadline has passed; only a dead one does not
_OBITUARY_S = 0.05  # until it is known what a process died of
_REQUEST_IDS = itertools.count(1)


@dataclass(frozen=True)
class Asked:
    """What a request asks for besides its input. `latency_slo_ms` is what is left of it, None for no wish."""

    time_remaining_ms: float
    latency_slo_ms: float | None
    priority: int
    trace_id: str


class Model:
    """One inference service, by name. `start` keeps it connected until `stop`."""

    def __init__(
        self, name: str, *, address: str | None = None, supervised: Supervised | None = None
    ) -> None:
        self.name = name
        self.info: Any = None  # ModelInfo, once it has been ready
        self._fixed_address = address
        self._supervised = supervised
        self._client: WireClient | None = None
        self._ready = False
        self._cause = "it is being started"
        self._keeping: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._certificates: dict[str, dict[str, Any]] = {}

    @property
    def ready(self) -> bool:
        """Whether it is loaded, warmed up and connected."""
        return self._ready and self._client is not None and self._client.connected

    @property
    def supervised(self) -> bool:
        """Whether its process is ours."""
        return self._supervised is not None

    @property
    def restarts(self) -> int:
        """How often its process had to be started again."""
        return 0 if self._supervised is None else self._supervised.restarts

    @property
    def cause(self) -> str:
        """Why it is not ready."""
        if self._supervised is not None and not self._supervised.running:
            return self._supervised.cause
        return self._cause

    def start(self) -> None:
        """Start its process where that is ours, and connect."""
        if self._keeping is not None:
            return
        if self._supervised is not None:
            self._supervised.start()
        self._keeping = asyncio.create_task(self._keep_connected())

    async def stop(self, timeout_s: float) -> None:
        """Disconnect, and let its process drain where that is ours."""
        self._ready = False
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
            self._keeping = None
        if self._supervised is not None:
            await self._supervised.stop(timeout_s)
        if self._client is not None:
            await self._client.close()

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for it. Raises `UnavailableError` with the cause after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ready:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self._unavailable() from None

    # Calls ----------------------------------------------------------------------------------------------

    async def infer(self, tensor: Any, asked: Asked, version: str | None = None) -> Any:
        """Answer a tensor; cancelled, the service drops it, too. Raises what the service refuses with."""
        client = self._connected()
        request_id = f"{asked.trace_id}-{next(_REQUEST_IDS)}"
        request = InferRequest(
            request_id=request_id,
            input=tensor,
            time_remaining_ms=max(1, round(asked.time_remaining_ms)),
            trace_id=asked.trace_id,
            priority=asked.priority,
            latency_slo_ms=asked.latency_slo_ms,
            version=version,
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
        found = await self._connected().call("statistics", timeout_s=_CONTROL_TIMEOUT_S)
        if found.versions and any(version.active for version in found.versions):
            self._told(found.versions)
        return found

    async def load(self, version: str, composition: str | None) -> None:
        """Load a version and let it answer, at once or when it is proven."""
        client = self._connected()
        source = VersionSource(version=version, composition=composition)
        await client.call("load", source, timeout_s=_LOAD_TIMEOUT_S)
        await client.call("activate", version, timeout_s=_CONTROL_TIMEOUT_S)
        await self._describe(client)

    async def unload(self, version: str) -> None:
        """Forget a version that is not active."""
        client = self._connected()
        await client.call("unload", version, timeout_s=_CONTROL_TIMEOUT_S)
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
        """The `VersionInfo` of the version that takes over once it is proven, None where there is none."""
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

    async def _keep_connected(self) -> None:
        pause_s = _POLL_S
        while True:
            try:
                await self._serve_one_connection()
                pause_s = _POLL_S
            except GatiError as error:
                if not isinstance(error, UnavailableError):
                    self._cause = str(error)
                _log.debug("not connected", extra={"model": self.name, "reason": str(error)})
            self._ready = False
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)

    async def _serve_one_connection(self) -> None:
        address = self._fixed_address
        if self._supervised is not None:
            address = await self._supervised.address()
        if address is None:
            raise AssertionError("a model has an address or a process")
        host, _, port = address.rpartition(":")
        self._client = client = WireClient(_SERVICE, host, int(port))
        self._cause = f"nothing answers at {address}" if self._fixed_address else "it is being started"
        await client.connect()
        try:
            self._cause = "it is loading"
            while not (await client.call("health", timeout_s=_CONTROL_TIMEOUT_S)).ready:
                await asyncio.sleep(_POLL_S)
            await self._describe(client)
            self._ready = True
            self._changed.set()
            _log.info("model ready", extra={"model": self.name, "version": self.active.version})
            await client.lost()
        finally:
            self._ready = False
            self._cause = "the connection was lost"
            with suppress(GatiError):
                await client.close()

    async def _describe(self, client: WireClient) -> None:
        info = await client.call("describe", timeout_s=_CONTROL_TIMEOUT_S)
        if not any(version.active for version in info.versions):
            raise RequestError(f"model '{self.name}' has no active version")
        self.info = info
        self._told(info.versions)

    def _told(self, versions: list[Any]) -> None:
        self.info.versions = versions
        self._certificates = {
            each.version: json.loads(each.certificate_json) for each in versions if each.certificate_json
        }
