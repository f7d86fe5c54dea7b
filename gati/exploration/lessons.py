"""Training examples for learners at the input: the inputs of a step and their targets.

From the base model these need only its answers. The fastest engine available computes them, and they are
kept for when the same view is shown again. If all learners first reduce a view to fewer values, the reduced
view is kept, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from gati.errors import BackendError
from gati.exploration.answers import ENGINES, BaseAnswers, Engine, fastest_engine, open_engine
from gati.exploration.fronts import Front, Fronts
from gati.exploration.memory import spare_bytes
from gati.exploration.precision import training_precision
from gati.exploration.recipes import Emphasis
from gati.exploration.remembered import MOST_KEPT_BYTES, BatchMemory, rounded, type_that_keeps
from gati.exploration.views import ViewedBatch, Viewer
from gati.model.entry import INPUT

_WORTH_KEEPING = 0.5  # views that hold more than this share of an input's values are computed again


class BatchLesson(NamedTuple):
    """The inputs of a step, and the targets that all learners imitate."""

    read: Mapping[str, Tensor]  # by trial
    rows: Tensor  # [B, K + D], the base model's logits and pooled hidden outputs
    row_weights: Tensor | None  # [B]
    mixed: bool

    stand_ins: Tensor | None = None  # [B], of `stand_ins_of`

    def answered(self) -> BatchLesson:
        """Return the lesson with the stand-ins of inputs that have no finite answer."""
        rows = self.stand_ins
        if rows is None:
            return self
        return BatchLesson(
            {trial_id: values[rows] for trial_id, values in self.read.items()},
            self.rows[rows],
            None if self.row_weights is None else self.row_weights[rows],
            self.mixed,
        )


def stand_ins_of(logits: Tensor) -> Tensor | None:
    """Which input of a batch to use in the place of each one, [B]: another if its `logits` are not finite.

    A single NaN would spoil the weights of all learners. The logits are [B, K]. The result is None if all are
    finite, and empty if those of no input are.
    """
    finite = torch.isfinite(logits).all(1)
    if bool(finite.all()):
        return None
    (others,) = finite.nonzero(as_tuple=True)
    if not len(others):
        return others
    rows = torch.arange(len(finite), device=finite.device)
    return torch.where(finite, rows, others[rows % len(others)])


class InputLessons:
    """Lessons on the batches of `viewer` for learners at the input, whose first layers are `fronts`.

    Views repeat after `rounds` rounds; None if they do not repeat in this training. In an answer, `features`
    pooled hidden outputs follow the logits. `engine` computes base answers, by default and where it is not
    available the fastest one that is. After a lesson, `fresh_s` is the number of seconds spent on what is
    computed once per view.
    """

    def __init__(
        self,
        viewer: Viewer,
        base: BaseAnswers,
        fronts: Fronts,
        emphasis: Emphasis | None,
        device: torch.device,
        *,
        features: int,
        rounds: int | None,
        engine: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.viewer, self.base, self.fronts = viewer, base, fronts
        self.emphasis, self.device = emphasis, device
        self.engine_name, self.fresh_s = engine, 0.0
        self._engine: Engine | None = None
        self._clock, self._rounds = clock, rounds
        self._kept_bytes = spare_bytes(MOST_KEPT_BYTES, device)
        self._answers = BatchMemory(rounds, viewer.places, self._kept_bytes) if rounds else None
        self._views: dict[Front, BatchMemory] = {}
        self._mixed: dict[ViewedBatch, bool] = {}
        self._features = features
        self._stand_ins: dict[ViewedBatch, Tensor | None] = {}  # judged once: on a GPU, looking waits for it

    def __call__(self, batch: ViewedBatch) -> BatchLesson:
        """Return the lesson on a batch, on the device."""
        self.fresh_s = 0.0
        known = None if self._answers is None else self._answers.get(batch)
        seen = {front: memory.get(batch) for front, memory in self._views.items()}
        views = {front: view for front, view in seen.items() if view is not None}
        if known is None or not views or len(views) < len(seen):
            kept_since_s = self._clock() if self._views else None
            images, views = self._show(batch)
            if known is None:
                began_s = self._clock() if kept_since_s is None else kept_since_s
                known = self._answer(batch, images)
                self._stand_ins[batch] = self._judged(known)
                self.fresh_s = self._clock() - began_s
        views = {front: _channels_last(view.to(self.device)) for front, view in views.items()}
        rows, weights = known.to(self.device), None
        if self.emphasis is not None:
            rows, weights = rows[:, :-1], rows[:, -1]
        stand_ins = self._stand_ins[batch]
        return BatchLesson(self.fronts.read(views), rows, weights, self._mixed[batch], stand_ins)

    def _judged(self, known: Tensor) -> Tensor | None:
        others = self._features + (self.emphasis is not None)
        stand_ins = stand_ins_of(known[:, : known.shape[1] - others])
        return None if stand_ins is None else stand_ins.to(self.device)

    def _show(self, batch: ViewedBatch) -> tuple[Tensor, dict[Front, Tensor]]:
        shown = self.viewer.show(batch, self.device)
        self._mixed[batch] = shown.mixed
        images = shown.images
        views = self.fronts.look({INPUT: images})
        numbers = sum(view.numel() for view in views.values())
        launches = self.device.type == "cuda"  # which take longer than reading what is kept
        if self._rounds is not None and (launches or numbers <= _WORTH_KEEPING * images.numel()):
            self._views = self._views or self._memories()
            views = {front: self._views[front].put(batch, view) for front, view in views.items()}
        return images, views

    def _memories(self) -> dict[Front, BatchMemory]:
        """A memory for each front; its type depends on the first batch, also if training is resumed later."""
        first = self.fronts.look({INPUT: self._first_views()})
        rounds, places = self._rounds or 1, self.viewer.places
        return {
            front: BatchMemory(rounds, places, self._kept_bytes, type_that_keeps(view))
            for front, view in first.items()
        }

    def _answer(self, batch: ViewedBatch, images: Tensor) -> Tensor:
        if self._engine is None:
            self.engine_name, self._engine = self._open(images)
        rows = self._engine(images)
        if self.emphasis is not None:
            with training_precision(self.device):
                rows = torch.cat((rows, self.emphasis(images)[:, None]), 1)
        return rounded(rows).float() if self._answers is None else self._answers.put(batch, rows)

    def _open(self, images: Tensor) -> tuple[str, Engine]:
        """The engine, or the fastest one if it is not known, or not there, as on another machine."""
        if self.engine_name is not None:
            # what calibrates it is the same where training is resumed
            first = images if self.engine_name in ENGINES else self._first_views()
            with suppress(BackendError):
                return self.engine_name, open_engine(self.engine_name, self.base, first)
        return fastest_engine(self.base, images)

    def _first_views(self) -> Tensor:
        return self.viewer.show(ViewedBatch(0, 0), self.device).images


def _channels_last(view: Tensor) -> Tensor:
    """Convolutions of the input are fastest with channels last."""
    return view.contiguous(memory_format=torch.channels_last) if view.dim() == 4 else view
