"""The scheduler's state, which all endpoints share: models, pipelines, and counts."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from starlette.requests import Request

from gati.errors import DeadlineError, GatiError, NotFoundError, OverloadError, UnavailableError
from services.config import ServeConfig
from services.http import waited_s
from services.pool import BoundedPool
from services.scheduler.budget import ByteBudget, Charge
from services.scheduler.dashboard import Dashboard
from services.scheduler.entrance import CrowdedError, Entrance
from services.scheduler.keys import KeyRing
from services.scheduler.lag import LagMeter, Shares
from services.scheduler.metrics import Metrics
from services.scheduler.models import Model
from services.scheduler.pipelines import ServedPipeline
from services.scheduler.replicas import Asked
from services.scheduler.scaling import Autoscaler
from services.scheduler.telemetry import open_telemetry
from services.scheduler.timing import Timing, trace_id_of
from services.scheduler.tracing import LONGEST_PATH
from services.supervisor import Supervised

_log = logging.getLogger("gati.scheduler")

_DEFAULT_PRIORITY = 2
_MANY = 8  # requests being processed; with fewer, none is refused for lag
_QUIET_S = 1.0  # between log lines about refused connections
# The largest lag of the event loop; beyond it, requests are refused before they are read. Each request takes
# many turns of the loop, so the limit is a fraction of the smallest SLO, within bounds.
_LARGEST_LAG_OF_SLO = 1 / 24
_LEAST_LAG_MS, _MOST_LAG_MS = 8.0, 250.0


class Scheduler:
    """Models and pipelines by name. `start` starts all of them, `drain` stops them.

    `background` is the process that retrains caches or fits predictors; it starts and stops with them.
    """

    def __init__(
        self,
        config: ServeConfig,
        models: dict[str, Model],
        pipelines: dict[str, ServedPipeline],
        background: Supervised | None = None,
        autoscalers: Sequence[Autoscaler] = (),
    ) -> None:
        self.config = config
        self.models = models
        self.pipelines = pipelines
        self.metrics = Metrics(models, pipelines)
        self.page: asyncio.Task[bytes] | None = None  # of the metrics, that is made now or was last
        self.telemetry = open_telemetry(config)
        self.keys = KeyRing(config)
        shared = len(models) + len(pipelines) > 1
        self.budget = ByteBudget(config.largest_held_bytes, shared=shared)
        self.pool = BoundedPool("gati-reader", shared=shared)
        self.background = background
        self.dashboards = {name: Dashboard(model) for name, model in models.items()}
        self._autoscalers = autoscalers
        self._looking: list[asyncio.Task[None]] = []
        self.leaving = False  # reported as not ready, but still answers
        self.draining = False
        self.stopping = threading.Event()  # set with `draining`: viewers of live pages leave
        self._under_way = 0
        self._receiving = 0  # of these, requests whose bodies have not arrived completely
        kinds = (("models", models), ("pipelines", pipelines))
        self._entrances = {
            f"{kind}/{name}": Entrance(plans=kind == "pipelines") for kind, served in kinds for name in served
        }
        self._nowhere = Entrance()  # for all unknown names: arbitrary paths must not use more and more memory
        self._not_let_in = _SeldomSaid("clients refused")
        self._crowded = _SeldomSaid("refused before reading")
        self._lag = LagMeter()
        self._shares = Shares()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """Whether it is not stopping, and all models except unloaded ones answer or start at a request."""
        wanted = [model for model in self.models.values() if model.wanted]
        return not (self.leaving or self.draining) and all(model.available for model in wanted)

    async def start(self) -> None:
        """Start and connect all models."""
        self._lag.start()
        self._looking = [asyncio.create_task(each.keep_looking()) for each in self.dashboards.values()]
        self._looking += [asyncio.create_task(each.keep_looking()) for each in self._autoscalers]
        for model in self.models.values():
            await model.start()
        if self.background is not None:
            self.background.start()

    def check_lag(self, path: str) -> None:
        """Refuse a request while the event loop is far behind. Raises `CrowdedError`.

        Requests for the model or pipeline with the most requests are refused first: the fewer requests
        another one gets, the larger the lag at which its requests are refused.
        """
        name = self._named_in(path)
        self._shares.add(name)
        # With few requests being processed, another program causes the lag, and refusing would not help.
        if self._lag.lag_ms <= _LEAST_LAG_MS or self._at_work < _MANY:
            return
        least_slo_ms = min((each.least_slo_ms for each in self._entrances.values()), default=math.inf)
        # Without an SLO, short delays do no harm, but a standing queue does.
        lag_ms = self._lag.standing_ms if least_slo_ms == math.inf else self._lag.lag_ms
        largest_ms = min(_MOST_LAG_MS, max(_LEAST_LAG_MS, _LARGEST_LAG_OF_SLO * least_slo_ms))
        if lag_ms * self._shares.of_largest(name) > largest_ms:
            raise CrowdedError(
                f"the scheduler is {self._lag.lag_ms:.0f} ms behind", retry_after_s=2e-3 * self._lag.lag_ms
            )

    def turned_away(self, error: GatiError, client: tuple[str, int] | None) -> None:
        """Count a request whose client was refused. The log gets at most one line per second."""
        reasons = {401: "not_allowed", 403: "forbidden", 415: "media_type"}
        self.metrics.rejected(reasons.get(error.http_status, "not_allowed"))
        self._not_let_in.say({"client": client and client[0], "reason": str(error)})

    def refused(self, reason: str, path: str) -> None:
        """Count a request with that path that was refused before it was in progress."""
        self.metrics.rejected(reason, self._named_in(path))

    def crowded(self, error: CrowdedError, path: str) -> None:
        """Count a request that was refused before it was read."""
        self.refused(error.thrift_code.lower(), path)
        self._crowded.say({"path": path[:LONGEST_PATH], "reason": str(error)})

    @property
    def _waited_ms(self) -> float:
        return self._lag.waited_ms / 2  # on average, a request arrives halfway through the lag

    def arrival_s(self, request: Request) -> float:
        """Estimate when a request arrived that the event loop sees only now."""
        return time.monotonic() - self._waited_ms / 1e3 - waited_s(request.scope)

    async def drain(self) -> None:
        """Refuse new requests, wait for those in progress, and stop the models.

        Requests have `drain_timeout_s`, and then processes have as long to end.
        """
        self.draining = True
        self.stopping.set()
        self._lag.stop()
        for task in self._looking:
            task.cancel()
        for pipeline in self.pipelines.values():
            pipeline.close()
        timeout_s = self.config.drain_timeout_s
        end_s = time.monotonic() + timeout_s
        for model in self.models.values():
            model.retire()
        if self.background is not None:
            self.background.retire()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            _log.warning(
                "requests in progress were not answered in time", extra={"under_way": self._under_way}
            )
        left_s = max(0.0, end_s - time.monotonic())
        ours = [model.stop(timeout_s, answers_s=left_s) for model in self.models.values()]
        if self.background is not None:
            ours.append(self.background.stop(timeout_s))
        if self.telemetry is not None:
            ours.append(asyncio.to_thread(self.telemetry.close))
        await asyncio.gather(*ours)

    def model(self, name: str) -> Model:
        """Return the model of that name. Raises `NotFoundError`."""
        if name not in self.models:
            known = ", ".join(self.models) or "none"
            if self.pipelines:
                known += f"; pipelines: {', '.join(self.pipelines)}"
            raise NotFoundError(f"no model '{name[:64]}'; there are: {known}")
        return self.models[name]

    def pipeline(self, name: str) -> ServedPipeline:
        """Return the pipeline of that name. Raises `NotFoundError`."""
        if name not in self.pipelines:
            known = ", ".join(self.pipelines) or "none"
            raise NotFoundError(f"no pipeline '{name[:64]}'; there are: {known}")
        return self.pipelines[name]

    def timing(
        self,
        arrived_s: float,
        latency_slo_ms: float | None,
        timeout_ms: float | None,
        priority: int | None,
        traceparent: str | None,
    ) -> Timing:
        """Return a request's limits. With an SLO, the default timeout is `late_factor` times the SLO.

        A `priority` of None or 0 is the default.
        """
        config = self.config
        if timeout_ms is None and latency_slo_ms is None:
            timeout_ms = config.request_timeout_ms
        else:
            if timeout_ms is None:  # however long the SLO is: no request may end before it
                timeout_ms = config.late_factor * (latency_slo_ms or 0.0)
            timeout_ms = min(timeout_ms, config.longest_timeout_ms)
        rank = max(priority or _DEFAULT_PRIORITY, config.highest_priority)
        return Timing(arrived_s, latency_slo_ms, timeout_ms, rank, trace_id_of(traceparent))

    def _named_in(self, path: str) -> str:
        """The model or pipeline that the path of a request is about, as `_known` returns it."""
        return self._known("/".join(path.split("/", 4)[2:4]))

    def _known(self, name: str) -> str:
        """`models/NAME` or `pipelines/NAME` if there is such a one, else an empty string."""
        return name if name in self._entrances else ""

    def entrance(self, name: str) -> Entrance:
        """Return the statistics of requests for `models/NAME` or `pipelines/NAME`."""
        return self._entrances.get(name, self._nowhere)

    def check_room(self, name: str, arrived_s: float) -> None:
        """Refuse a request that would not be answered in time. Raises `CrowdedError`."""
        try:
            self.entrance(name).check(1e3 * (time.monotonic() - arrived_s))
        except CrowdedError:
            for model in self._first_asked(name):
                model.dispatcher.on_outcome(None)  # with more replicas, it could have been answered in time
            raise

    def _first_asked(self, name: str) -> tuple[Model, ...]:
        """The models of which one is asked first for `models/NAME` or `pipelines/NAME`."""
        kind, _, own = name.partition("/")
        if kind == "pipelines":
            return self.pipelines[own].first_models if own in self.pipelines else ()
        return (self.models[own],) if own in self.models else ()

    def under_way(self, name: str = "") -> _UnderWay:
        """Count a request for `models/NAME` or `pipelines/NAME`, its memory, and the reason if it is refused.

        Returns a context manager whose value is the `Charge`. Raises `UnavailableError` while draining.
        """
        self.refuse_when_draining(name)
        return _UnderWay(self, name)

    def refuse_when_draining(self, name: str = "") -> None:
        """Raise `UnavailableError` while draining."""
        if self.draining:
            refused = UnavailableError("the server is shutting down; try again", retry_after_s=1.0)
            self.metrics.rejected(refused.thrift_code.lower(), self._known(name))
            raise refused

    def receiving(self, name: str = "") -> _Receiving:
        """Mark a request in progress as waiting for its client while its body is read, as a context manager.

        Otherwise, bodies that never arrive would make the server look busy, and other requests be refused.
        """
        return _Receiving(self, name)

    @property
    def _at_work(self) -> int:
        return self._under_way - self._receiving

    def outside_ms(self, name: str) -> float:
        """The time outside services that most requests for `models/NAME` or `pipelines/NAME` still take.

        It counts from when they are sent. In full only for the one with the most requests: if a flood of
        requests for another one causes the delay, the few requests for this one may still be in time, and
        refusing them would hardly reduce the load. 0 for a request that is alone: estimates made under load
        do not apply.
        """
        entrance = self.entrance(name)
        return 0.0 if entrance.at_work == 1 else entrance.outside.value * self._shares.of_largest(name)

    def asked(self, name: str, timing: Timing, place: str | None = None) -> Asked:
        """Return the parameters for the inference service of `name` (`models/NAME`), with the remaining time.

        `outside_ms` is subtracted from the SLO.

        Raises `OverloadError` if no time remains of the SLO, and `DeadlineError` if the timeout has passed.
        """
        elapsed_ms, outside_ms = timing.elapsed_ms(), self.outside_ms(name)
        slo_ms = timing.latency_slo_ms
        if slo_ms is not None:
            slo_ms -= elapsed_ms + outside_ms
            if slo_ms <= 0.0:
                raise OverloadError(
                    f"{elapsed_ms:.1f} ms passed before the request could be sent to the model, and the way "
                    f"there and back takes about {outside_ms:.1f} ms: too long for the SLO",
                    retry_after_s=0.1,
                )
        remaining_ms = timing.timeout_ms - elapsed_ms
        if remaining_ms <= 0.0:
            raise DeadlineError("the deadline passed before the request could be sent to the model")
        return Asked(remaining_ms, slo_ms, timing.priority, timing.trace_id, place)

    def answered(self, name: str, took_ms: float, service_ms: float) -> None:
        """Record an answered request: the time since it was sent, and the part of it inside a service.

        What passed before, such as the time to receive its body, says nothing about other requests.
        """
        self.entrance(name).answered(max(0.0, took_ms - service_ms) + self._lag.lag_ms)


class _UnderWay:
    """Counts a request in progress. Not a generator, which is slower: there are thousands per second."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self._scheduler, self._entrance, self._name = scheduler, scheduler.entrance(name), name
        self._charge = scheduler.budget.open(name)

    def __enter__(self) -> Charge:
        self._scheduler._under_way += 1
        self._entrance.at_work += 1
        self._scheduler._idle.clear()
        return self._charge.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        scheduler = self._scheduler
        self._charge.__exit__(kind, error, trace)
        if isinstance(error, GatiError):
            if isinstance(error, OverloadError):
                self._entrance.refused()
            scheduler.metrics.rejected(error.thrift_code.lower(), scheduler._known(self._name))
        scheduler._under_way -= 1
        self._entrance.at_work -= 1
        if not scheduler._under_way:
            scheduler._idle.set()


class _Receiving:
    """Marks a request in progress while its body is being read."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self._scheduler, self._entrance = scheduler, scheduler.entrance(name)

    def __enter__(self) -> None:
        self._scheduler._receiving += 1
        self._entrance.at_work -= 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scheduler._receiving -= 1
        self._entrance.at_work += 1


class _SeldomSaid:
    """A log line that appears at most once per second, with the number of events `since` the last one."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._since = 0
        self._said_s = -math.inf

    def say(self, extra: dict[str, object]) -> None:
        """Record an event."""
        self._since += 1
        now_s = time.monotonic()
        if now_s - self._said_s >= _QUIET_S:
            _log.warning(self._text, extra={**extra, "since": self._since})
            self._said_s, self._since = now_s, 0


def scheduler_of(request: Request) -> Scheduler:
    """Return the scheduler that serves a request."""
    scheduler: Scheduler = request.app.state.scheduler
    return scheduler
