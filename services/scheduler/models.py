"""The models that the scheduler serves: each has one or more inference services, local or remote."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from copy import copy
from typing import Any

from gati.errors import ConfigError, NotFoundError, RequestError, UnavailableError
from services.hosted import Hosted
from services.scheduler.dispatch import Dispatcher
from services.scheduler.kept import KeptVersions
from services.scheduler.merging import certificates_of, merged_statistics, merged_versions, statistics_of
from services.scheduler.replicas import Asked, Link, Replica
from services.scheduler.rollout import describe_all, load_on_all, unload_on_all
from services.scheduler.sleeping import Sleep

_log = logging.getLogger("gati.scheduler")


class Model:
    """One model: `replicas` inference services that answer alike, or the running service at `address`.

    `host` creates the `Hosted` that starts and watches the process of a replica, given its number. `start`
    keeps all replicas connected until `stop`. One replica answers a request, with one version; if it dies,
    the request is sent to another replica, once. A process of ours that does not answer for
    `link.hang_timeout_s` is killed and restarted.
    """

    def __init__(
        self,
        name: str,
        *,
        address: str | None = None,
        host: Callable[[int], Hosted] | None = None,
        replicas: int = 1,
        link: Link | None = None,
        kept: KeptVersions | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self.name = name
        self.info: Any = None  # ModelInfo, once it has been ready
        self._address, self._host = address, host
        self._link = link or Link()
        self._kept = kept or KeptVersions(name)
        self._changed = asyncio.Event()  # set at each change and then replaced by a new one
        self._certificates = certificates_of(())
        self._lock = asyncio.Lock()  # serialises starting, stopping and scaling
        self._loading = asyncio.Lock()  # serialises loading, so that all replicas activate in the same order
        self._leaving: set[asyncio.Task[None]] = set()
        self.wanted = False  # between `start` and `stop`
        self._waking: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self.sleep = Sleep()
        # Whether it has, had or may get several replicas. If metrics numbered replicas only while there are
        # several, each counter would exist twice, and a rate over both would count requests twice.
        self.numbered = replicas > 1
        self.dispatcher = Dispatcher(self, chance or random.Random())
        self.replicas: tuple[Replica, ...] = tuple(map(self._replica, range(replicas)))

    @property
    def ready(self) -> bool:
        """Whether any replica is loaded, warmed up, connected, and answers health checks."""
        return any(replica.ready for replica in self.replicas)

    @property
    def available(self) -> bool:
        """Whether it is ready, or is asleep or waking: then a request starts it or waits for it."""
        return self.ready or self.sleep.asleep or self.sleep.waking

    @property
    def hopeless(self) -> str | None:
        """The error that a restart cannot fix and because of which it can never serve, or None."""
        return next((each.hopeless for each in self.replicas if each.hopeless is not None), None)

    @property
    def all_hopeless(self) -> bool:
        """Whether none of its replicas can ever serve; until it is stopped, the server is not ready."""
        return all(replica.hopeless is not None for replica in self.replicas)

    @property
    def state(self) -> str:
        """The state in one word, which any client may see; causes may be private."""
        return "ready" if self.ready else self.replicas[0].state

    @property
    def supervised(self) -> bool:
        """Whether this server starts its processes."""
        return self._host is not None

    @property
    def cause(self) -> str:
        """Why it is not ready."""
        return self.replicas[0].cause

    def unavailable(self) -> UnavailableError:
        """The error to raise because it does not answer, with the cause."""
        return self.replicas[0].unavailable()

    async def start(self) -> None:
        """Start its processes if this server runs them, and connect; waits for a `stop` in progress."""
        async with self._lock:
            if self.wanted:
                return
            self.wanted = True
            self._kept.open()
            self.sleep.begin(woken=False)
            for replica in self.replicas:
                replica.start()

    async def stop(self, timeout_s: float, *, answers_s: float | None = None) -> None:
        """Refuse new requests, finish those in progress, and end its processes if this server runs them.

        Requests have `answers_s` (`timeout_s` unless given), and then processes have `timeout_s` to end. It
        completes even if its caller is cancelled.
        """
        await asyncio.shield(asyncio.ensure_future(self._stop(timeout_s, answers_s)))

    def stop_when_hopeless(self, timeout_s: float) -> None:
        """Stop it, in the background, if all its replicas become hopeless before one is ready."""
        if self._ending is None or self._ending.done():
            self._ending = asyncio.create_task(self._stop_when_hopeless(timeout_s))

    async def fall_asleep(self, idle_s: float, timeout_s: float) -> None:
        """Stop its processes if it has had no request for `idle_s`; the next request starts one again.

        Requests in progress get at most `timeout_s`. It completes even if its caller is cancelled.
        """
        await asyncio.shield(asyncio.ensure_future(self._fall_asleep(idle_s, timeout_s)))

    def wake(self) -> None:
        """Start it again, in the background, if it is asleep."""
        if self.sleep.asleep and (self._waking is None or self._waking.done()):
            self._waking = asyncio.create_task(self._wake())

    def retire(self) -> None:
        """From now on, start no process; running ones continue until `stop`."""
        for replica in self.replicas:
            replica.retire()

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until it is ready.

        **Raises:** `UnavailableError` with the cause after `timeout_s`, or if it is stopped meanwhile;
        `ConfigError` if it can never be served.
        """

        def settled() -> bool:
            return self.ready or not self.wanted or self.hopeless is not None

        try:
            async with asyncio.timeout(timeout_s):
                while not settled():
                    await self._changed.wait()
        except TimeoutError:
            raise self.unavailable() from None
        if not self.ready:
            if self.hopeless is not None:
                raise ConfigError(f"model '{self.name}' cannot be served: {self.hopeless}")
            raise self.unavailable()

    async def scale(self, count: int, timeout_s: float) -> None:
        """Change the number of replicas, to one at least; removed ones drain for at most `timeout_s`."""
        if self._host is None:
            raise RequestError(f"model '{self.name}' is not run by this server; scale it where it runs")
        async with self._lock:
            count = max(1, count)
            self.numbered |= count > 1
            kept, gone = self.replicas[:count], self.replicas[count:]
            numbers = range(len(kept), count)
            await self._left(set(numbers))
            added = tuple(map(self._replica, numbers))
            self.replicas = kept + added
            for replica in added if self.wanted else ():
                replica.start()
            for replica in gone:
                task = asyncio.create_task(replica.stop(timeout_s), name=str(replica.number))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    # Calls ----------------------------------------------------------------------------------------------

    async def infer(self, tensor: Any, asked: Asked, version: str | None = None) -> Any:
        """Answer a tensor. If this is cancelled, the service drops the request. Raises the service's errors.

        If the replica dies or is removed, another one is asked in the remaining time. A model that is asleep
        is started, and the request waits if it has the time. All time until the request is sent to the
        replica that answers counts as time in the queue.
        """
        return await self.dispatcher.infer(tensor, asked, version)

    async def statistics(self) -> Any:
        """The wire's `Statistics`, with the state of its versions. Raises `UnavailableError`."""
        found = await self.statistics_by_replica()
        return merged_statistics(list(found.values()), self.info.versions)

    async def statistics_by_replica(self) -> dict[int, Any]:
        """The `Statistics` of each replica that answers, by number. `UnavailableError` if none does."""
        ready = [replica for replica in self.replicas if replica.ready]
        return await statistics_of(ready or self.replicas[:1])

    async def load(self, version: str, composition: str | None) -> None:
        """Load a version on one replica after the other, and activate it: now, or as soon as it is proven.

        If a replica cannot load it, the others unload it again, unless they had one of that name before. A
        replica that is not ready loads it when it becomes ready.
        """
        async with self._loading:
            done = await load_on_all(self, version, composition)
            self._kept.loaded(version, composition)
            await describe_all(self, done)
            self._kept.changes += 1  # again, because now the kept versions say which one is active

    async def unload(self, version: str) -> None:
        """Unload a version that is not active."""
        async with self._loading:
            try:
                having = await unload_on_all(self, version)
            except NotFoundError:
                self._kept.forget(version)  # it was left out, and would be loaded later
                await describe_all(self, [each for each in self.replicas if each.ready])
                raise
            self._kept.forget(version)
            await describe_all(self, having)

    def version(self, name: str) -> Any:
        """The `VersionInfo` of a loaded version. Raises `NotFoundError`, `UnavailableError`."""
        if self.info is None:
            raise self.unavailable()
        for version in self.info.versions:
            if version.version == name:
                return version
        raise NotFoundError(f"no version '{name}' of model '{self.name}' is loaded")

    def certificate(self, version: str, *, of: str | None = None) -> dict[str, Any] | None:
        """The certificate of a loaded version, if its id is `of`; None if it has none or is not loaded."""
        known_as, certificate = self._certificates.get(version, (None, None))
        return certificate if of in (None, known_as) else None

    @property
    def pending(self) -> Any:
        """The `VersionInfo` of the version that takes over once it is proven, or None."""
        versions = () if self.info is None else self.info.versions
        return next((version for version in versions if version.pending), None)

    @property
    def active(self) -> Any:
        """The `VersionInfo` of the version that answers."""
        if self.info is None:
            raise self.unavailable()
        return next(version for version in self.info.versions if version.active)

    # ----------------------------------------------------------------------------------------------------

    def _replica(self, number: int) -> Replica:
        where = self._address if self._host is None else self._host(number)
        if where is None:
            raise AssertionError("a model has an address or a host")
        return Replica(self.name, number, where, self._link, self._kept, told=self._told, changed=self._tell)

    async def _left(self, numbers: set[int]) -> None:
        """Wait until earlier replicas with these numbers have stopped, because the numbers are used again."""
        leaving = [task for task in self._leaving if int(task.get_name()) in numbers]
        if leaving:
            await asyncio.wait(leaving)

    async def _fall_asleep(self, idle_s: float, timeout_s: float) -> None:
        async with self._lock:
            if not self.wanted or self.sleep.asleep or self.sleep.busy or self.sleep.idle_s < idle_s:
                return
            _log.info("asleep", extra={"model": self.name})
            self.sleep.fall_asleep()
            replicas, self.replicas = self.replicas, self.replicas[:1]
            await asyncio.gather(*(replica.stop(timeout_s, asleep=True) for replica in replicas))

    async def _wake(self) -> None:
        async with self._lock:
            if self.wanted and self.sleep.asleep:
                _log.info("woken", extra={"model": self.name})
                self.sleep.begin(woken=True)
                for replica in self.replicas:
                    replica.start(woken=True)

    async def _stop_when_hopeless(self, timeout_s: float) -> None:
        while self.wanted and not self.ready:
            if self.all_hopeless:
                return await self._stop(timeout_s)
            await self._changed.wait()

    async def _stop(self, timeout_s: float, answers_s: float | None = None) -> None:
        async with self._lock:
            self.wanted = False
            self.sleep.end()
            stops = (replica.stop(timeout_s, answers_s=answers_s) for replica in self.replicas)
            await asyncio.gather(*stops)
            if self._leaving:
                await asyncio.wait(self._leaving)
            self._kept.close()

    def _tell(self) -> None:
        """Wake the tasks that wait for a change."""
        if self.ready:
            self.sleep.answers()
        self.dispatcher.parking.look()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _told(self, replica: Replica) -> None:
        """Record the versions that a replica has."""
        known = [each for each in self.replicas if each.info is not None and (each.ready or each is replica)]
        if not known:  # the replica is being stopped
            return
        known.sort(key=lambda each: not each.ready)  # ready ones first: the first one says what is active
        self.info = copy(known[0].info)
        self.info.versions = versions = merged_versions(each.info.versions for each in known)
        self._certificates = certificates_of(versions)
        await self._kept.told(versions)
