"""As much of Ray as the executor uses, in this process: for what happens seldom on a real cluster."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple


class RayError(Exception):
    """The base of all that Ray raises."""


class RayActorError(RayError):
    """An actor is gone."""


class RayTaskError(RayError):
    """What a call raised."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"a long\ntraceback of {cause}")
        self.cause = cause


class _Stored(NamedTuple):
    """A reference to what was put; as an argument, it is what it stands for."""

    content: bytes


class _Actor:
    def __init__(self, cluster: FakeRay, made: Any) -> None:
        self.cluster, self.made, self.alive = cluster, made, True

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self.cluster.call(self, method, arguments))


class FakeRay:
    """Calls are answered when they are waited for, the oldest first; everything is pickled on its way.

    `workers` is how many actors have room; `fails` says of every call, by its number from 1 and its method,
    whether its actor dies of it.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(
        self, workers: int, fails: Callable[[int, str], bool] = lambda number, method: False
    ) -> None:
        self.workers, self.fails = workers, fails
        self.calls: list[tuple[object, _Actor, str, tuple[Any, ...]]] = []
        self.actors: list[_Actor] = []
        self.made, self.count = 0, 0
        self.options: dict[str, Any] = {}
        self.connected: dict[str, Any] = {}

    def is_initialized(self) -> bool:
        return bool(self.connected)

    def init(self, **given: Any) -> None:
        self.connected = given

    def shutdown(self) -> None:
        self.connected = {}

    def put(self, value: Any) -> _Stored:
        return _Stored(pickle.dumps(value))

    def remote(self, **options: Any) -> Callable[[type], Any]:
        self.options = options

        def of(kind: type) -> Any:
            return SimpleNamespace(remote=lambda *arguments: self._start(kind, arguments))

        return of

    def _start(self, kind: type, arguments: tuple[Any, ...]) -> _Actor:
        self.made += 1
        self.actors.append(_Actor(self, kind(*arguments)))
        return self.actors[-1]

    def call(self, actor: _Actor, method: str, arguments: tuple[Any, ...]) -> object:
        reference = object()
        self.calls.append((reference, actor, method, pickle.loads(pickle.dumps(arguments))))
        return reference

    def wait(self, references: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert num_returns == 1 and timeout > 0
        room = [actor for actor in self.actors if actor.alive][: self.workers]
        ready = next((each[0] for each in self.calls if each[1] in room and each[0] in references), None)
        return ([] if ready is None else [ready]), []

    def get(self, reference: Any) -> Any:
        call = next(each for each in self.calls if each[0] is reference)
        self.calls.remove(call)
        _, actor, method, arguments = call
        self.count += 1
        if not actor.alive or self.fails(self.count, method):
            actor.alive = False
            raise RayActorError("the actor died because its node has died")
        known = [pickle.loads(each.content) if isinstance(each, _Stored) else each for each in arguments]
        try:
            return pickle.loads(pickle.dumps(getattr(actor.made, method)(*known)))
        except Exception as error:
            raise RayTaskError(error) from error

    def kill(self, actor: _Actor) -> None:
        actor.alive = False

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.workers)}
