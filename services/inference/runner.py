"""Runs single inputs on an engine, away from the event loop."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from gati.engine.concurrent import ConcurrentEngine
from gati.engine.engine import Engine
from gati.engine.exits import Prediction
from gati.engine.threads import let_others_first
from services.pausing import Takes

# Of threads that compute. Event loops come first: they accept or refuse requests, however busy engines are.
NICENESS = 10
_SEGMENT_ROWS = 8  # inputs in flight per worker, if it can batch them by segment
_GPU_ROWS = 32


class Runner(Protocol):
    """Answers inputs. Callers submit at most `parallel` at a time, so the others can still be cancelled.

    `takes`: the cores that they take.
    """

    parallel: int
    takes: Takes

    def submit(self, x: Tensor) -> Future[Prediction]:
        """Submit one preprocessed input [1, ...]."""
        ...

    def close(self) -> None:
        """Answer the submitted inputs, then stop."""
        ...


def open_runner(engine: Engine, *, early: bool = True, workers: int | None = None) -> Runner:
    """A runner with one worker per thread of torch, or one worker on all of them if lookups are overlapped.

    `early` False runs the network without caches; `workers` overrides the number of workers.
    """
    if workers == 1 or (early and engine.overlapped):
        return _OneAtATime(engine, early=early)
    return _Concurrent(engine, early=early, workers=workers)


class _Concurrent:
    """Several inputs concurrently, one thread each; see `ConcurrentEngine`."""

    def __init__(self, engine: Engine, *, early: bool, workers: int | None) -> None:
        engines = ConcurrentEngine(engine, early=early, workers=workers, niceness=NICENESS)
        self._engine = engines.start()
        on_gpu = engine.traced.device.type == "cuda"
        each = 1 if engine.compiled else _GPU_ROWS if on_gpu else _SEGMENT_ROWS
        self.parallel = each * self._engine.workers
        # What retrains may use the same GPU, which has many inputs at once, though one worker feeds it.
        self.takes = Takes(1, torch.get_num_threads() if on_gpu else self._engine.workers)

    def submit(self, x: Tensor) -> Future[Prediction]:
        return self._engine.submit(x, own=True)

    def close(self) -> None:
        self._engine.close()


class _OneAtATime:
    """One input at a time, always from the same thread, on as many threads of torch as when it was opened."""

    def __init__(self, engine: Engine, *, early: bool) -> None:
        self.parallel = 1
        self._engine = engine
        self._ask = engine if early else engine.base
        # Overlapped lookups confine their thread to some cores, so that engine needs a thread of its own.
        self._owns_thread = early and engine.overlapped
        self._threads = torch.get_num_threads()
        self.takes = Takes(self._threads, self._threads)
        self._thread = _engine_thread() if self._owns_thread else _shared_thread()

    def submit(self, x: Tensor) -> Future[Prediction]:
        return self._thread.submit(self._answer, x)

    def close(self) -> None:
        self._thread.submit(self._engine.close).result()
        if self._owns_thread:
            self._thread.shutdown(wait=True)

    def _answer(self, x: Tensor) -> Prediction:
        if not self._owns_thread and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # an engine with another number was here
        return self._ask(x)[0]


@cache
def _shared_thread() -> ThreadPoolExecutor:
    """The thread of all engines that take turns.

    Torch keeps as many threads for each thread that calls it as it may use; as soon as a process has more of
    them than cores, they sleep between operations, and small networks take several times as long.
    """
    return _engine_thread()


def _engine_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        1, thread_name_prefix="gati-engine", initializer=_begin, initargs=(torch.get_num_threads(),)
    )


def _begin(threads: int) -> None:
    torch.set_num_threads(threads)  # else it takes the number that any thread has set last
    let_others_first(NICENESS)
