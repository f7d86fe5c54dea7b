"""Autoscaling: sets the number of replicas of a model, as few as possible with a short queueing delay.

The criterion is the queueing delay, not the load of cores: a network may keep all cores busy while the queue
is empty, or wait for a disk while the queue is long. A replica is added after a short overload, and removed
after a longer time in which one fewer would have sufficed. After each change, the number stays until its
effect can be measured.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from services.again import keep_on
from services.scheduler.models import Model

_log = logging.getLogger("gati.scheduler")

_LOOK_S = 1.0
_LATE_SHARE = 0.1  # a larger share of recent requests that waited too long or were refused is overload
_FULL = 0.7  # largest load of the remaining replicas when one is removed
_MOST_PATIENCE = 32
_FEWEST = 3  # requests needed to detect overload


@dataclass(frozen=True)
class Bounds:
    """Between `fewest` and `most` replicas such that nine of ten requests wait no longer than `delay_ms`.

    Decisions depend on the requests of the last `up_s`. A replica is added if too many of them have waited
    too long, throughout `up_s`. One is removed if one fewer would have sufficed for `down_s`, or for a
    multiple of that if the last removed one was soon needed again. Without a request for `idle_s`, all stop
    until the next request.
    """

    fewest: int
    most: int
    delay_ms: float
    up_s: float = 5.0
    down_s: float = 60.0
    idle_s: float = math.inf


class _Answer(NamedTuple):
    at_s: float
    waited_ms: float  # infinite if it was refused for overload
    work_s: float  # time that it used one replica


class Sizing:
    """Decides the number of replicas of one model from the waits and refusals of its requests."""

    def __init__(self, bounds: Bounds, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._answers: deque[_Answer] = deque()
        self._shrunk_s = -math.inf
        self._patience = 1
        self._changed_s = clock()
        self._awaited_s = clock()  # when a replica was last not ready
        self._needed_s = clock()  # when all replicas were last needed
        self._enough_s = clock()  # when the replicas last sufficed

    def answered(self, waited_ms: float, work_s: float) -> None:
        """Record an answered request: how long it waited for a replica, and how long it used one."""
        self._answers.append(_Answer(self._clock(), waited_ms, work_s))

    def refused(self) -> None:
        """Record a request that was refused for overload."""
        self.answered(math.inf, 0.0)

    def wanted(self, count: int, ready: int) -> int:
        """Return the wanted number of replicas; there are `count` now, and `ready` of them answer."""
        now_s, bounds = self._clock(), self._bounds
        while self._answers and self._answers[0].at_s < now_s - bounds.up_s:
            self._answers.popleft()
        late = sum(answer.waited_ms > bounds.delay_ms for answer in self._answers)
        is_late = len(self._answers) >= _FEWEST and late > _LATE_SHARE * len(self._answers)
        busy = sum(answer.work_s for answer in self._answers) / bounds.up_s  # average number of replicas
        if is_late or busy > _FULL * (count - 1):
            self._needed_s = now_s
        if not is_late:
            self._enough_s = now_s
        if ready < count:  # wait: the replica that is starting may suffice
            self._awaited_s = now_s
        if count != min(max(count, bounds.fewest), bounds.most):
            return self._change(min(max(count, bounds.fewest), bounds.most))
        late_s = now_s - max(self._changed_s, self._awaited_s, self._enough_s)
        idle_s = now_s - max(self._changed_s, self._needed_s)
        patience_s = self._patience * bounds.down_s
        held = now_s - self._shrunk_s > 2.0 * patience_s
        if late_s >= bounds.up_s and count < bounds.most:
            self._patience = 1 if held else min(2 * self._patience, _MOST_PATIENCE)
            return self._change(count + 1)
        if idle_s >= patience_s and count > bounds.fewest:
            self._shrunk_s = now_s
            return self._change(count - 1)
        return count

    def _change(self, count: int) -> int:
        self._changed_s = self._clock()
        self._answers.clear()
        return count


class Autoscaler:
    """Adjusts the number of replicas of one model to its requests."""

    def __init__(self, model: Model, bounds: Bounds, drain_timeout_s: float) -> None:
        self._model = model
        self._sizing = Sizing(bounds)
        self._idle_s = bounds.idle_s
        self._input_s = 0.0  # time per input, averaged over the replicas at the last check
        self._drain_timeout_s = drain_timeout_s
        model.dispatcher.on_outcome = self._take
        model.numbered |= bounds.most > 1

    async def keep_looking(self) -> None:
        """Check every second, until cancelled."""
        what = f"replicas of '{self._model.name}'"
        await keep_on(what, self._look, every_s=_LOOK_S, longest_s=_LOOK_S)

    async def _look(self) -> None:
        model = self._model
        if model.sleep.idle_s >= self._idle_s:
            await model.fall_asleep(self._idle_s, self._drain_timeout_s)
        if not model.wanted or model.sleep.asleep:
            return
        known = [each_s for each in model.replicas if (each_s := each.load.seconds_an_input) is not None]
        self._input_s = sum(known) / len(known) if known else 0.0
        count = len(model.replicas)
        wanted = self._sizing.wanted(count, sum(replica.ready for replica in model.replicas))
        if wanted != count:
            _log.info("replicas changed", extra={"model": model.name, "before": count, "now": wanted})
            await model.scale(wanted, self._drain_timeout_s)

    def _take(self, response: Any) -> None:
        if response is not None:
            self._sizing.answered(response.queue_ms, self._input_s * len(response.answers))
            return
        loads = [replica.load for replica in self._model.replicas if replica.ready]
        # If a replica was idle, more replicas would refuse the request, too.
        if loads and all(load.outstanding for load in loads):
            self._sizing.refused()
