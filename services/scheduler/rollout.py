"""Versions on all replicas of a model: loaded by one after the other while all of them answer."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from gati.errors import GatiError, RequestError, UnavailableError
from services.scheduler.replicas import Replica


class _Replicated(Protocol):
    """A model, as far as it matters here; its replicas may come and go meanwhile."""

    replicas: tuple[Replica, ...]

    @property
    def ready(self) -> bool: ...

    def unavailable(self) -> UnavailableError: ...


async def load_on_all(model: _Replicated, version: str, composition: str | None) -> list[Replica]:
    """Load a version on each replica that answers, and let it answer; returns those replicas.

    Raises what loading raises; none of them has the version then, unless it had one of that name before.
    """
    done: list[Replica] = []
    died: set[Replica] = set()
    while new := await _load(model, version, composition, done, died):  # some may have come meanwhile
        for replica in new:
            await _unless_gone(model, replica, replica.activate(version))
        done += new
    return done


async def unload_on_all(model: _Replicated, version: str) -> list[Replica]:
    """Forget a version on each replica; returns those that answer.

    Raises `RequestError` where it is the active one.
    """
    ready = _ready(model)
    if len(ready) > 1:
        await describe_all(model, ready)
        if any(each.version == version and each.active for own in ready for each in own.info.versions):
            raise RequestError(f"version '{version}' is the active one; activate another first")
    having = [replica for replica in ready if replica.has(version)] or ready[:1]
    for replica in having:
        await _unless_gone(model, replica, replica.unload_version(version))
    return ready


async def describe_all(model: _Replicated, replicas: Sequence[Replica]) -> None:
    """Look which versions they have."""
    for replica in replicas:
        await _unless_gone(model, replica, replica.describe())


def _ready(model: _Replicated) -> list[Replica]:
    """The replicas that answer. Raises `UnavailableError` if none does."""
    ready = [replica for replica in model.replicas if replica.ready]
    if not ready:
        raise model.unavailable()
    return ready


async def _load(
    model: _Replicated, version: str, composition: str | None, done: Sequence[Replica], died: set[Replica]
) -> list[Replica]:
    """Load a version on each replica that answers and is not `done`, one after the other.

    Those that die meanwhile are added to `died`; one that dies again cannot load it.
    """
    new: list[Replica] = []
    had = {replica for replica in (model.replicas if done else _ready(model)) if replica.has(version)}
    while todo := [each for each in model.replicas if each.ready and each not in (*done, *new)]:
        try:
            await todo[0].load_version(version, composition)
        except GatiError:
            if not todo[0].ready and (len(todo) > 1 or done or new) and todo[0] not in died:
                died.add(todo[0])
                continue  # it loads the version when it comes back
            for replica in (each for each in new if each not in had):
                await _unless_gone(model, replica, replica.unload_version(version))
            raise
        new.append(todo[0])
    return new


async def _unless_gone(model: _Replicated, replica: Replica, call: Coroutine[Any, Any, None]) -> None:
    """Await a call to a replica; nothing is raised where that has died, and others answer."""
    try:
        await call
    except GatiError:
        if replica.ready or not model.ready:
            raise
