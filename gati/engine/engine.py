"""The engine: segments and lookups in turn, until a lookup hits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from gati.engine.backends import get_backend
from gati.engine.batching import Answer, BatchedSegment, SegmentOutcome, answer_rows, rows_of
from gati.engine.checks import listed
from gati.engine.exits import BASE, EngineExit, Prediction, tie_tolerance
from gati.engine.paths import path_for
from gati.engine.paths.segments import settled_scores
from gati.errors import DataError
from gati.model.lengths import TracedSequences
from gati.model.segments import TracedModel
from gati.types import OutputsKind

if TYPE_CHECKING:
    from jaxtyping import Int, Shaped

    from gati.model.preprocess import Preprocessing

_T = TypeVar("_T")
_ALONE = threading.RLock()  # held while a network runs that writes to tensors of its own


class Engine:
    """Answers requests with the base model and its learned caches.

    A request goes through the segments in order. After each it is looked up; at the first hit its answer
    is returned and the remaining segments are not executed. Which exit answers depends on the input alone,
    never on its batch nor on timing: an overlapped lookup that is late is waited for before the next one,
    and before the base model's answer is given. Batches larger than one look up inline.

    Sequences are executed at their real length, see `gati.model.lengths`; the first of a length waits until
    that is ready (`examples` has one of each). Engines of reduced precision, and with overlapped lookups, run
    the longest only.

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
        self._tensors = None if preprocessing is None else preprocessing.tensors
        self.traced = traced
        self.outputs_kind: OutputsKind = outputs_kind  # what the base model ends with
        self._graphs = graphs
        self._tolerance = tie_tolerance(traced.device, traced.computes_in)
        self._one_network: AbstractContextManager[Any] = _ALONE if traced.changes_itself else nullcontext()
        self._path = path_for(backend, traced, self.exits, outputs_kind, graphs)
        # reduced precision rounds differently at other lengths; cores for lookups are taken for one length
        alike = get_backend(backend).in_float32() and not self._path.overlapped
        self._lengths = traced.lengths if isinstance(traced, TracedSequences) and alike else None
        self._shorter: dict[int, Engine] = {}
        self._making = threading.Lock()

    def __call__(self, x: Shaped[Tensor, "b ..."]) -> list[Prediction]:
        """Classify preprocessed inputs [B, ...]; predictions come in their order.

        Raises:
            DataError: inputs of another shape or dtype than the network's, or ids that it does not have.
        """
        return self._by_length(x, lambda engine, rows: engine._answers(rows, engine._path.answer))

    def inline(self, x: Shaped[Tensor, "b ..."]) -> list[Prediction]:
        """As calling it, but no lookup takes cores of its own."""
        return self._by_length(x, lambda engine, rows: engine._answers(rows, engine._path.inline))

    def _by_length(self, x: Tensor, ask: Callable[[Engine, Tensor], Iterable[_T]]) -> list[_T]:
        """Ask for the rows of `x` [B, ...], each at its real length; answers in the order of rows."""
        x = self.checked(x)
        if self._lengths is None:
            return list(ask(self, x))
        answers: dict[int, _T] = {}
        taken = self._lengths.of(x)
        for length in sorted(set(taken)):
            rows = [row for row, each in enumerate(taken) if each == length]
            part = (x if len(rows) == len(taken) else x[rows])[..., :length].contiguous()
            answers.update(zip(rows, ask(self._at(length), part), strict=True))
        return [answers[row] for row in range(len(taken))]

    def _at(self, length: int) -> Engine:
        """The engine for inputs of that length."""
        if length == self.traced.input_shape[-1] or not isinstance(self.traced, TracedSequences):
            return self
        with self._making:  # it takes seconds: other requests wait for the same engine
            if length not in self._shorter:
                self._shorter[length] = self._like(self.traced.at(length), f"-{length}")
            return self._shorter[length]

    def examples(self) -> list[Tensor]:
        """An input [1, ...] of each length that the network is executed at; of most networks the only one."""
        if self._lengths is None:
            return [self.traced.example()]
        lengths = self._lengths
        return [lengths.example(length).to(self.traced.device) for length in lengths.every]

    def shortened(self, x: Tensor) -> Tensor:
        """An input [1, ...] as the network is executed with it, cut to its real length."""
        return x if self._lengths is None else x[..., : self._lengths.of(x)[0]].contiguous()

    def _answers(self, x: Tensor, one: Callable[[Tensor], Answer]) -> list[Prediction]:
        """Answers to inputs that were checked, of one length."""
        with torch.inference_mode(), self._one_network:
            if x.shape[0] == 1:
                return [self.prediction(*one(x))]
            pieces = self._path.pieces(early=True)
            if pieces is None:
                return [self.prediction(*one(row)) for row in rows_of(x)]
            answers = answer_rows(pieces, self.to_run_on(x))
            return [
                self.prediction(*one(x[row : row + 1].contiguous()) if answer is None else answer)
                for row, answer in enumerate(answers)
            ]

    def base(self, x: Shaped[Tensor, "b ..."]) -> list[Prediction]:
        """Classify with the whole base model, executed the same way, no lookups."""
        return self._by_length(x, Engine._base_answers)

    def _base_answers(self, x: Tensor) -> list[Prediction]:
        with torch.inference_mode(), self._one_network:
            return [self.prediction(row, BASE) for row in rows_of(self._path.base(x))]

    def reference(self, x: Shaped[Tensor, "b ..."]) -> Int[Tensor, " b"]:
        """Classes [B] of the base model as the user gave it, which agreement is about.

        They are those of `base`, up to rounding, unless the backend computes in reduced precision.
        """
        found = self._by_length(x, Engine._reference_classes)
        return torch.stack(found) if found else torch.empty(0, dtype=torch.int64)

    def _reference_classes(self, x: Tensor) -> Tensor:
        changes_input = self.traced.changes_input
        with torch.inference_mode(), self._one_network:
            scores = settled_scores(self.traced.base, x, self._tolerance, changes_input=changes_input)
        return scores.argmax(1)

    @property
    def precision(self) -> Literal["f32", "bf16", "int8"]:
        """What the backend computes in."""
        return get_backend(self.backend).precision

    def segments(self, *, early: bool = True) -> tuple[BatchedSegment, ...]:
        """The path of a batch in pieces, to be run one by one; whole where the backend or network has none.

        Rows come out as class scores or probabilities: `prediction` makes an answer of them. With `early`
        False it is the base model. Call them in inference mode.
        """
        whole = self.traced.changes_itself or self._lengths is not None
        pieces = None if whole else self._path.pieces(early=early)
        return pieces or (BatchedSegment(_each_alone, (True,)),)

    def twin(self) -> Engine:
        """Another engine like this one, with as many threads as torch has now."""
        return self._like(self.traced)

    def _like(self, traced: TracedModel, suffix: str = "") -> Engine:
        """Another engine with the same exits; its graphs are kept in files with that suffix."""
        graphs = self._graphs
        if graphs is not None and suffix:
            early, base = (path.with_stem(f"{path.stem}{suffix}") for path in graphs)
            graphs = early, base
        return Engine(
            traced,
            self.exits,
            outputs_kind=self.outputs_kind,
            backend=self.backend,
            version=self.version,
            class_names=self.class_names,
            preprocessing=None if suffix else self.preprocessing,  # shorter inputs were checked
            graphs=graphs,
        )

    @property
    def compiled(self) -> bool:
        """Whether the backend runs the network as one graph, a request at a time."""
        return self._path.compiled

    @property
    def overlapped(self) -> bool:
        """Whether any lookup runs in parallel with the network, on its own cores or stream."""
        return self._path.overlapped

    def open(self) -> None:
        """Take what overlapped lookups need; the first request does it, too."""
        self._path.open()

    def close(self) -> None:
        """Give back cores and streams; call it from the thread that made the requests."""
        self._path.close()

    def __enter__(self) -> Engine:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def checked(self, x: Tensor) -> Tensor:
        """`x` [B, ...] where the network is. Raises `DataError` for what it does not take."""
        traced = self.traced
        if self._lengths is not None and isinstance(x, Tensor):
            x = self._lengths.padded(x)
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
        if self._tensors is not None and x.device.type == "cpu":
            self._tensors.check(x.numpy())
        if x.device != traced.device:
            x = x.to(traced.device)
        return self.to_run_on(x)

    def to_run_on(self, x: Tensor) -> Tensor:
        """`x`, or a copy of it where the network works in place on what it is given."""
        return x.clone() if self.traced.changes_input else x

    def prediction(self, scores: Tensor, exit: str) -> Prediction:
        """`scores` [1, K]: class scores of the base model, or probabilities of a lookup."""
        if exit == BASE and self._path.logits:
            scores = scores.softmax(1)
        probabilities = scores[0].cpu()
        index = int(probabilities.argmax())
        name = None if self.class_names is None else self.class_names[index]
        return Prediction(index, probabilities, exit, self.version, name)


def _each_alone(carried: tuple[Tensor, ...]) -> SegmentOutcome:
    return SegmentOutcome({}, frozenset(range(carried[0].shape[0])))
