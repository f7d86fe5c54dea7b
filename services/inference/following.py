"""What happens beside a request: audits for the guard, samples for retraining.

Whether a request is looked at is drawn before anything is known of its answer. One that missed has the base
model's answer already; for one that hit, the base model answers in a queue of its own, after everybody who
waits. When there is no room there, it is not looked at: that hangs on the load, not on the answer.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from torch import Tensor

from gati.adapt.record import Record
from gati.adapt.watch import Event, Watch
from gati.compose.composition import Composition
from gati.errors import GatiError
from gati.runtime.engine import Prediction
from services.inference.counts import Counts
from services.inference.queue import Ask, RequestQueue
from services.inference.settings import InferenceSettings

if TYPE_CHECKING:
    from gati.adapt.writer import BackgroundWriter  # needs SQLAlchemy

__all__ = ["Drawn", "Following", "watch_for"]

_log = logging.getLogger("gati.inference")

_LAST = 10  # the lowest priority
_PATIENCE_S = 30.0
_MOST_WAITING = 64


@dataclass(frozen=True)
class Drawn:
    """What was drawn for a request, and what it was when it came."""

    audit: bool
    sample: bool
    may_hit: bool

    @property
    def looked_at(self) -> bool:
        """Whether the base model's answer is wanted."""
        return self.audit or self.sample


def watch_for(
    composition: Composition | None, settings: InferenceSettings, before: Watch | None
) -> Watch | None:
    """The watch over a composition, None where nothing is promised; one that takes another's place keeps its.

    Caches that take the place of stopped ones answer only after audits have proven them.
    """
    if composition is None or not composition.exits or settings.audit_budget == 0.0:
        return None
    if before is not None:
        before.replaced()
        return before
    return Watch(
        composition.accuracy_target,
        confidence=composition.confidence or 0.95,
        budget=settings.audit_budget,
        on_event=_tell,
    )


class Following:
    """Follows the requests of one version. Its methods belong to the event loop's thread."""

    def __init__(
        self,
        model: str,
        watch: Watch | None,
        early: RequestQueue,
        base: RequestQueue | None,
        *,
        sampling: float,
        writer: BackgroundWriter | None,
        counts: Counts,
    ) -> None:
        self.watch = watch
        self._counts = counts
        self._model = model
        self._early = early
        self._base = base
        self._writer = writer
        self._sampling = sampling if writer is not None else 0.0
        self._dice = random.Random()
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def stopped(self) -> bool:
        """Whether the guard keeps the caches from answering."""
        return self.watch is not None and not self.watch.may_hit

    @property
    def serving(self) -> RequestQueue:
        """The queue in which requests are answered now: the base model's own while the caches are stopped."""
        return self._base if self.stopped and self._base is not None else self._early

    def draw(self) -> Drawn:
        """Decide about the next request, before it is answered."""
        audit = self.watch is not None and self.watch.draw()
        sample = self._sampling > 0.0 and self._dice.random() < self._sampling
        return Drawn(audit, sample, not self.stopped)

    def queue(self, drawn: Drawn) -> RequestQueue:
        """Where the request is answered: by the base model alone while the caches are stopped."""
        return self._early if drawn.may_hit or self._base is None else self._base

    def answered(self, drawn: Drawn, x: Tensor, given: NDArray[Any], prediction: Prediction) -> None:
        """Tell what became of a request; `given` is one input as its client sent it."""
        hit = prediction.exit != "base"
        if self.watch is not None:
            self.watch.answered(hit=hit, audited=drawn.looked_at)
        if not drawn.looked_at or self._base is None:
            return
        if drawn.may_hit and not hit:
            self._looked_at(drawn, given, prediction, prediction)
        elif drawn.may_hit:
            self._later(self._base, x, lambda base: self._looked_at(drawn, given, prediction, base))
        else:  # in the shadow: would the caches have been right?
            self._later(self._early, x, lambda early: self._looked_at(drawn, given, early, prediction))

    async def close(self) -> None:
        """Wait for what is under way."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=_PATIENCE_S)

    # ----------------------------------------------------------------------------------------------------

    def _later(self, queue: RequestQueue, x: Tensor, then: Callable[[Prediction], None]) -> None:
        if queue.waiting >= _MOST_WAITING:
            return
        task = asyncio.create_task(self._ask(queue, x, then))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _ask(self, queue: RequestQueue, x: Tensor, then: Callable[[Prediction], None]) -> None:
        ask: Ask = queue.put(x, priority=_LAST, deadline_s=time.monotonic() + _PATIENCE_S)
        await asyncio.wait([ask.answer])
        try:
            then(ask.answer.result())
        except GatiError as error:
            _log.debug("not looked at", extra={"reason": str(error)})

    def _looked_at(self, drawn: Drawn, given: NDArray[Any], early: Prediction, base: Prediction) -> None:
        agreed = early.class_index == base.class_index
        self._counts.agreed += agreed
        self._counts.disagreed += not agreed
        if self.watch is not None and drawn.may_hit == self.watch.may_hit:  # not of the time before an alarm
            self.watch.audited(agreed=agreed)
        if drawn.sample and self._writer is not None:
            self._keep(given, early, base, agreed)

    def _keep(self, given: NDArray[Any], early: Prediction, base: Prediction, agreed: bool) -> None:
        hit = early.exit != "base"
        record = Record(
            given,
            "image" if given.dtype.kind == "u" else "input",
            base.class_index,
            time.time(),
            self._model,
            exit=early.exit if hit else None,
            agreed=agreed if hit else None,
            probabilities=base.probabilities.numpy(),
        )
        if self._writer is not None:
            self._writer.offer(record)


def _tell(event: Event) -> None:
    level = logging.WARNING if event.state == "stopped" else logging.INFO
    message = "caches stopped by the guard" if event.state == "stopped" else "caches serve again"
    _log.log(level, message, extra={"audits": event.audits, "disagreements": event.losses})
