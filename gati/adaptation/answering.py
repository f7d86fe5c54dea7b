"""Engines for the thread that answers; one at a time reserves cores for its lookups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from gati.adaptation.deployments import Deployed
from gati.engine.engine import Engine
from gati.engine.exits import Prediction
from gati.errors import DataError
from gati.guard.auditor import Decided


class AnsweringEngines:
    """Answers requests by the engine that serves, or without lookups by `base` or `reference`.

    Overlapped lookups reserve a core and confine the calling thread to the others. They are released when
    another engine serves, when no lookups run, and by `close`. Call it from one thread at a time.
    """

    def __init__(self, base: Engine, reference: Engine) -> None:
        self._base, self._reference = base, reference
        self._serving: Engine | None = None

    def check(self, x: Tensor) -> None:
        """Raise DataError unless it is one input [1, ...] of the network."""
        fits = isinstance(x, Tensor) and x.shape == (1, *self._base.traced.input_shape)
        if not fits and len(self._base.checked(x)) != 1:
            raise DataError(f"an adaptation answers one input at a time, [1, ...]; got {list(x.shape)}")

    def __call__(self, x: Tensor, decided: Decided[Deployed]) -> Prediction:
        """The answer to an input [1, ...]."""
        if decided.lookups:
            return self._looked_up(x, decided.deployed.served.engine)
        self.close()
        if decided.may_hit:  # lookups only pause
            return self._base.base(x)[0]
        return self._reference.base(x)[0]

    @contextmanager
    def released(self) -> Iterator[None]:
        """Give the calling thread the reserved core for a while."""
        serving = self._serving
        self.close()
        try:
            yield
        finally:
            if serving is not None:
                serving.open()
                self._serving = serving

    def close(self) -> None:
        """Release the reserved core; call it from the thread that answers."""
        if self._serving is not None:
            self._serving.close()
            self._serving = None

    def _looked_up(self, x: Tensor, engine: Engine) -> Prediction:
        if engine is not self._serving:
            self.close()  # first: the next engine shares out the cores that this thread has
            self._serving = engine
        return engine(x)[0]
