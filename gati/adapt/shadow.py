"""What runs beside the serving of requests to compare early answers with the base model's."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gati.adapt.deployments import Deployed
from gati.adapt.recall import RECALL, Looked
from gati.runtime.engine import Engine
from gati.runtime.exits import Prediction
from gati.runtime.load import Served

__all__ = ["Shadow", "Ticket"]


class Ticket(NamedTuple):
    """A request that was answered: `current` is the version, `epoch` the watch's when it was drawn.

    `looked` is what recall said of it, where it was asked.
    """

    x: Tensor  # [1, ...]
    request: int
    time_s: float
    source: str
    current: Deployed
    epoch: int
    audited: bool
    sampled: bool
    prediction: Prediction
    looked: Looked | None = None

    @property
    def recalled(self) -> bool:
        """Whether memory answered."""
        return self.prediction.exit == RECALL


class Shadow:
    """Engines for the thread that audits. The serving thread's may not be called from it."""

    def __init__(self, base: Engine) -> None:
        self._base = base
        self._of: Served | None = None
        self._twin: Engine | None = None

    def base(self, x: Tensor) -> Prediction:
        """The base model's answer to an input [1, ...]."""
        return self._base.base(x)[0]

    def caches(self, served: Served, *, beside: bool) -> Engine:
        """An engine with the caches of `served`; where this thread serves, too, its own will do."""
        if not beside:
            return served.engine
        if self._twin is None or self._of is not served:
            self._of, self._twin = served, served.engine.twin()
        return self._twin
