"""Sends each request to a replica: again if that one dies, later if none has room or the model is asleep."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from typing import Any, Protocol

from gati.errors import ConfigError, DeadlineError, OverloadError, UnavailableError
from services.scheduler.choice import choose, of_place
from services.scheduler.parking import Parking
from services.scheduler.replicas import Asked, Replica
from services.scheduler.sleeping import Sleep
from services.wire.tensors import inputs_in

_log = logging.getLogger("gati.scheduler")


class _Replicated(Protocol):
    """The part of `Model` that is used here. Its replicas may change during a call."""

    name: str
    replicas: tuple[Replica, ...]
    sleep: Sleep
    wanted: bool

    @property
    def ready(self) -> bool: ...

    @property
    def available(self) -> bool: ...

    def unavailable(self) -> UnavailableError: ...

    def wake(self) -> None: ...

    async def wait_until_ready(self, timeout_s: float) -> None: ...


class Dispatcher:
    """Sends the requests for one model to its replicas, two of which `chance` draws for each."""

    def __init__(self, model: _Replicated, chance: random.Random) -> None:
        self.asked_again = 0  # requests sent to a second replica
        self.parking = Parking(lambda: model.replicas)
        # Called with each response, and with None for each request refused for overload.
        self.on_outcome: Callable[[Any], None] = _nothing
        self._model = model
        self._chance = chance

    async def infer(self, tensor: Any, asked: Asked, version: str | None = None) -> Any:
        """Answer a tensor; see `Model.infer`."""
        model = self._model
        with model.sleep.asked():
            began_s = time.monotonic()
            try:
                if not model.ready and model.available:
                    asked = await self._woken(asked)
                response, sent_s = await self.parking.ask(
                    lambda again: self._infer(tensor, again, version), inputs_in(tensor), asked
                )
            except OverloadError:
                self.on_outcome(None)
                raise
            self.on_outcome(response)  # without the wait for one that was lost or asleep
            return _after_waiting(response, sent_s - began_s)

    def choose(self, inputs: int, version: str | None = None, place: str | None = None) -> Replica:
        """The replica for a request with `inputs` inputs. Raises `UnavailableError` if none is ready."""
        replicas = self._model.replicas
        if version is None and place is None and len(replicas) > 2:
            drawn = self._chance.sample(replicas, 2)
            if drawn[0].ready and drawn[1].ready:  # nearly always: the others need not be looked at
                return choose(drawn, inputs, self._chance)
        able = self._able(version)
        if not able:
            raise self._model.unavailable()
        if place is not None:
            return of_place(able, place)
        return choose(able, inputs, self._chance)

    # ----------------------------------------------------------------------------------------------------

    async def _woken(self, asked: Asked) -> Asked:
        """Start a model that is asleep; returns the parameters with the time that remains then.

        Raises `UnavailableError` if there is no time for that, and `DeadlineError` if it takes too long.
        """
        model, began_s = self._model, time.monotonic()
        model.wake()
        slo_ms = math.inf if asked.latency_slo_ms is None else asked.latency_slo_ms
        left_s, expected_s = min(asked.time_remaining_ms, slo_ms) / 1e3, model.sleep.expected_s
        if expected_s > left_s:
            takes = f"which takes about {expected_s:.1f} s; the request has {left_s:.1f} s"
            why = f"model '{model.name}' was asleep and is being started, {takes}"
            raise UnavailableError(why, retry_after_s=expected_s)
        try:
            await model.wait_until_ready(asked.time_remaining_ms / 1e3)
        except ConfigError:
            raise model.unavailable() from None
        except UnavailableError as error:
            if not model.wanted:
                raise
            raise DeadlineError(f"the deadline passed while the model was being started: {error}") from None
        self.parking.started()
        waited_ms = 1e3 * (time.monotonic() - began_s)
        return _admitted(asked, max(1.0, asked.time_remaining_ms - waited_ms))

    async def _infer(self, tensor: Any, asked: Asked, version: str | None) -> tuple[Any, float]:
        """Return the response, and when the request was sent to the replica that answered."""
        began_s = time.monotonic()
        inputs = inputs_in(tensor)
        first = self.choose(inputs, version, asked.place)
        try:
            return await first.infer(tensor, asked, version), began_s
        except UnavailableError as error:
            remaining_ms = asked.time_remaining_ms - 1e3 * (time.monotonic() - began_s)
            able = self._able(version)
            others = [each for each in able if each is not first and (version is None or each.has(version))]
            if not others or remaining_ms <= 0.0:
                raise await first.explained(error) from error
        second = choose(others, inputs, self._chance)
        self.asked_again += 1
        _log.info("retried on another replica", extra={"model": self._model.name, "replica": second.number})
        again_s = time.monotonic()
        try:
            return await second.infer(tensor, _admitted(asked, remaining_ms), version), again_s
        except UnavailableError as error:
            raise await second.explained(error) from error

    def _able(self, version: str | None) -> list[Replica]:
        """The replicas that are ready: those that have the requested version, if any does."""
        ready = [replica for replica in self._model.replicas if replica.ready]
        if version is None or len(ready) < 2:
            return ready
        return [replica for replica in ready if replica.has(version)] or ready


def _admitted(asked: Asked, remaining_ms: float) -> Asked:
    """A request that was admitted before: it may be late, but must not be refused for its SLO now."""
    return asked._replace(time_remaining_ms=remaining_ms, latency_slo_ms=None)


def _after_waiting(response: Any, waited_s: float) -> Any:
    """Count the time before the request was sent as time in the queue."""
    response.queue_ms += 1e3 * waited_s
    response.latency_ms += 1e3 * waited_s
    return response


def _nothing(response: Any) -> None:
    """Ignore the response."""
