"""Engines that run in the background to compare answers with the reference's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch import Tensor

from gati.adaptation.deployments import Deployed
from gati.adaptation.probe import Probe
from gati.adaptation.recall_records import Looked
from gati.composition.load import Served
from gati.engine.engine import Engine
from gati.engine.exits import Prediction
from gati.guard.auditor import Given

_KEPT = 2  # one that serves, one on trial
Of = TypeVar("Of")
Made = TypeVar("Made")


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
        return _made_of(served, self._twins, lambda: served.engine.twin())

    def probe(self, version: Deployed) -> Probe:
        """The probe that runs all settings of a version."""
        return _made_of(version, self._probes, lambda: Probe(version.served, version.settings))


def _made_of(original: Of, made: dict[int, tuple[Of, Made]], make: Callable[[], Made]) -> Made:
    """What was `made` of an original, by its `id`, or is made now; the newest are kept."""
    if id(original) not in made:
        while len(made) >= _KEPT:
            del made[next(iter(made))]
        made[id(original)] = original, make()
    return made[id(original)][1]
