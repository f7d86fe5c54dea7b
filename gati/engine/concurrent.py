"""Serving many concurrent clients: inputs form batches at every segment, and hits make room for others.

Every core has a worker that computes on one thread, because small batches do not parallelise well.

With a backend that runs segments, each segment has a queue. A worker takes the longest queue as one batch:
hits leave, misses join the queue of the next segment, and new inputs need not wait for the whole network.
With a backend that compiles the network into one graph, there is one queue, and each worker has a graph: an
early exit frees a core for the next request.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import torch
from torch import Tensor

from gati.engine.engine import Engine
from gati.engine.exits import Prediction
from gati.engine.threads import one_thread, work_alongside
from gati.errors import BackendError, DataError

_PATIENCE_S = 0.05  # an input that waits longer gives its queue priority over longer ones


@dataclass(eq=False)
class _Request:
    """One input in progress, with the tensors that the next segment takes."""

    carried: tuple[Tensor, ...]
    x: Tensor
    answer: Future[Prediction] = field(default_factory=Future)
    since_s: float = field(default_factory=time.monotonic)


class ConcurrentEngine:
    """An engine for many concurrent threads; a context manager, or use `start` and `close`.

    Answers equal those of `engine`; lookups are inline. An input that waits alone is a single request where
    the backend has a faster path for those. With `early` False it runs the base model in the same way.
    `largest_batch` limits the number of inputs of a segment's batch. A `niceness` above 0 lowers the priority
    of the workers. When nothing refers to this any more, it is closed.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        early: bool = True,
        workers: int | None = None,
        largest_batch: int = 32,
        niceness: int = 0,
    ) -> None:
        if largest_batch < 1 or (workers is not None and workers < 1):
            raise BackendError("largest_batch and workers must be at least 1")
        self._engine = engine
        self._workers = workers
        self._niceness = niceness
        self._process = os.getpid()
        self._work = _Work(engine, early, largest_batch)
        self._threads: list[threading.Thread] = []
        ended = weakref.finalize(self, _end, self._work, self._process)
        ended.atexit = False  # the process takes the workers with it

    def start(self) -> Self:
        """Compile an engine for each worker and start the workers; returns itself.

        Cores that the engine reserved for overlapped lookups of this thread are released. Raises BackendError
        if there can be no more threads.
        """
        if self._threads:
            return self
        self._engine.close()
        engine, count = self._engine, self.workers
        ready, failures = threading.Barrier(count + 1), list[RuntimeError]()
        with one_thread():
            engines = [engine.twin() if engine.compiled else engine for _ in range(count)]
            for each in engines:  # graphs are compiled now, while there is one thread
                for example in each.examples():
                    self._work.ask(each, example)
            self._threads = [
                threading.Thread(
                    target=_run,
                    args=(self._work, each, self._niceness, ready, failures),
                    daemon=True,
                    name="gati-engine",
                )
                for each in engines
            ]
            try:
                for thread in self._threads:
                    thread.start()
                ready.wait()
            except RuntimeError as error:  # there can be no more threads: those that were started end
                self._threads = []
                ready.abort()
                first = failures[0] if isinstance(error, threading.BrokenBarrierError) else error
                raise BackendError(f"{count} workers cannot be started ({first}): give fewer") from first
        return self

    def submit(self, x: Tensor, *, own: bool = False) -> Future[Prediction]:
        """Submit one preprocessed input [1, ...] and return a future of its answer.

        The input is copied: the caller may change it while it waits. With `own`, the caller says that it
        stays as it is, and is complete if it lies on a GPU; then it is not copied. The input of a cancelled
        future is dropped at the next segment.

        Raises DataError as the engine does and for several inputs, and BackendError before `start`, after
        `close`, and in a forked process.
        """
        given, x = x, self._engine.checked(x)
        if len(x) != 1:
            raise DataError(f"{len(x)} inputs in one tensor; submit each of them: engine.submit(x[:1])")
        if os.getpid() != self._process:
            raise BackendError(
                "this engine was started in another process, whose workers a forked one does not have; open "
                "one in this process"
            )
        if not own:
            if x.data_ptr() == given.data_ptr():
                x = x.clone()
            if given.is_cuda:  # copies wait on the caller's stream, and workers have their own
                torch.cuda.current_stream(given.device).synchronize()
        request = _Request((x,), x)
        with self._work.changed:
            if self._work.closing:
                raise BackendError("the engine is closed; open another one")
            if not self._threads:
                raise BackendError("the engine is not started; use it in a `with` block, or call start()")
            self._work.queues[0].append(request)
            self._work.changed.notify()
        return request.answer

    def __call__(self, x: Tensor) -> Prediction:
        """Wait for the answer to one preprocessed input [1, ...]."""
        return self.submit(x).result()

    @property
    def workers(self) -> int:
        """The number of threads; by default one a core, or a single one that feeds a GPU."""
        on_gpu = self._engine.traced.device.type == "cuda"
        return self._workers or (1 if on_gpu else torch.get_num_threads())

    @property
    def waiting(self) -> int:
        """The number of inputs that wait in a queue."""
        with self._work.changed:
            return sum(map(len, self._work.queues))

    def close(self) -> None:
        """Answer all waiting inputs, then stop the workers; a worker, as in a callback, does not wait."""
        _end(self._work, self._process)
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(work: _Work, process: int) -> None:
    """Let the workers answer what waits, and end."""
    if os.getpid() != process:  # a forked one has no workers, and its copy of the lock may stay taken
        return
    with work.changed:
        work.closing = True
        work.changed.notify_all()


def _run(
    work: _Work, engine: Engine, niceness: int, ready: threading.Barrier, failures: list[RuntimeError]
) -> None:
    """A worker, which computes on `engine`; `ready` and `failures` are for who starts it."""
    try:
        work_alongside(niceness)
        ready.wait()
    except RuntimeError as error:
        failures.append(error)
        ready.abort()  # else `start` would wait for ever
        return
    most = 1 if engine.compiled else work.largest_batch
    while work.step(engine, most):
        pass


class _Work:
    """What waits, by segment. Workers know this alone, so that a `ConcurrentEngine` can be collected."""

    def __init__(self, engine: Engine, early: bool, largest_batch: int) -> None:
        self.engine, self.early, self.largest_batch = engine, early, largest_batch
        self.changed = threading.Condition()
        self.closing = False
        self.segments = engine.segments(early=early)
        self.queues: list[deque[_Request]] = [deque() for _ in self.segments]

    def ask(self, engine: Engine, x: Tensor) -> Prediction:
        return (engine.inline(x) if self.early else engine.base(x))[0]

    def step(self, engine: Engine, most: int) -> bool:
        """Wait for inputs, and run one segment for at most so many; False if closed and empty.

        A worker that waits holds no answered request: its callbacks may refer to the `ConcurrentEngine`.
        """
        if (taken := self.take(most)) is None:
            return False
        position, requests = taken
        try:
            self.advance(engine, position, requests)
        except Exception as error:
            for request in requests:
                with suppress(InvalidStateError):  # it has an answer, or was cancelled just now
                    request.answer.set_exception(error)
        return True

    @torch.inference_mode()
    def advance(self, engine: Engine, position: int, requests: Sequence[_Request]) -> None:
        """Run one segment for inputs that wait in front of it, answer the hits and pass on the misses."""
        if position == 0 and len(requests) == 1 and engine.replays:
            _settle(requests[0], partial(self.ask, engine, requests[0].x))
            return
        segment = self.segments[position]
        carried = _together([request.carried for request in requests], segment.takes_rows)
        if position == 0:
            carried = (engine.to_run_on(*carried),)
        outcome = segment.run(carried)
        onward = []
        for row, request in enumerate(requests):
            if row in outcome.unsure:
                _settle(request, partial(self.ask, engine, request.x))
            elif row in outcome.answers:
                _settle(request, partial(self.engine.prediction, *outcome.answers[row]))
            else:
                request.carried = outcome.row(row)
                onward.append(request)
        if onward:
            with self.changed:
                self.queues[position + 1].extend(onward)
                self.changed.notify()

    def take(self, most: int) -> tuple[int, list[_Request]] | None:
        """Wait for inputs and take those of one queue; None if closed and empty."""
        with self.changed:
            while True:
                for queue in self.queues:
                    while queue and queue[0].answer.cancelled():
                        queue.popleft()
                if any(self.queues):
                    position = self._next()
                    queue = self.queues[position]
                    taken = [queue.popleft() for _ in range(min(most, len(queue)))]
                    return position, [each for each in taken if not each.answer.cancelled()]
                if self.closing:
                    return None
                self.changed.wait()

    def _next(self) -> int:
        """The longest queue, or the later one of equal length, unless another one has waited too long."""
        filled = [position for position, queue in enumerate(self.queues) if queue]
        oldest = min(filled, key=lambda position: self.queues[position][0].since_s)
        if time.monotonic() - self.queues[oldest][0].since_s > _PATIENCE_S:
            return oldest
        return max(filled, key=lambda position: (len(self.queues[position]), position))


def _settle(request: _Request, work: Callable[[], Prediction]) -> None:
    """Answer a request, unless its client has cancelled it."""
    if not request.answer.set_running_or_notify_cancel():
        return
    try:
        request.answer.set_result(work())
    except Exception as error:
        request.answer.set_exception(error)


def _together(rows: Sequence[tuple[Tensor, ...]], takes_rows: Sequence[bool]) -> tuple[Tensor, ...]:
    """Join the tensors of single inputs into a batch; tensors without one row per input are equal for all."""
    if len(rows) == 1:
        return rows[0]
    return tuple(
        torch.cat(tensors) if by_row else tensors[0]
        for tensors, by_row in zip(zip(*rows, strict=True), takes_rows, strict=True)
    )
