"""Many models in one thread: they take turns, and a failing one does not delay the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gati.errors import NotFoundError, UnavailableError, first_line
from services.adaptation.settings import AdaptationSettings, AdaptedModel
from services.again import keep_on
from services.pausing import Pausable
from services.wire.gen.ttypes import AdaptationStatus, Health

_LONGEST_PAUSE_S = 60.0


class Adapting(Protocol):
    """The interface of `services.adaptation.model.ModelAdaptation`."""

    def look(self, *, asked: bool = False) -> None:
        """Renew the caches if it is time, or on request."""

    def status(self) -> Any:
        """The wire's `AdaptationStatus`."""

    def close(self) -> None:
        """Remove local files."""


@dataclass
class _Slot:
    """A described model; `model` is None until it is open.

    `failure` is the error of the last look, if it had one, at `failed_s` (seconds since 1970).
    """

    described: AdaptedModel
    model: Adapting | None = None
    failure: str = ""
    failed_s: float | None = None


class _Job(NamedTuple):
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class Turns:
    """Stride scheduling of one thread: the model that used least relative to its share is next.

    `shares` may have any scale. An idle model does not accumulate unused time.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        total = sum(shares.values())
        self.shares = {name: share / total for name, share in shares.items()}
        self.used_s = dict.fromkeys(shares, 0.0)
        self._pass = dict.fromkeys(shares, 0.0)  # seconds used, divided by the share
        self._least = 0.0  # pass of the model that had the last turn

    def next(self, waiting: Collection[str]) -> str:
        """Return the next of the waiting models; ties are broken by their order."""
        for name in waiting:
            self._pass[name] = max(self._pass[name], self._least)
        chosen = min(waiting, key=lambda name: self._pass[name])
        self._least = self._pass[chosen]
        return chosen

    def used(self, name: str, seconds: float) -> None:
        """Add the time that a turn has used."""
        self.used_s[name] += seconds
        self._pass[name] += seconds / self.shares[name]


class Adaptations:
    """The calls of `service Adaptation`; one thread does all work on models, scheduled by their shares.

    `open_model` opens a model in that thread, with retries until it succeeds.
    """

    def __init__(
        self, settings: AdaptationSettings, open_model: Callable[[AdaptedModel, AdaptationSettings], Adapting]
    ) -> None:
        self._settings = settings
        self._open_model = open_model
        self._slots = {model.name: _Slot(model) for model in settings.models}
        self._turns = Turns({model.name: model.share for model in settings.models})
        self._waiting: dict[str, list[_Job]] = {}
        self._working: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gati-adaptation")
        self._pausable = Pausable(settings.pausing)
        self._started = False

    def start(self) -> None:
        """Accept calls."""
        self._started = True

    async def keep_looking(self) -> None:
        """Check every model periodically until cancelled; a failing one does not stop the others."""
        await asyncio.gather(*map(self._keep_looking, self._slots))

    async def _keep_looking(self, name: str) -> None:
        slot = self._slots[name]

        def failed(error: Exception) -> None:
            slot.failure, slot.failed_s = first_line(error), time.time()

        async def once() -> None:
            await self._run(name, lambda: self._opened(slot).look())
            slot.failure = ""

        await keep_on(
            f"adaptation of '{name}'",
            once,
            every_s=self._settings.look_every_s,
            longest_s=_LONGEST_PAUSE_S,
            failed=failed,
        )

    def close(self) -> None:
        """Remove local files."""
        for slot in self._slots.values():
            if slot.model is not None:
                slot.model.close()

    async def adapt(self, model: str) -> Any:
        """Look for better caches immediately."""
        if model not in self._slots:
            raise NotFoundError(f"no model '{model}'; there are: {', '.join(self._slots)}")
        slot = self._slots[model]
        if slot.model is None:
            why = f" ({slot.failure})" if slot.failure else ""
            raise UnavailableError(f"model '{model}' is not open yet{why}", retry_after_s=1.0)
        await self._run(model, lambda: self._opened(slot).look(asked=True))
        return self._status(slot)

    async def status(self) -> Any:
        """Return the status of every model that was opened or failed to open."""
        return [self._status(slot) for slot in self._slots.values() if slot.model or slot.failure]

    async def health(self) -> Any:
        """Return ready once calls are accepted, even if a model cannot be opened."""
        return Health(ready=self._started, draining=False, state="serving" if self._started else "loading")

    # ----------------------------------------------------------------------------------------------------

    def _opened(self, slot: _Slot) -> Adapting:
        if slot.model is None:
            slot.model = self._open_model(slot.described, self._settings)
        return slot.model

    def _status(self, slot: _Slot) -> Any:
        name = slot.described.name
        if slot.model is None:
            found = AdaptationStatus(name, 0, 0, False, "", "", 0.0, 0.0)
        else:
            found = slot.model.status()
        if slot.failure:
            found.outcome, found.message, found.changed_s = "failed", slot.failure, slot.failed_s
        found.used_s, found.share = self._turns.used_s[name], self._turns.shares[name]
        return found

    async def _run(self, name: str, work: Callable[[], Any]) -> Any:
        """Run `work` for a model in its turn; raises its errors."""
        job = _Job(work, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(name, []).append(job)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await job.done

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            name = self._turns.next(self._waiting)
            job = self._waiting[name].pop(0)
            if not self._waiting[name]:
                del self._waiting[name]
            result, error, used_s = await loop.run_in_executor(self._thread, self._timed, job.work)
            self._turns.used(name, used_s)
            if job.done.done():  # its caller was cancelled
                continue
            if error is None:
                job.done.set_result(result)
            else:
                job.done.set_exception(error)

    def _timed(self, work: Callable[[], Any]) -> tuple[Any, Exception | None, float]:
        """Return the result or error of `work`, and its processor time in this thread."""
        import torch

        torch.set_num_threads(self._settings.threads)
        began_s = time.thread_time()
        try:
            with self._pausable.computing():
                return work(), None, time.thread_time() - began_s
        except Exception as error:  # raised in the caller; other models continue
            return None, error, time.thread_time() - began_s
