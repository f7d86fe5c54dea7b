"""Engines that run in the background to compare answers with the reference's."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gati.adaptation.deployments import Deployed
from gati.adaptation.probe import Probe
from gati.adaptation.recall import Looked
from gati.composition.load import Served
from gati.engine.engine import Engine
from gati.engine.exits import Prediction
from gati.guard.auditor import Given

_KEPT = 2  # one that serves, one on trial


class Ticket(NamedTuple):
    """A request of `place`, if known. `prediction` and `looked` as in `Given`."""

    x: Tensor  # [1, ...]
    request: int
    time_s: float
    source: str
    prediction: Prediction
    looked: Looked | None = None
    place: str | None = None

    @property
    def given(self) -> Given:
        """The answer, in the auditor's form."""
        return Given(self.prediction, self.looked)


class Shadow:
    """Engines for the auditing thread: `reference`, to compare answers with, and copies of engines."""

    def __init__(self, reference: Engine) -> None:
        self._reference = reference
        self._twins: dict[int, tuple[Served, Engine]] = {}  # by the `id` of the original
        self._probes: dict[int, tuple[Deployed, Probe]] = {}

    def reference(self, x: Tensor) -> Prediction:
        """The reference's answer to an input [1, ...]."""
        return self._reference.base(x)[0]

    def caches(self, served: Served, *, threaded: bool) -> Engine:
        """An engine with the caches of `served`: its own, or a copy if `threaded`."""
        if not threaded:
            return served.engine
        if id(served) not in self._twins:
            while len(self._twins) >= _KEPT:
                del self._twins[next(iter(self._twins))]
            self._twins[id(served)] = served, served.engine.twin()
        return self._twins[id(served)][1]

    def probe(self, version: Deployed) -> Probe:
        """The probe that runs all settings of a version."""
        if id(version) not in self._probes:
            while len(self._probes) >= _KEPT:
                del self._probes[next(iter(self._probes))]
            self._probes[id(version)] = version, Probe(version.served, version.settings)
        return self._probes[id(version)][1]
