"""The engine: segments and lookups in turn, until a lookup hits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from gati.engine.backends import (
    Graph,
    GraphBackend,
    SingleExit,
    SinglePath,
    get_backend,
    segment_backend,
)
from gati.engine.batching import BatchedSegment, BatchStage, SegmentOutcome, answer_rows, rows_of, segments_of
from gati.engine.checks import check_lookup, check_placement, listed
from gati.engine.exits import BASE, EngineExit, Prediction, doubtful_class, tie_tolerance
from gati.engine.placement import Beside, beside_for
from gati.errors import CutError, DataError
from gati.model.segments import Segment, TracedModel
from gati.types import OutputsKind

if TYPE_CHECKING:
    from gati.model.preprocess import Preprocessing

__all__ = ["Engine", "Prediction"]

_ALONE = threading.RLock()  # held while a network runs that writes to tensors of its own


class _Step(NamedTuple):
    """One segment of the path taken by a single request, and the lookup at its end, if any."""

    run: Callable[..., Any]
    lookup: Callable[[Tensor], tuple[Tensor, Tensor]] | None
    threshold: float
    exit: str
    beside: bool
    copy_hidden: bool


class Engine:
    """Answers requests with the base model and its learned caches.

    A request goes through the segments in order. After each it is looked up; at the first hit its answer
    is returned and the remaining segments are not executed. Which exit answers depends on the input alone,
    never on its batch nor on timing: an overlapped lookup that is late is waited for before the next one,
    and before the base model's answer is given. Batches larger than one look up inline.

    `graphs` are files where a backend that compiles graphs keeps those of the early-exit network and of the
    base model, so that the next engine need not convert them again.

    Any number of threads may call an engine at the same time; each request has buffers of its own. On most
    backends they share the cores, so `ConcurrentEngine` answers more of them a second. Cores for overlapped
    lookups serve one request at a time: another that comes meanwhile is looked up inline. It is a context
    manager: `close` gives back the cores that overlapped lookups take at the first request (CPU: the calling
    thread is confined to the other cores until then).
    """

    def __init__(
        self,
        traced: TracedModel,
        exits: Sequence[EngineExit] = (),
        *,
        outputs_kind: OutputsKind = "logits",
        backend: str = "torch",
        version: str = "",
        class_names: Sequence[str] | None = None,
        preprocessing: Preprocessing | None = None,
        graphs: tuple[Path, Path] | None = None,
    ) -> None:
        order = {name: index for index, name in enumerate(traced.blocks)}
        self.exits = tuple(sorted(exits, key=lambda leaving: order.get(leaving.block, -1)))
        self.backend = backend
        self.version = version
        self.class_names = None if class_names is None else tuple(class_names)
        self.preprocessing = preprocessing
        self.traced = traced
        self._tolerance = tie_tolerance(traced.device, traced.dtype)
        self._logits = outputs_kind == "logits"
        self._outputs_kind = outputs_kind
        self._graphs = graphs
        for leaving in self.exits:
            check_placement(leaving, backend)
        overlapped = any(leaving.placement == "overlapped" for leaving in self.exits)
        self._beside: Beside | None = beside_for(traced.device) if overlapped else None
        self._beside_free = threading.Lock()
        self._opened = False
        self._one_network: AbstractContextManager[Any] = _ALONE if traced.changes_itself else nullcontext()
        self._base_graph: Graph | None = None
        self._base_graph_made = threading.Lock()
        self._steps: tuple[_Step, ...] = ()
        self._stages: tuple[BatchStage, ...] = ()
        executes = get_backend(backend)
        self._graph: Graph | None = None
        self._single: SinglePath | None = None
        if isinstance(executes, GraphBackend):
            kept = None if graphs is None else graphs[0]
            self._graph = executes.early_exit(traced, self.exits, outputs_kind, kept)
            self._logits = False  # a graph ends with probabilities
            return
        path = segment_backend(backend).path(traced, [leaving.block for leaving in self.exits])
        self._base: Callable[[Tensor], Tensor] = path.base
        self._last: Callable[..., Tensor] = path.segments[-1].run
        self._stages = self._build_stages(path.segments)
        self._rows_selectable = all(segment.rows_selectable for segment in path.segments)
        pieces = self._finest_segments() if overlapped else path.segments
        self._single = self._build_single(pieces)
        if self._single is not None:
            self._beside = None  # it runs lookups beside the network by itself
        self._steps = self._build_steps(pieces) if self._beside is not None else ()
        self._segments = segments_of(self._stages, self._last, self._tolerance)

    def __call__(self, x: Tensor) -> list[Prediction]:
        """Classify preprocessed inputs [B, ...]; predictions come in their order.

        Raises:
            DataError: inputs of another shape or dtype than the network's.
        """
        return self._answers(x, self._one)

    def inline(self, x: Tensor) -> list[Prediction]:
        """As calling it, and no lookup takes cores of its own."""
        return self._answers(x, self._one if self._beside is None else self._one_inline)

    def _answers(self, x: Tensor, one: Callable[[Tensor], tuple[Tensor, str]]) -> list[Prediction]:
        x = self.checked(x)
        with torch.inference_mode(), self._one_network:
            if x.shape[0] == 1:
                return [self.prediction(*one(x))]
            if self._graph is not None or not self._rows_selectable:
                return [self.prediction(*one(row)) for row in rows_of(x)]
            answers = answer_rows(self._segments, self.to_run_on(x))
            return [
                self.prediction(*one(x[row : row + 1].contiguous()) if answer is None else answer)
                for row, answer in enumerate(answers)
            ]

    def base(self, x: Tensor) -> list[Prediction]:
        """Classify with the whole base model, executed the same way, no lookups."""
        x = self.checked(x)
        with torch.inference_mode(), self._one_network:
            if self._graph is not None:
                base = self._base_graph or self._make_base_graph()
                return [self.prediction(base.answer(row)[0], BASE) for row in rows_of(x)]
            return [self.prediction(row, BASE) for row in rows_of(self._whole(self._base, x))]

    def reference(self, x: Tensor) -> Tensor:
        """Classes [B] of the base model as the user gave it, which agreement is about.

        Those of `base`, but for rounding, unless the backend computes in reduced precision.
        """
        x = self.checked(x)
        with torch.inference_mode(), self._one_network:
            return self._whole(self.traced.base, x).argmax(1)

    def _whole(self, base: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Class scores [B, K]; a row too close to call is worked out alone."""
        if x.shape[0] == 1:
            return base(x)
        scores = base(self.to_run_on(x))
        if scores.shape[0] > 1:
            for row in doubtful_class(scores, self._tolerance).nonzero().flatten().tolist():
                scores[row] = base(x[row : row + 1].contiguous())[0]
        return scores

    @property
    def outputs_kind(self) -> OutputsKind:
        """What the base model ends with."""
        return self._outputs_kind

    @property
    def precision(self) -> Literal["f32", "bf16", "int8"]:
        """What the backend computes in."""
        return get_backend(self.backend).precision

    def _make_base_graph(self) -> Graph:
        """Made on first use: serving never needs it."""
        executes = get_backend(self.backend)
        if not isinstance(executes, GraphBackend):
            raise AssertionError("only graph backends keep the base model as a graph")
        kept = None if self._graphs is None else self._graphs[1]
        with self._base_graph_made:  # it takes seconds: whoever comes meanwhile waits for the same
            if self._base_graph is None:
                self._base_graph = executes.early_exit(self.traced, (), self._outputs_kind, kept)
            return self._base_graph

    def segments(self, *, early: bool = True) -> tuple[BatchedSegment, ...]:
        """The path of a batch in pieces, to be run one by one; whole where the backend or network has none.

        Rows come out as class scores or probabilities: `prediction` makes an answer of them. With `early`
        False it is the base model. Call them in inference mode.
        """
        whole = self._graph is not None or self.traced.changes_itself
        if whole or (early and not self._rows_selectable):
            return (BatchedSegment(_each_alone, (True,)),)
        return self._segments if early else segments_of((), self._base, self._tolerance)

    def twin(self) -> Engine:
        """Another engine like this one, with as many threads as torch has now."""
        return Engine(
            self.traced,
            self.exits,
            outputs_kind=self._outputs_kind,
            backend=self.backend,
            version=self.version,
            class_names=self.class_names,
            preprocessing=self.preprocessing,
            graphs=self._graphs,
        )

    @property
    def compiled(self) -> bool:
        """Whether the backend runs the network as one graph, a request at a time."""
        return self._graph is not None

    @property
    def overlapped(self) -> bool:
        """Whether any lookup runs in parallel with the network, on its own cores or stream."""
        return self._beside is not None

    def open(self) -> None:
        """Take what overlapped lookups need; the first request does it, too."""
        if self._beside is not None:
            with self._beside_free:
                self._open(self._beside)

    def close(self) -> None:
        """Give back cores and streams; call it from the thread that made the requests."""
        if self._beside is not None:
            with self._beside_free:
                if self._opened:
                    self._beside.close()
                    self._opened = False

    def _open(self, beside: Beside) -> None:
        if not self._opened:
            beside.open()
            self._opened = True

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build_stages(self, segments: Sequence[Segment]) -> tuple[BatchStage, ...]:
        stages = []
        backend = segment_backend(self.backend)
        carried: Any = (self.traced.example(),)
        with torch.inference_mode():
            for segment, leaving in zip(segments, self.exits, strict=False):
                carried = segment.run(*carried)
                lookup = backend.lookup(leaving.cache, carried[0])
                check_lookup(leaving, lookup, carried[0], self.traced.classes)
                batched = tuple(tensor.batched for tensor in segment.carried)
                stages.append(BatchStage(segment.run, lookup, leaving.threshold, leaving.block, batched))
        return tuple(stages)

    def _build_single(self, segments: Sequence[Segment]) -> SinglePath | None:
        """The backend's own way for a single request, if it has one."""
        exits = {
            leaving.block: SingleExit(
                index, stage.lookup, leaving.threshold, leaving.placement == "overlapped"
            )
            for index, (leaving, stage) in enumerate(zip(self.exits, self._stages, strict=True))
        }
        return segment_backend(self.backend).single(self.traced, segments, exits)

    def _build_steps(self, segments: Sequence[Segment]) -> tuple[_Step, ...]:
        """The path of one request with parallel lookups: cut at every block, so that it can stop early."""
        exits = {
            leaving.block: (leaving, stage) for leaving, stage in zip(self.exits, self._stages, strict=True)
        }
        steps = []
        for segment in segments:
            leaving, stage = exits.get(segment.block or "", (None, None))
            if leaving is None or stage is None:
                steps.append(_Step(segment.run, None, 0.0, "", beside=False, copy_hidden=False))
                continue
            steps.append(
                _Step(
                    segment.run,
                    stage.lookup,
                    leaving.threshold,
                    leaving.block,
                    leaving.placement == "overlapped",
                    segment.hidden_changes_later,
                )
            )
        return tuple(steps)

    def _finest_segments(self) -> tuple[Segment, ...]:
        backend = segment_backend(self.backend)
        try:
            return backend.path(self.traced, self.traced.blocks).segments
        except CutError:  # some other block cannot be cut: look for answers at the exits only
            return backend.path(self.traced, [leaving.block for leaving in self.exits]).segments

    def checked(self, x: Tensor) -> Tensor:
        """`x` [B, ...] where the network is. Raises `DataError` for another shape or dtype than it takes."""
        traced = self.traced
        if not isinstance(x, Tensor) or x.shape[1:] != traced.input_shape or x.ndim == 0:
            found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise DataError(
                f"the network takes a tensor of shape [batch, {listed(traced.input_shape)}], "
                f"got {found}; preprocess inputs and put them in a batch"
            )
        if x.dtype != traced.dtype:
            raise DataError(
                f"the network takes {traced.dtype}, got {x.dtype}; preprocess inputs "
                "with engine.preprocessing"
            )
        if x.device != traced.device:
            x = x.to(traced.device)
        return self.to_run_on(x)

    def to_run_on(self, x: Tensor) -> Tensor:
        """`x`, or a copy of it where the network works in place on what it is given."""
        return x.clone() if self.traced.changes_input else x

    def _one(self, x: Tensor) -> tuple[Tensor, str]:
        """Class scores [1, K] or probabilities [1, K], and where they come from, for a single request."""
        if self._graph is not None:
            probabilities, position = self._graph.answer(x)
            return probabilities, BASE if position == len(self.exits) else self.exits[position].block
        if self._single is not None:
            values, position = self._single.answer(x)
            return values, BASE if position == len(self.exits) else self.exits[position].block
        if self._beside is None or not self._beside_free.acquire(blocking=False):
            return self._one_inline(x)
        try:
            return self._one_beside(x, self._beside)
        finally:
            self._beside_free.release()

    def _one_inline(self, x: Tensor) -> tuple[Tensor, str]:
        carried: tuple[Tensor, ...] = (x,)
        for run, lookup, threshold, name, _ in self._stages:
            carried = run(*carried)
            probabilities, score = lookup(carried[0])
            if score.item() >= threshold:  # False for NaN
                return probabilities, name
        return self._last(*carried), BASE

    def _one_beside(self, x: Tensor, beside: Beside) -> tuple[Tensor, str]:
        self._open(beside)
        pending: _Step | None = None
        carried: Any = (x,)
        try:
            for step in self._steps:
                carried = step.run(*carried)
                if pending is not None and (
                    step.lookup is not None or step is self._steps[-1] or beside.finished()
                ):
                    waited, pending = pending, None
                    answer = beside.answer()
                    if answer.score >= waited.threshold:
                        return answer.probabilities, waited.exit
                if step.lookup is None:
                    pass
                elif step.beside:
                    beside.submit(step.lookup, carried[0].clone() if step.copy_hidden else carried[0])
                    pending = step
                else:
                    probabilities, score = step.lookup(carried[0])
                    if score.item() >= step.threshold:
                        return probabilities, step.exit
                beside.keep_pace()
        except BaseException:
            if pending is not None:
                beside.answer()  # the next request must not find this one's answer
            raise
        return carried, BASE

    def prediction(self, scores: Tensor, exit: str) -> Prediction:
        """`scores` [1, K]: class scores of the base model, or probabilities of a lookup."""
        if exit == BASE and self._logits:
            scores = scores.softmax(1)
        probabilities = scores[0].cpu()
        index = int(probabilities.argmax())
        name = None if self.class_names is None else self.class_names[index]
        return Prediction(index, probabilities, exit, self.version, name)


def _each_alone(carried: tuple[Tensor, ...]) -> SegmentOutcome:
    return SegmentOutcome({}, frozenset(range(carried[0].shape[0])))
