"""The engine, which runs segments and lookups in turn until a lookup hits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor

from gati.engine.backends import get_backend
from gati.engine.batching import Answer, BatchedSegment, SegmentOutcome, answer_rows, rows_of
from gati.engine.checks import listed
from gati.engine.exits import BASE, EngineExit, Prediction, tie_tolerance
from gati.engine.paths import path_for
from gati.engine.paths.segments import settled_scores
from gati.errors import BackendError, DataError
from gati.model.lengths import TracedSequences
from gati.model.segments import TracedModel
from gati.types import OutputsKind

if TYPE_CHECKING:
    from jaxtyping import Int, Shaped

    from gati.model.preprocess import Preprocessing

_T = TypeVar("_T")


class Engine:
    """Answers requests with the base model and its learned caches.

    A request passes through the segments in order, with a lookup after each. At the first hit its answer is
    returned, and the remaining segments do not run. The exit that answers depends only on the input, not on
    its batch or on timing: the engine waits for an overlapped lookup before the next lookup starts, and
    before it returns the base model's answer. In batches larger than one, lookups are inline.

    Sequences run at the shortest of a few lengths that fits, see `gati.model.lengths`. The first sequence of
    a length waits until the engine has prepared that length; `examples` returns an input of each length. With
    reduced precision or overlapped lookups, the engine runs the longest length only.

    `graphs` are two files: a backend that compiles graphs stores the early-exit network in the first and the
    base model in the second, so that the next engine need not convert them again. Such a backend compiles for
    `threads` threads, torch's number now if None; other backends use torch's threads.

    The engine is thread-safe. On most backends concurrent requests compete for the cores, so
    `ConcurrentEngine` has a higher throughput. The cores for overlapped lookups serve one request at a time;
    lookups of concurrent requests are inline. The first request, or `open`, reserves these cores, and on the
    CPU confines the calling thread to the others; `close` releases them. The engine is a context manager.
    On the CPU it reserves `lookup_cores` cores, but leaves at least one.
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
        threads: int | None = None,
        lookup_cores: int = 1,
    ) -> None:
        if lookup_cores < 1:
            raise BackendError(f"lookup_cores is {lookup_cores}; give at least 1")
        order = {name: index for index, name in enumerate(traced.blocks)}
        self.exits = tuple(sorted(exits, key=lambda leaving: order.get(leaving.block, -1)))
        self.backend = backend
        self.version = version
        self.class_names = None if class_names is None else tuple(class_names)
        self._preprocessing = preprocessing
        self._tensors = None if preprocessing is None else preprocessing.tensors
        self.traced = traced
        self.outputs_kind: OutputsKind = outputs_kind  # of the base model
        self._graphs, self._threads = graphs, threads or torch.get_num_threads()
        self.lookup_cores = lookup_cores
        self._tolerance = tie_tolerance(traced.device, traced.computes_in)
        self._alone = traced.alone()
        self._kind = traced.device.type
        self._strides = torch.empty(traced.input_shape, device="meta").stride()
        with self._alone, torch.autocast(self._kind, enabled=False):  # lookups are checked on an example
            self._path = path_for(
                backend, traced, self.exits, outputs_kind, graphs, self._threads, lookup_cores
            )
        # reduced precision rounds differently at each length; overlapped lookups support one length only
        any_length = get_backend(backend).in_float32() and not self._path.overlapped
        self._lengths = traced.lengths if isinstance(traced, TracedSequences) and any_length else None
        self._shorter: dict[int, Engine] = {}
        self._making = threading.Lock()
        self._process = os.getpid()

    def __call__(self, x: Shaped[Tensor, "b ..."]) -> list[Prediction]:
        """Classify preprocessed inputs [B, ...]; predictions are in the same order.

        Raises:
            DataError: inputs with a wrong shape or dtype, or with token ids out of range.
            BackendError: in a forked process that torch's threads have not come along to.
        """
        return self._by_length(x, lambda engine, rows: engine._answers(rows, engine._path.answer))

    def inline(self, x: Shaped[Tensor, "b ..."]) -> list[Prediction]:
        """As `__call__`, with all lookups inline."""
        return self._by_length(x, lambda engine, rows: engine._answers(rows, engine._path.inline))

    def _by_length(self, x: Tensor, ask: Callable[[Engine, Tensor], Iterable[_T]]) -> list[_T]:
        """Call `ask` once per length, with the rows of `x` [B, ...] cut to it; answers are in row order.

        The caller's autocast is off meanwhile: answers are certified, and latencies measured, without it.
        """
        if torch.is_autocast_enabled(self._kind):
            with torch.autocast(self._kind, enabled=False):
                return self._by_length(x, ask)
        x = self.checked(x)
        if not len(x):  # many networks cannot run without rows
            return []
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
        """The engine for inputs of `length`, made on first use."""
        if length == self.traced.input_shape[-1] or not isinstance(self.traced, TracedSequences):
            return self
        with self._making:  # takes seconds; concurrent requests wait for the same engine
            if length not in self._shorter:
                self._shorter[length] = self._like(self.traced.at(length), f"-{length}", self._threads)
            return self._shorter[length]

    def examples(self) -> list[Tensor]:
        """An input [1, ...] of each length at which the network runs; most networks have only one."""
        if self._lengths is None:
            return [self.traced.example()]
        lengths = self._lengths
        return [lengths.example(length).to(self.traced.device) for length in lengths.every]

    def shortened(self, x: Tensor) -> Tensor:
        """An input [1, ...], cut to the length at which the network runs it."""
        return x if self._lengths is None else x[..., : self._lengths.of(x)[0]].contiguous()

    def _answers(self, x: Tensor, one: Callable[[Tensor], Answer]) -> list[Prediction]:
        """Answers to checked inputs of one length."""
        with torch.inference_mode(), self._alone:
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
        """Classify with the base model on the same backend, without lookups."""
        return self._by_length(x, Engine._base_answers)

    def _base_answers(self, x: Tensor) -> list[Prediction]:
        with torch.inference_mode(), self._alone:
            return [self.prediction(row, BASE) for row in rows_of(self._path.base(x))]

    def reference(self, x: Shaped[Tensor, "b ..."]) -> Int[Tensor, " b"]:
        """Classes [B] of the user's own base model in PyTorch, the reference for agreement.

        Up to rounding they equal those of `base`, unless the backend computes in reduced precision.
        """
        found = self._by_length(x, Engine._reference_classes)
        return torch.stack(found) if found else torch.empty(0, dtype=torch.int64)

    def _reference_classes(self, x: Tensor) -> Tensor:
        changes_input = self.traced.changes_input
        with torch.inference_mode(), self._alone:
            x = self.to_run_on(x)
            scores = settled_scores(self.traced.base, x, self._tolerance, changes_input=changes_input)
            return scores.argmax(1)

    @property
    def precision(self) -> Literal["f32", "bf16", "int8"]:
        """The backend's precision."""
        return get_backend(self.backend).precision

    def segments(self, *, early: bool = True) -> tuple[BatchedSegment, ...]:
        """The segments that a batch runs one by one; with `early` False, those of the base model.

        Answers in their outcomes are class scores or probabilities, for `prediction`. If batches are not
        possible, there is a single segment, which leaves every row to be computed alone. Call segments in
        inference mode.
        """
        whole = self.traced.changes_itself or self._lengths is not None
        pieces = None if whole else self._path.pieces(early=early)
        return pieces or (BatchedSegment(_each_alone, (True,)),)

    def twin(self) -> Engine:
        """A second engine with the same settings, compiled for torch's current number of threads."""
        return self._like(self.traced)

    def _like(self, traced: TracedModel, suffix: str = "", threads: int | None = None) -> Engine:
        """An engine for `traced` with the same exits; `suffix` is added to the names of its graph files."""
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
            preprocessing=None if suffix else self._preprocessing,  # shorter inputs were checked
            graphs=graphs,
            threads=threads,
            lookup_cores=self.lookup_cores,
        )

    @property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of inputs. Raises BackendError for an engine that was made without one."""
        if self._preprocessing is None:
            raise BackendError("this engine was made without preprocessing; preprocess the inputs yourself")
        return self._preprocessing

    @property
    def threads(self) -> int:
        """The number of threads that compute one request."""
        return self._threads if self.compiled else torch.get_num_threads()

    @property
    def compiled(self) -> bool:
        """Whether the backend runs the network as one graph, with batch size 1."""
        return self._path.compiled

    @property
    def replays(self) -> bool:
        """Whether the backend has a faster path for single requests than for batches of one."""
        return self._path.replays

    @property
    def overlapped(self) -> bool:
        """Whether any lookup runs in parallel with the network, on its own cores or stream."""
        return self._path.overlapped

    def open(self) -> None:
        """Reserve the cores or stream for overlapped lookups; otherwise the first request does it."""
        self._path.open()

    def close(self) -> None:
        """Release cores and streams.

        Call it from the thread that made the requests: only that thread can have its former number of torch
        threads again.
        """
        self._path.close()

    def __enter__(self) -> Engine:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def checked(self, x: Tensor) -> Tensor:
        """Check `x` [B, ...] and return it on the network's device, contiguous and without gradients.

        An engine of several lengths also pads it to the longest one. With a faster path for single requests
        (see `replays`), a single request stays on its device. Raises as `__call__`.
        """
        traced = self.traced
        if os.getpid() != self._process and not self.compiled and torch.get_num_threads() > 1:
            raise BackendError(  # otherwise torch would wait for ever
                "this engine was made in another process, whose threads a forked one does not have; start "
                "processes with spawn, or call torch.set_num_threads(1) in this one"
            )
        if isinstance(x, Tensor) and x.is_nested:
            raise DataError("the network takes dense tensors, got a nested one; stack inputs of one shape")
        if self._lengths is not None and isinstance(x, Tensor):
            x = self._lengths.padded(x)
        if not isinstance(x, Tensor) or x.shape[1:] != traced.input_shape or x.ndim == 0:
            found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise DataError(
                f"the network takes a tensor of shape [batch, {listed(traced.input_shape)}], "
                f"got {found}; preprocess inputs and stack them into a batch"
            )
        if x.dtype != traced.dtype:
            raise DataError(
                f"the network takes {traced.dtype}, got {x.dtype}; preprocess inputs "
                "with engine.preprocessing"
            )
        if x.layout != torch.strided:
            raise DataError(f"the network takes dense tensors, got {x.layout}; call x.to_dense()")
        if x.requires_grad or not x.is_contiguous() or x.stride()[1:] != self._strides:
            # For other strides, also of dimensions of size 1, kernels round differently.
            x = x.detach().clone(memory_format=torch.contiguous_format)
        if self._tensors is not None:
            self._tensors.check(x.cpu().numpy())
        if self._path.replays and x.shape[0] == 1:
            return x
        return self.to_run_on(x)

    def to_run_on(self, x: Tensor) -> Tensor:
        """`x` on the network's device; a copy if the network modifies its input in place."""
        if x.device != self.traced.device:
            return x.to(self.traced.device)
        return x.clone() if self.traced.changes_input else x

    def prediction(self, scores: Tensor, exit: str) -> Prediction:
        """Make an answer from `scores` [1, K]: the base model's class scores or a lookup's probabilities."""
        if exit == BASE and self._path.logits:
            scores = scores.softmax(1)
        probabilities = scores[0].cpu()
        # They may lie in the network's own tensors, which the next request overwrites, or among the answers
        # of a batch, which whoever keeps or pickles one would keep with it.
        if self.traced.changes_itself or probabilities.untyped_storage().nbytes() > probabilities.nbytes:
            probabilities = probabilities.clone()
        known = probabilities.float() if probabilities.dtype == torch.bfloat16 else probabilities
        index = int(known.numpy().argmax())  # torch's own takes some microseconds longer
        name = None if self.class_names is None else self.class_names[index]
        return Prediction(index, probabilities, exit, self.version, name)


def _each_alone(carried: tuple[Tensor, ...]) -> SegmentOutcome:
    return SegmentOutcome({}, frozenset(range(carried[0].shape[0])))
