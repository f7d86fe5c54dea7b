"""Replans pipelines in the background, with current figures from traffic and audits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from gati.errors import GatiError
from gati.pipelines import LivePlanner
from services.scheduler.models import Model
from services.scheduler.replicas import Replica

_log = logging.getLogger("gati.scheduler")

_LARGEST_PART = 0.05  # largest share of the time that planning takes, in one thread


class _Audited(NamedTuple):
    """The audits of one replica's active version, as counted at some time."""

    audits: int
    losses: int


class Replanning:
    """Keeps the figures of one pipeline's planner current. Call it from the event loop's thread.

    Call `look` after each answer; usually it costs one comparison. When planning is due, it starts a thread:
    at most one, and so rarely that planning takes at most a twentieth of the time.
    """

    def __init__(self, planner: LivePlanner, models: Mapping[tuple[str, str], Model]) -> None:
        self.took_s = 0.0  # total time of planning so far
        self._planner = planner
        self._options: dict[Model, list[tuple[str, str]]] = {}  # stages and options that each model serves
        for option, model in models.items():
            self._options.setdefault(model, []).append(option)
        self._certified: dict[Model, tuple[str, str | None]] = {}  # the version and certificate taken in
        self._audited: dict[Model, dict[Replica, _Audited]] = {}  # since then
        self._task: asyncio.Task[None] | None = None
        self._not_before_s = 0.0

    def look(self) -> None:
        """Replan in the background if it is due."""
        if not self._planner.due or self._task is not None or time.monotonic() < self._not_before_s:
            return
        self._task = asyncio.create_task(self._replan())

    def close(self) -> None:
        """Start no more planning. A thread that is planning finishes on its own."""
        if self._task is not None:
            self._task.cancel()

    async def _replan(self) -> None:
        began_s = time.monotonic()
        try:
            self.take_in_audits()
            await asyncio.to_thread(self._planner.refresh)
        except GatiError as error:  # the current plan stays in use
            _log.error("replanning failed", extra={"reason": str(error)})
        finally:
            ended_s = time.monotonic()
            self.took_s += ended_s - began_s
            self._not_before_s = ended_s + (ended_s - began_s) / _LARGEST_PART
            self._task = None

    def take_in_audits(self) -> None:
        """Update the planner with new certificates of the models, and with the audits since the last call."""
        for model, options in self._options.items():
            if not model.ready:
                continue
            active = model.active
            if self._certified.get(model) != (certified := (active.version, active.certificate_id)):
                self._certified[model], self._audited[model] = certified, {}
                self._planner.certify(options, _counted(model.certificate(active.version)), active.agreement)
            agreed, lost = self._new_audits(model, active.version)
            if agreed or lost:
                self._planner.audit(*options[0], agreed=agreed, lost=lost)

    def _new_audits(self, model: Model, version: str) -> tuple[int, int]:
        """How many audits since the last call agreed, and how many did not.

        By replica: one that comes, or comes back, has counted audits of requests that the planner has no
        other figures of, and one that goes takes nothing away.
        """
        earlier, agreed, lost = self._audited[model], 0, 0
        # Replicas that were removed for good are dropped.
        known = {each: earlier[each] for each in model.replicas if each in earlier}
        self._audited[model] = known
        for replica in model.replicas:
            versions = replica.info.versions if replica.ready else ()
            found = next((each for each in versions if each.version == version), None)
            if found is None:
                continue
            now = _Audited(found.audits or 0, found.losses or 0)
            before = known.get(replica, now)
            known[replica] = now
            if now.audits > before.audits:
                more = min(max(0, now.losses - before.losses), now.audits - before.audits)
                agreed, lost = agreed + now.audits - before.audits - more, lost + more
        return agreed, lost


def _counted(certificate: dict[str, Any] | None) -> float | None:
    """Return the share of answers that agreed in a certificate's counts; None without counts."""
    if not certificate or not certificate.get("n"):
        return None
    return 1.0 - float(certificate.get("losses", 0)) / float(certificate["n"])
