"""Loads versions on all replicas of a model, one replica after the other, while all of them answer."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from gati.errors import CompositionError, GatiError, RequestError, UnavailableError
from services.scheduler.replicas import Replica


class _Replicated(Protocol):
    """The part of `Model` that is used here. Its replicas may change during a call."""

    replicas: tuple[Replica, ...]

    @property
    def ready(self) -> bool: ...

    def unavailable(self) -> UnavailableError: ...


async def load_on_all(model: _Replicated, version: str, composition: str | None) -> list[Replica]:
    """Load and activate a version on each replica that answers; returns these replicas.

    Raises `CompositionError` if several replicas answer with a version of that name: until all had replaced
    it, two compositions would answer under one name. Raises errors of loading; then the version is unloaded
    again where it was not activated yet, unless the replica had one of that name before.
    """
    ready = _ready(model)
    if await _several_answer(model, ready, version):
        raise CompositionError(
            f"version '{version}' is active on {len(ready)} replicas, which would replace it one after the "
            "other; give another name as `version`"
        )
    done: list[Replica] = []
    died: set[Replica] = set()
    # Repeat it until there are no new replicas.
    while new := await _load(model, version, composition, done, died):
        for replica in new:
            await _unless_gone(model, replica, replica.activate(version))
        done += new
    return done


async def unload_on_all(model: _Replicated, version: str) -> list[Replica]:
    """Unload a version on each replica; returns the replicas that answer.

    Raises `RequestError` if it is the active version of a replica.
    """
    ready = _ready(model)
    if await _several_answer(model, ready, version):
        raise RequestError(f"version '{version}' is the active one; activate another first")
    having = [replica for replica in ready if replica.has(version)] or ready[:1]
    for replica in having:
        await _unless_gone(model, replica, replica.unload_version(version))
    return ready


async def describe_all(model: _Replicated, replicas: Sequence[Replica]) -> None:
    """Update the list of versions of each replica."""
    for replica in replicas:
        await _unless_gone(model, replica, replica.describe())


async def _several_answer(model: _Replicated, replicas: Sequence[Replica], version: str) -> bool:
    """Whether there are several replicas, and the version is active on one, as they say now."""
    if len(replicas) < 2:
        return False
    await describe_all(model, replicas)
    return any(each.version == version and each.active for own in replicas for each in own.info.versions)


def _ready(model: _Replicated) -> list[Replica]:
    """Return the replicas that answer. Raises `UnavailableError` if none does."""
    ready = [replica for replica in model.replicas if replica.ready]
    if not ready:
        raise model.unavailable()
    return ready


async def _load(
    model: _Replicated, version: str, composition: str | None, done: Sequence[Replica], died: set[Replica]
) -> list[Replica]:
    """Load a version on each replica that answers and is not `done`, one after the other.

    A replica that dies while loading is added to `died` and skipped if there are others; if it dies again,
    that counts as an error of loading.
    """
    new: list[Replica] = []
    had = {replica for replica in (model.replicas if done else _ready(model)) if replica.has(version)}
    while todo := [each for each in model.replicas if each.ready and each not in (*done, *new)]:
        try:
            await todo[0].load_version(version, composition)
        except GatiError:
            if not todo[0].ready and (len(todo) > 1 or done or new) and todo[0] not in died:
                died.add(todo[0])
                continue  # once restarted, it loads the version
            for replica in (each for each in new if each not in had):
                await _unless_gone(model, replica, replica.unload_version(version))
            raise
        new.append(todo[0])
    return new


async def _unless_gone(model: _Replicated, replica: Replica, call: Coroutine[Any, Any, None]) -> None:
    """Await a call to a replica; its error is ignored if the replica has died and others answer."""
    try:
        await call
    except GatiError:
        if replica.ready or not model.ready:
            raise
