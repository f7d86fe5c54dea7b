"""Inference services on the nodes of a Ray cluster. Only this file uses Ray for serving.

Each replica is an actor. It reserves the cores and GPU of its service, and starts and supervises the process
of the service (`services.supervisor`) on the node where Ray has placed it. It reports the address of the
process to the scheduler, which calls it over Thrift, as on one machine; no request goes through Ray. If a
node is lost, Ray starts the actor on another one.

A service listens on its node's address and requires a secret, which each `gati serve` creates at startup.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from gati.errors import ConfigError, one_line
from gati.hosts import check_listening, cluster_address
from services.again import Backoff
from services.inference.settings import InferenceSettings, device_of
from services.scratch import Scratch
from services.supervisor import Supervised
from services.whereabouts import Whereabouts

_log = logging.getLogger("gati.ray")

_LOOK_S = 0.1  # how often an actor checks its process
_TELL_S = 5.0  # longest time between two reports of an actor
_LOST_S = 30.0  # an actor that has not reported for this long is lost
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0
_STOP_GRACE_S = 5.0
_CALLS = 16  # that an actor executes concurrently


@dataclass(frozen=True)
class _Seen:
    """An actor's report about its process."""

    address: str | None = None
    running: bool = False
    cause: str = ""
    hopeless: str | None = None
    restarts: int = 0


class _Actor:
    """Runs on a node: starts and supervises the process of one service there, and reports its state."""

    def __init__(self, settings: str, secret: bytes) -> None:
        found = InferenceSettings.model_validate_json(settings)
        self._scratch = Scratch("secret")
        file = self._scratch.path / "secret"
        file.write_bytes(secret)
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        where = {"host": host, "secret_file": file}
        self._process = Supervised(
            found.label,
            "services.inference",
            found.model_copy(update=where),
            for_this_machine=False,
            spare=found.spare,
        )

    async def changed(self, seen: _Seen, served: bool) -> _Seen:
        """Start the process if needed; return its state once it differs from `seen`, or after `_TELL_S`.

        `served`: the scheduler has had answers from it.
        """
        self._process.start()
        self._process.served = self._process.served or served
        end_s = time.monotonic() + _TELL_S
        while (now := self._seen()) == seen and time.monotonic() < end_s:
            await asyncio.sleep(_LOOK_S)
        return now

    async def kill(self, why: str) -> None:
        """Kill a process that hangs."""
        self._process.kill(why)

    async def retire(self) -> None:
        """Start no other process; the running one continues until `stop`."""
        self._process.retire()

    async def stop(self, timeout_s: float) -> None:
        """Let the process drain, then end it."""
        await self._process.stop(timeout_s)
        self._scratch.close()

    def _seen(self) -> _Seen:
        process = self._process
        return _Seen(process.listening, process.running, process.cause, process.hopeless, process.restarts)


class RayReplica:
    """One replica, run by an actor: a `services.hosted.Hosted`. Call its methods from the event loop."""

    def __init__(self, settings: InferenceSettings, secret: bytes) -> None:
        self._settings = settings
        self._secret = secret
        self._actor: Any = None
        self._seen = _Seen()
        self._where = Whereabouts(lambda: self.cause)
        self._following: asyncio.Task[None] | None = None
        self._lost = 0  # number of actors lost while their process ran
        self._processes = 0  # number of restarts by earlier actors
        self._placed = False
        self.served = False

    @property
    def running(self) -> bool:
        """Whether a process is running."""
        return self._seen.running

    @property
    def restarts(self) -> int:
        """Number of restarts, of the process or its actor."""
        return self._lost + self._processes + self._seen.restarts

    @property
    def cause(self) -> str:
        """Why there is no process."""
        return self._seen.cause

    @property
    def hopeless(self) -> str | None:
        """The error that a restart cannot fix, if any."""
        return self._seen.hopeless

    def start(self) -> None:
        """Let Ray start the actor, and receive its reports until `stop`."""
        if self._following is not None and not self._following.done():
            return
        self.served, self._placed = False, False
        self._seen = _Seen(cause=f"Ray has not placed it yet; it needs {self._needs}")
        self._where.begin()
        self._following = asyncio.create_task(self._follow())

    async def address(self) -> str:
        """The address of the process, once it listens. Raises `UnavailableError`, or `ConfigError`."""
        return await self._where.address()

    def kill(self, why: str) -> None:
        """Kill a process that hangs; its actor starts another one."""
        if self._actor is not None:
            self._actor.kill.remote(why)

    def retire(self) -> None:
        """Start no other process; the running one continues until `stop`."""
        if self._actor is not None:
            self._actor.retire.remote()

    async def stop(self, timeout_s: float) -> None:
        """Let the process drain for that long, then end it and its actor."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        actor, self._actor = self._actor, None
        if actor is not None:
            with suppress(RayError, TimeoutError):  # a lost actor needs no stop
                async with asyncio.timeout(timeout_s + _STOP_GRACE_S):
                    await actor.stop.remote(timeout_s)
            ray.kill(actor)
        self._processes += self._seen.restarts
        self._take(_Seen(cause="it was unloaded"))

    # ----------------------------------------------------------------------------------------------------

    @property
    def _needs(self) -> str:
        gpu = " and a GPU" if self._gpus else ""
        cores = self._settings.thread_count
        return f"{cores} CPUs{gpu}" if cores > 1 else f"1 CPU{gpu}"

    @cached_property
    def _gpus(self) -> int:
        return int(device_of(self._settings).startswith("cuda"))

    async def _follow(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            began_s = time.monotonic()
            if self._actor is None:
                self._actor = self._new_actor()
            try:
                await self._listen(self._actor)
            except Exception as error:  # of any type: Ray may restart the actor, or have a node for it later
                self._failed(error)
            await asyncio.sleep(backoff.after_s(time.monotonic() - began_s))

    async def _listen(self, actor: Any) -> None:
        """Receive an actor's reports; sets `_placed` after the first, for which it waits without a limit.

        **Raises:** Ray's error if the actor is lost, `TimeoutError` if it does not report.
        """
        if not self._placed:
            self._take(await actor.changed.remote(_Seen(), self.served))
            self._placed = True
        while True:
            async with asyncio.timeout(_LOST_S):
                self._take(await actor.changed.remote(self._seen, self.served))

    def _new_actor(self) -> Any:
        kind = ray.remote(_Actor).options(
            num_cpus=self._settings.thread_count,
            num_gpus=self._gpus,
            max_restarts=-1,
            max_concurrency=_CALLS,
            scheduling_strategy="SPREAD",
            enable_task_events=False,
        )
        return kind.remote(self._settings.model_dump_json(), self._secret)

    def _failed(self, error: Exception) -> None:
        if self._seen.running:  # otherwise no process was lost
            self._lost += 1
        self._processes += self._seen.restarts
        cause = "its node or its actor is lost; Ray starts another actor"
        if isinstance(error, ActorDiedError):  # its constructor failed: Ray does not restart it
            cause = f"its actor cannot be started: {one_line(error)}"
            self._actor = None
        _log.error("replica lost", extra={"replica": self._settings.label, "reason": one_line(error)})
        self._placed = False
        self._take(_Seen(cause=cause))

    def _take(self, seen: _Seen) -> None:
        self._seen = seen
        self._where.renew()  # the process may have been replaced between two reports
        if seen.hopeless is not None:
            self._where.give_up(seen.hopeless)
        elif seen.address is not None:
            self._where.tell(seen.address)


class RayCluster:
    """The nodes of a Ray cluster: a `services.hosted.Hosting`."""

    pausing: Path | None = None  # requests run on other machines than retraining

    def __init__(self) -> None:
        self.secret: bytes | None = secrets.token_hex(32).encode()

    @classmethod
    @contextmanager
    def connect(cls, address: str) -> Iterator[RayCluster]:
        """Connect to the cluster at an address, `auto` for this machine's. Raises `ConfigError`."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = cluster_address(address)
        try:
            check_listening(address)  # Ray itself would try for minutes, and ignore signals
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
            raise ConfigError(
                f"no Ray cluster answers at '{address}' ({one_line(error)[:200]}); "
                "start one with ray start --head, and run this command on one of its nodes"
            ) from error
        try:
            yield cls()
        finally:
            ray.shutdown()

    def threads(self, replicas: int) -> int:
        """One core; more are reserved if the configuration sets `threads`."""
        return 1

    def host(self, settings: InferenceSettings) -> RayReplica:
        """A replica whose actor is not started yet."""
        if self.secret is None:
            raise AssertionError("services on other machines need a secret")
        return RayReplica(settings, self.secret)
