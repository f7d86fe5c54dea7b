"""The live page of each model at `/dashboard/NAME`: its answers, their exits, and the state of the guard."""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response

from gati.errors import NotFoundError
from gati.types import BASE
from services.again import keep_on
from services.live import LiveState, live_router
from services.live.state import AUDITS
from services.scheduler.models import Model
from services.scheduler.reasons import without_folders

_FLOAT = struct.Struct("<f")
_INTERVAL_S = 1.0


class Dashboard:
    """The contents of one model's page: it receives every answer and polls the service once a second."""

    def __init__(self, model: Model) -> None:
        self.state = LiveState(model.name, pictures=False)
        self._model = model
        self._version = ""
        self._audits: tuple[int, int] | None = None
        self._stopped = False
        self._pending = ""

    def answered(self, found: Any, latency_ms: float) -> None:
        """Show the answers of a response."""
        names = self._model.info.class_names
        for each in found.answers:
            index = each.class_index
            self.state.publish(
                {
                    "time_s": time.time(),
                    "source": "REST",
                    "class_name": str(index) if names is None else names[index],
                    "probability": _FLOAT.unpack_from(each.probabilities, _FLOAT.size * index)[0],
                    "exit": each.exit,
                    "latency_ms": latency_ms,
                    "version": found.version,
                }
            )

    async def keep_looking(self) -> None:
        """Poll for versions, audits and alarms and show them, until cancelled."""
        await keep_on(
            f"dashboard of '{self._model.name}'",
            self._look,
            every_s=_INTERVAL_S,
            longest_s=_INTERVAL_S,
            level=logging.DEBUG,
        )

    async def _look(self) -> None:
        if self._model.sleep.asleep:
            self.state.source("paused", without_folders(self._model.cause))
            return
        if not self._model.ready:
            self.state.source("reconnecting", without_folders(self._model.cause))
            return
        self.state.source("running")
        found = await self._model.statistics()  # also updates the model's versions
        active = self._model.active
        if active.version != self._version:
            self._version = active.version
            self.state.exits([name for name in active.exits if name != BASE])
            self.state.event("version", f"{active.version} is active now: {active.promise}")
            self.state.no_audits()
            self._audits = None  # it may have been audited before this process watched
        memory = found.memory
        recalls = active.agreement is None and memory is not None and memory.level > 0
        self.state.promise(memory.agreement if recalls else active.agreement)
        self.state.rests(bool(active.resting))
        self._audited(active.audits or 0, active.losses or 0)
        self._on_trial(active)
        if found.stopped != self._stopped:
            self._stopped = found.stopped
            text = "caches stopped, the base model answers" if found.stopped else "caches answer again"
            self.state.event("alarm" if found.stopped else "recovered", text)

    def _audited(self, audits: int, losses: int) -> None:
        """Show the audits of the active version's answers."""
        if (audits, losses) == self._audits:
            return
        known, (before, lost_before) = self._audits is not None, self._audits or (0, 0)
        self._audits = audits, losses
        lost = max(losses - lost_before, 0) if known else 0
        agreed = max(audits - before - lost, 0) if known else 0
        self.state.audits([True] * min(agreed, AUDITS) + [False] * min(lost, AUDITS), audits, losses)

    def _on_trial(self, active: Any) -> None:
        """Show the proof of the pending version, or that of the active one if its caches do not answer."""
        pending = self._model.pending
        name = "" if pending is None else pending.version
        if name != self._pending:
            self._pending = name
            if pending is not None:
                self.state.event("trial", f"{name} takes over when it is proven")
        answers = active.state not in ("probation", "stopped")
        tried = pending or (None if answers else active)
        proof = None if tried is None else tried.proof
        if tried is None or proof is None:
            self.state.proof(None)
        else:
            self.state.proof(tried.version, proof.audits, proof.losses, proof.needed, waits=answers)


def dashboards_router(dashboards: Mapping[str, Dashboard], stopping: threading.Event) -> APIRouter:
    """`/dashboard` for the first model, `/dashboard/NAME` for each; viewers leave once it is `stopping`.

    Redirects are relative to the path of the request, as a proxy may add a prefix, or TLS.
    """
    found = APIRouter(include_in_schema=False)

    @found.get("/dashboard")
    async def first() -> Response:
        return RedirectResponse(f"dashboard/{next(iter(dashboards))}/")

    @found.get("/dashboard/{name}")
    async def without_slash(name: str) -> Response:
        if name not in dashboards:
            raise NotFoundError(f"no model '{name[:64]}'; there are: {', '.join(dashboards)}")
        return RedirectResponse(f"{name}/")

    for name, dashboard in dashboards.items():
        router = live_router(dashboard.state, stopping=stopping)
        found.include_router(router, prefix=f"/dashboard/{name}")
    return found
