"""Lookups that run while the network continues; it is cut at every block, to stop soon after a hit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gati.engine.batching import Answer
from gati.engine.exits import BASE, EngineExit, Lookup
from gati.engine.paths.segments import Ready, SegmentsPath
from gati.engine.placement import ParallelLookups, parallel_lookups
from gati.model.cuts import Segment


class _Step(NamedTuple):
    """One segment of a single request's path, with the lookup at its end, if any."""

    run: Callable[..., Any]
    lookup: Lookup | None = None
    threshold: float = 0.0
    exit: str = ""
    overlapped: bool = False
    copy_hidden: bool = False


class OverlappedPath(SegmentsPath):
    """Lookups run on separate cores or a separate stream, for one request at a time.

    Lookups of concurrent requests are inline. A request waits for each lookup before the next one starts, and
    before it returns the base model's answer, so answers do not depend on timing.
    """

    overlapped: ClassVar[bool] = True

    def __init__(
        self,
        ready: Ready,
        device: torch.device,
        pieces: Sequence[Segment],
        exits: Sequence[EngineExit],
        lookup_cores: int,
    ) -> None:
        super().__init__(ready)
        self._lookups: ParallelLookups = parallel_lookups(device, lookup_cores)
        self._free = threading.Lock()
        leaves = {leaving.block: at for at, leaving in enumerate(exits)}
        self._steps: list[_Step] = []
        for piece in pieces:
            at = leaves.get(piece.block or "")
            if at is None:
                self._steps.append(_Step(piece.run))
                continue
            _, lookup, threshold, exit, _ = ready.stages[at]
            overlapped = exits[at].placement == "overlapped"
            self._steps.append(
                _Step(piece.run, lookup, threshold, exit, overlapped, piece.hidden_changes_later)
            )

    def answer(self, x: Tensor) -> Answer:
        """As `RequestPath.answer`."""
        if not self._free.acquire(blocking=False):
            return self.inline(x)
        try:
            self._lookups.open()
            return self._answer(x)
        finally:
            self._free.release()

    def inline(self, x: Tensor) -> Answer:
        """As `RequestPath.inline`."""
        return super().answer(x)

    def open(self) -> None:
        """As `RequestPath.open`."""
        with self._free:
            self._lookups.open()

    def close(self) -> None:
        """As `RequestPath.close`."""
        with self._free:
            self._lookups.close()

    def _answer(self, x: Tensor) -> Answer:
        lookups = self._lookups
        pending: _Step | None = None
        carried: Any = (x,)
        try:
            for step in self._steps:
                carried = step.run(*carried)
                if pending is not None and (
                    step.lookup is not None or step is self._steps[-1] or lookups.finished()
                ):
                    waited, pending = pending, None
                    answer = lookups.answer()
                    if answer.score >= waited.threshold:
                        return answer.probabilities, waited.exit
                if step.lookup is None:
                    pass
                elif step.overlapped:
                    lookups.submit(step.lookup, carried[0].clone() if step.copy_hidden else carried[0])
                    pending = step
                else:
                    probabilities, score = step.lookup(carried[0])
                    if score.item() >= step.threshold:
                        return probabilities, step.exit
                lookups.keep_pace()
        except BaseException:
            if pending is not None:
                lookups.answer()  # the next request must not receive this answer
            raise
        return carried, BASE
