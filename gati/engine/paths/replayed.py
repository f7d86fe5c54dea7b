"""Single requests on a backend's own path, which includes lookups and decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from gati.engine.backends import SegmentBackend, SingleExit, SinglePath
from gati.engine.batching import Answer, BatchStage
from gati.engine.exits import BASE, EngineExit
from gati.engine.paths.segments import Ready, SegmentsPath
from gati.model.cuts import Segment
from gati.model.segments import TracedModel


class ReplayedPath(SegmentsPath):
    """Single requests take the backend's own path, such as a captured graph; batches run segments."""

    replays: ClassVar[bool] = True

    def __init__(self, ready: Ready, single: SinglePath, exits: Sequence[EngineExit]) -> None:
        super().__init__(ready)
        self._single = single
        self._names = (*(leaving.block for leaving in exits), BASE)

    @staticmethod
    def single(
        backend: SegmentBackend,
        traced: TracedModel,
        pieces: Sequence[Segment],
        exits: Sequence[EngineExit],
        stages: Sequence[BatchStage],
    ) -> SinglePath | None:
        """The backend's own path for a single request through `pieces`, if it has one."""
        leaves = {
            leaving.block: SingleExit(
                index, stage.lookup, leaving.threshold, leaving.placement == "overlapped"
            )
            for index, (leaving, stage) in enumerate(zip(exits, stages, strict=True))
        }
        return backend.single(traced, pieces, leaves)

    def answer(self, x: Tensor) -> Answer:
        """As `RequestPath.answer`."""
        values, position = self._single.answer(x)
        return values, self._names[position]
