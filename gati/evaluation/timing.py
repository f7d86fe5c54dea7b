"""Latency of several methods, measured in turns, and throughput with several clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from typing import TypeVar

import numpy as np
from torch import Tensor

from gati.costs.disturbance import MACHINE, Machine, Steady, measure_steadily
from gati.costs.profile import quiet
from gati.engine.concurrent import ConcurrentEngine
from gati.engine.engine import Engine
from gati.engine.exits import BASE, Prediction
from gati.model.sequence import Data

WARM_UP_REQUESTS = 20
IN_A_ROW = 64  # requests in a turn
_WAKING_REQUESTS = 5  # untimed at the beginning of a turn
HELD_BYTES = 2**28  # of inputs, decoded once

_T = TypeVar("_T")
_Work = tuple[str, str, int]  # contender, exit, and the length of a sequence
Times = dict[_Work, list[float]]  # milliseconds


@dataclass
class BenchEntry:
    """One way to answer; `times_ms` has one list per repetition."""

    name: str
    engine: Engine
    early: bool  # use the exits, else run the whole network
    many: bool = True  # whether several clients can send requests at once
    times_ms: list[list[float]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    hits: int = 0
    _shared: ConcurrentEngine | None = None  # cached: compiling takes seconds

    def answer(self, x: Tensor) -> Prediction:
        """Answer one request [1, ...]."""
        return (self.engine(x) if self.early else self.engine.base(x))[0]

    def shared(self) -> ConcurrentEngine:
        """Return the same method for many clients."""
        if self._shared is None:
            self._shared = ConcurrentEngine(self.engine, early=self.early).start()
        return self._shared

    def close(self) -> None:
        """Stop the engine that `shared` started."""
        if self._shared is not None:
            self._shared.close()


def requests_of(inputs: Data) -> Callable[[int], Tensor]:
    """Return a function from an index to that request [1, ...]; the inputs of one turn are in memory."""

    @lru_cache(maxsize=1)
    def turn(number: int) -> Tensor:
        start = number * IN_A_ROW
        return inputs.images(range(start, min(start + IN_A_ROW, len(inputs))))

    def request(index: int) -> Tensor:
        number, row = divmod(index, IN_A_ROW)
        return turn(number)[row : row + 1]

    return request


def mixed_inputs(inputs: Data) -> Tensor:
    """Return as many inputs [n, ...] as a few hundred megabytes hold, in random order.

    A short run answers only the first of them, which in data that is ordered by class are all of one class.
    """
    order = np.random.default_rng(0).permutation(len(inputs))
    return inputs.images(order[: max(1, HELD_BYTES // inputs.images([0]).nbytes)])


def measure_latency(
    contenders: Sequence[BenchEntry],
    inputs: Callable[[int], Tensor],
    count: int,
    repetitions: int,
    progress: Callable[[int, int], None] | None = None,
    machine: Machine = MACHINE,
    warm_up: int = WARM_UP_REQUESTS,
) -> Steady[Times]:
    """Answer inputs 0..count-1 with every contender, `repetitions` times, after `warm_up` requests.

    `inputs(i)` is [1, ...]. Contenders take turns of up to 64 requests, and in going first. Disturbed
    rounds are measured again; the result reports those that stayed disturbed.
    """
    chunks = [range(start, min(start + IN_A_ROW, count)) for start in range(0, count, IN_A_ROW)]
    passes = [(repetition, chunk) for repetition in range(repetitions) for chunk in chunks]
    turns = _Turns(contenders, inputs, machine)
    reported = 0  # repeated rounds are not reported again

    def measured(number: int, repetition: int, chunk: range) -> Times:
        nonlocal reported
        times = turns.measure(number, chunk, keep=repetition == 0)
        done = repetition * count + chunk.stop
        if progress is not None and done > reported:
            reported = done
            progress(done, repetitions * count)
        return times

    with quiet():
        for contender in contenders:
            for example in contender.engine.examples():
                contender.answer(example)
            for request in range(warm_up):
                contender.answer(inputs(request % count).clone())
            contender.engine.close()
        rounds = [partial(measured, number, *each) for number, each in enumerate(passes)]
        found = measure_steadily(rounds, turns.alike, machine=machine)
    for contender in contenders:
        contender.times_ms = [[] for _ in range(repetitions)]
        for (repetition, _), times in zip(passes, found.rounds, strict=True):
            own = (taken for (name, *_), taken in times.items() if name == contender.name)
            contender.times_ms[repetition] += chain.from_iterable(own)
    return found


class _Turns:
    """Rounds in which every contender answers the same requests, in turns."""

    def __init__(
        self, contenders: Sequence[BenchEntry], inputs: Callable[[int], Tensor], machine: Machine
    ) -> None:
        self._contenders, self._inputs, self._machine = contenders, inputs, machine
        self._usual: _Work | None = None  # what most requests of the first round were

    def measure(self, number: int, requests: range, *, keep: bool) -> Times:
        """The times of round `number`; the answers are kept once, if `keep`."""
        times: Times = {}
        row = [self._inputs(request) for request in requests]
        for turn in range(len(self._contenders)):
            contender = self._contenders[(number + turn) % len(self._contenders)]
            first = keep and len(contender.answers) == requests.start
            with _opened(contender):
                predictions, taken_ms = answer_in_a_row(contender.answer, row, self._machine)
            for x, prediction, each_ms in zip(row, predictions, taken_ms, strict=True):
                work = contender.name, prediction.exit, contender.engine.shortened(x).shape[-1]
                times.setdefault(work, []).append(each_ms)
            if first:
                contender.answers += [prediction.class_index for prediction in predictions]
                contender.hits += sum(prediction.exit != BASE for prediction in predictions)
        return times

    def alike(self, times: Times) -> list[list[float]]:
        """Return times of equal work; the first ones are comparable across rounds."""
        self._usual = usual = self._usual or max(times, key=lambda work: len(times[work]))
        return [times.get(usual, []), *(times[work] for work in times if work != usual)]


def answer_in_a_row(
    ask: Callable[[Tensor], _T], requests: Sequence[Tensor], machine: Machine = MACHINE
) -> tuple[list[_T], list[float]]:
    """Answer requests [1, ...] one after the other; return the answers and their milliseconds.

    A service runs one method. If methods alternated with each request, each would find the processor's caches
    full of another one's weights, except for a base model between early answers: it would be too fast.
    A few untimed requests come first. Results must be on the CPU, so that a device has finished.
    """
    for request in requests[:_WAKING_REQUESTS]:
        ask(request.clone())
    answers, times_ms = [], []
    for request in requests:
        x = request.clone()
        start_ns = machine.now_ns()
        answers.append(ask(x))
        times_ms.append((machine.now_ns() - start_ns) / 1e6)
    return answers, times_ms


@contextmanager
def _opened(contender: BenchEntry) -> Iterator[None]:
    """Overlapped lookups reserve cores, which the other contenders must not miss."""
    if not contender.early:
        yield
        return
    with contender.engine:
        yield


def measure_throughput(
    contender: BenchEntry, inputs: Callable[[int], Tensor], count: int, clients: int, seconds: float
) -> float:
    """Return answers per second with `clients` threads that each send the next request after an answer.

    A single client calls the engine directly, several share a `ConcurrentEngine`.
    """
    if clients == 1:
        return _alone(contender, inputs, count, seconds)
    ask = contender.shared()
    gate = threading.Barrier(clients + 1)
    done = [0] * clients
    ends = [0.0] * clients
    failures: list[BaseException] = []
    stop = threading.Event()

    def client(index: int) -> None:
        try:
            ask(inputs(index % count).clone())
        except Exception as error:
            failures.append(error)
        gate.wait()
        request = index
        while not stop.is_set() and not failures:
            try:
                ask(inputs(request % count).clone())
            except Exception as error:
                failures.append(error)
                break
            done[index] += 1
            request += clients
        ends[index] = time.perf_counter()

    threads = [threading.Thread(target=client, args=(index,), daemon=True) for index in range(clients)]
    for thread in threads:
        thread.start()
    gate.wait()
    start = time.perf_counter()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    contender.engine.close()
    if failures:
        raise failures[0]
    return sum(done) / (max(ends) - start)


def _alone(contender: BenchEntry, inputs: Callable[[int], Tensor], count: int, seconds: float) -> float:
    """Run in this thread: torch keeps a thread pool per calling thread, and the pools share the cores."""
    contender.answer(inputs(0).clone())
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        contender.answer(inputs(done % count).clone())
        done += 1
    taken_s = time.perf_counter() - start
    contender.engine.close()
    return done / taken_s
