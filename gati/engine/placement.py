"""Lookups that run in parallel with the network's next blocks.

They run one at a time: on the CPU on a worker thread with its own cores, on CUDA on a second stream. The
engine submits a hidden output, continues with the network, and checks between blocks whether the answer has
arrived.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NamedTuple, Self

import torch
from torch import Tensor

from gati.engine.cores import PartOfCores, ReservedCores, divided, pin, reserved_here
from gati.engine.exits import Lookup
from gati.engine.threads import limit_threads

# The number of blocks that the host may queue ahead of the running one. Without a limit, a fast host queues
# the whole network before the first lookup ends, and a hit saves nothing.
_BLOCKS_AHEAD = 2
_FIRST_WAIT_S = 0.01  # for a lookup that has no measured time yet


class Answer(NamedTuple):
    """The result of a lookup for one input: probabilities [1, K] and the score."""

    probabilities: Tensor
    score: float


class ParallelLookups(ABC):
    """Runs one lookup at a time in parallel with the base model; as a context manager, open inside it."""

    @abstractmethod
    def submit(self, lookup: Lookup, hidden: Tensor) -> None:
        """Start `lookup(hidden)`; call `answer` for the previous lookup first."""

    @abstractmethod
    def finished(self) -> bool:
        """Whether the answer has arrived; does not wait."""

    @abstractmethod
    def answer(self) -> Answer:
        """Wait for the lookup and return its answer. Raises whatever the lookup raised."""

    def keep_pace(self) -> None:  # noqa: B027 - only streams need it
        """Stop the host from queueing many blocks ahead of the device; called between blocks."""

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the reserved cores inside the context, to measure the base model alone."""
        yield

    @abstractmethod
    def open(self) -> None:
        """Reserve cores or create a stream."""

    @abstractmethod
    def close(self) -> None:
        """Release the cores or stream; may be called twice."""

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parallel_lookups(device: torch.device, cores: int = 1) -> ParallelLookups:
    """Return an object, not opened yet, that runs lookups in parallel with the base model on `device`.

    On the CPU they have so many `cores`.
    """
    return StreamLookups(device) if device.type == "cuda" else WorkerLookups(cores)


class _Work:
    """One lookup, run by the worker, and by the caller too if the worker is late; the first answer counts."""

    __slots__ = ("done", "elapsed_s", "found", "hidden", "lookup", "wanted")

    def __init__(self, lookup: Lookup, hidden: Tensor) -> None:
        self.lookup = lookup
        self.hidden = hidden
        self.found: Answer | BaseException | None = None
        self.elapsed_s = math.inf
        self.wanted = True
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        start = time.perf_counter()
        try:
            probabilities, score = self.lookup(self.hidden)
            found: Answer | BaseException = Answer(probabilities, score.item())
        except BaseException as error:  # raised again in `answer`
            found = error
        self.elapsed_s = time.perf_counter() - start
        self.found = self.found or found


class WorkerLookups(ParallelLookups):
    """A worker thread pinned to the last `cores` of the process; the calling thread keeps the others.

    The worker uses as many torch threads as it has cores, the calling thread at most as many as remain. At
    least one core remains, so the worker may get fewer than `cores`; a single core serves both. A quota
    of time is divided in the same way, see `divided`.

    `answer` waits for the worker as long as the lookup's best time so far, then the calling thread runs the
    lookup itself. So even if the worker's cores are busy, `answer` takes about twice as long as the lookup.
    What is opened in the same thread meanwhile shares the reserved cores: the calling thread leaves as many
    as the largest number, and the last `close` restores affinity and thread count. If another thread closes,
    the thread that called `open` has its cores again at once, and its thread count after its next `open` or
    `close`.

    Threads that torch has started for the calling thread before stay on all cores, also on those of lookups:
    call `open` in a thread that has computed nothing yet, as services do.
    """

    def __init__(self, cores: int = 1) -> None:
        self.cores = cores
        self._inbox: SimpleQueue[_Work | None] = SimpleQueue()
        self._work: _Work | None = None
        self._thread: threading.Thread | None = None
        self._reserved: ReservedCores | None = None  # of the thread that called `open`
        self._end: Callable[[], object] | None = None  # stops the worker and releases the cores
        self._best_s: dict[Lookup, float] = {}

    def open(self) -> None:
        """Start and pin the worker, and confine the calling thread to the other cores."""
        if self._thread is not None:
            return
        reserved = reserved_here()
        _, theirs = divided(reserved.cores, self.cores)
        started = threading.Event()
        work = (self._inbox, theirs, started)
        thread = threading.Thread(target=_serve, args=work, name="gati-lookup", daemon=True)
        thread.start()
        self._thread = thread
        share = object()
        self._end = end = weakref.finalize(self, _end, self._inbox, reserved, share, os.getpid())
        end.atexit = False  # the process takes both with it
        started.wait()  # it leaves torch's number as it found it, so this thread must not change it yet
        self._reserved = reserved
        reserved.add(share, self.cores)

    def close(self) -> None:
        """Stop the worker and release the cores; this also happens when nothing refers to this any more."""
        if self._thread is None or self._end is None:
            reserved_here().settle()
            return
        self._end()
        self._thread.join()
        self._thread = self._reserved = self._end = None
        reserved_here().settle()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Restore all cores and threads of the calling thread inside the context."""
        if self._reserved is None:
            yield
            return
        self._reserved.release()
        try:
            yield
        finally:
            self._reserved.confine()

    def submit(self, lookup: Lookup, hidden: Tensor) -> None:
        """Submit the lookup to the worker."""
        self._work = _Work(lookup, hidden)
        self._inbox.put(self._work)

    def finished(self) -> bool:
        """Whether the worker has an answer."""
        return self._work is not None and self._work.found is not None

    def answer(self) -> Answer:
        """Return the worker's answer; if it does not arrive in time, run the lookup in this thread."""
        work = self._work
        if work is None:
            raise RuntimeError("no lookup was submitted")
        if work.found is None:
            in_time = work.done.acquire(timeout=self._best_s.get(work.lookup, _FIRST_WAIT_S))
            if not in_time and work.found is None:
                work.run()
        work.wanted = False
        self._best_s[work.lookup] = min(work.elapsed_s, self._best_s.get(work.lookup, math.inf))
        self._work = None
        found = work.found  # once: a worker that is late may still replace it
        if isinstance(found, Answer):
            return found
        raise found or RuntimeError("the lookup gave no answer")


def _end(inbox: SimpleQueue[_Work | None], reserved: ReservedCores, share: object, process: int) -> None:
    """Called at any moment, also while the same thread holds a lock: so it waits for nothing."""
    if os.getpid() != process:  # in a forked one there is no worker, and torch would wait for its threads
        return
    inbox.put(None)
    reserved.remove(share)


def _serve(inbox: SimpleQueue[_Work | None], part: PartOfCores, started: threading.Event) -> None:
    """The worker's loop; it knows nothing of its `WorkerLookups`, so that these can be collected."""
    try:
        pin(part.cores)
        limit_threads(part.threads)
    finally:
        started.set()  # else `open` would wait for ever
    with torch.inference_mode():
        while (work := inbox.get()) is not None:
            if work.wanted:
                work.run()
                work.done.release()
            del work  # free its hidden output before the next one arrives


class StreamLookups(ParallelLookups):
    """A second CUDA stream: lookups wait for an event after the hidden output; the host polls another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def open(self) -> None:
        """Create the stream and its events."""
        if self._stream is not None:
            return
        self._stream = torch.cuda.Stream(self._device)
        self._score: Tensor | None = None
        self._probabilities: Tensor | None = None
        self._produced, self._done = cuda_event(), cuda_event()
        self._marks = [cuda_event() for _ in range(_BLOCKS_AHEAD)]
        self._blocks = 0

    def close(self) -> None:
        """Wait for the stream and drop it."""
        if self._stream is not None:
            self._stream.synchronize()
            self._stream = None

    def submit(self, lookup: Lookup, hidden: Tensor) -> None:
        """Queue the lookup on the second stream, after the hidden output."""
        stream = self._opened()
        self._produced.record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            stream.wait_event(self._produced)
            probabilities, score = lookup(hidden)
            self._probabilities = _sent(probabilities, self._probabilities)
            self._score = _sent(score, self._score)
            self._done.record(stream)
        hidden.record_stream(stream)  # its memory must not be reused while the lookup reads it

    def finished(self) -> bool:
        """Whether the score has reached the host; queries an event without synchronising."""
        return _is_complete(self._done)

    def answer(self) -> Answer:
        """Wait for the second stream only, not for work that is still queued on the first one."""
        self._done.synchronize()
        if self._probabilities is None or self._score is None:
            raise RuntimeError("no lookup was submitted")
        return Answer(self._probabilities.clone(), self._score.item())

    def keep_pace(self) -> None:
        """Wait while too many blocks are queued and the lookup still runs."""
        mark = self._marks[self._blocks % _BLOCKS_AHEAD]
        if self._blocks >= _BLOCKS_AHEAD:
            while not _is_complete(mark) and not _is_complete(self._done):
                pass
        mark.record(torch.cuda.current_stream(self._device))
        self._blocks += 1

    def _opened(self) -> torch.cuda.Stream:
        if self._stream is None:
            raise RuntimeError("open the stream first")
        return self._stream


def _sent(source: Tensor, host: Tensor | None) -> Tensor:
    """Queue a copy of `source` to pinned memory, that of an earlier copy if it fits; returns the memory."""
    if host is None or (host.shape, host.dtype) != (source.shape, source.dtype):
        # whatever device and dtype are the program's defaults
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
    return host.copy_(source, non_blocking=True)


def cuda_event(*, timing: bool = False) -> torch.cuda.Event:
    """A CUDA event, typed here because torch leaves its constructor untyped."""
    return torch.cuda.Event(enable_timing=timing)


def _is_complete(event: torch.cuda.Event) -> bool:
    return bool(event.query())
