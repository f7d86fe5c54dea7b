"""Measured latencies of the base model and of lookups, at batch size 1, on the serving machine.

Times to compare are measured alternately, round by round, so that a slow moment of the machine affects both.
The median is kept. Blocks that do the same work share their measurements. Disturbed measurements are
repeated, and results that stay disturbed carry a note.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gati.costs.disturbance import MACHINE, Machine, measure_steadily
from gati.costs.hardware import conditions_here
from gati.engine.backends import SegmentBackend, segment_backend
from gati.engine.exits import Lookup
from gati.engine.placement import cuda_event
from gati.model.alike import work_of
from gati.model.cuts import Segment
from gati.model.entry import INPUT_KIND
from gati.model.segments import TracedModel
from gati.types import BlockProfile, Profile

_WARM_UP_ROUNDS = 5
_LOOKUP_BUDGET_S = 0.03
_LOOKUP_MINIMUM = 15
_LOOKUP_MAXIMUM = 200
# Times of slow networks vary less: after so many seconds, a few rounds are enough. A network that takes up to
# 50 ms gets all of them.
_PROFILE_ENOUGH_S, _LEAST_PROFILE_ROUNDS = 5.0, 5
TURNS_ENOUGH_S, LEAST_TURNS = 1.5, 3


def measure_profile(
    traced: TracedModel,
    blocks: Sequence[str] | None = None,
    repetitions: int = 40,
    *,
    backend: str = "torch",
    machine: Machine = MACHINE,
) -> Profile:
    """Time the base model, as a whole and block by block, for one request.

    `base_ms` is the time of the uncut network, or of its segments if they are faster. `reach_ms` never
    decreases from block to block and never exceeds `base_ms`: times of blocks are scaled, since cutting at
    every block adds a cost that no composition has. Blocks with the same operators and shapes get the same
    time, the median over all of them. The input is reached after 0 ms. If `repetitions` take more than 5
    seconds, there are fewer, at least 5.
    """
    names = tuple(traced.blocks if blocks is None else blocks)
    request = traced.example()
    path = segment_backend(backend).timed_path(traced, names)

    def measure() -> _Walks:
        walks = _Walks([], [])
        for _ in rounds(_WARM_UP_ROUNDS, 1, TURNS_ENOUGH_S, machine):
            path.base(request.clone())
            _walk_ms(path.segments, request, traced.device, machine)
        for _ in rounds(repetitions, _LEAST_PROFILE_ROUNDS, _PROFILE_ENOUGH_S, machine):
            walks.whole_ms.append(time_call_ms(partial(path.base, request.clone()), traced.device, machine))
            walks.ends_ms.append(_walk_ms(path.segments, request, traced.device, machine))
        return walks

    with quiet(), torch.inference_mode():
        found = measure_steadily([measure], _Walks.alike, machine=machine, enough_s=2 * _PROFILE_ENOUGH_S)
    (walks,) = found.rounds
    shared_ms = _shared_ms(walks, work_of(traced, names))
    if names and traced.block_kinds[names[0]] == INPUT_KIND:
        shared_ms[0] = 0.0  # nothing runs before the input: only an empty function call was timed
    *reach, total_ms = accumulate(shared_ms)
    base_ms = min(median(walks.whole_ms), total_ms)  # segments do the same work: any excess is noise
    reach_ms = [value * base_ms / total_ms for value in reach]
    own_ms = [later - earlier for earlier, later in pairwise([0.0, *reach_ms])]
    profiles = [
        BlockProfile(
            index, name, traced.block_kinds[name], traced.hidden_shapes[name], own_ms[index], reach_ms[index]
        )
        for index, name in enumerate(names)
    ]
    device = str(traced.device)
    here = conditions_here(device)
    return Profile(
        backend,
        device,
        here.threads,
        base_ms,
        tuple(profiles),
        found.note,
        processor=here.processor,
        software=here.software,
    )


class _Walks(NamedTuple):
    """Milliseconds per request: for the whole network, and to the end of each segment."""

    whole_ms: list[float]
    ends_ms: list[list[float]]

    def alike(self) -> list[list[float]]:
        return [self.whole_ms, [ends[-1] for ends in self.ends_ms]]


def _shared_ms(walks: _Walks, work: Sequence[str]) -> list[float]:
    """Return the time of each segment: the median over requests and segments that do the same work."""
    own: dict[str, list[float]] = {}
    for ends in walks.ends_ms:
        for what, (earlier, later) in zip(work, pairwise([0.0, *ends]), strict=True):
            own.setdefault(what, []).append(later - earlier)
    typical = {what: median(times) for what, times in own.items()}
    return [typical[what] for what in work]


@dataclass(frozen=True, kw_only=True)
class InTurns:
    """Milliseconds of a lookup and of the base model, which took turns: the lower quartiles.

    Other work on the machine only adds to times, and to long ones more; so the shorter ones compare better.
    """

    lookup_ms: float
    base_ms: float


def measure_in_turns(
    cache: nn.Module,
    hidden: Tensor,
    base: Callable[[], Any],
    *,
    backend: str = "torch",
    notes: list[str] | None = None,
    machine: Machine = MACHINE,
) -> InTurns:
    """Time a lookup, from the hidden output [1, ...] to the score as a number, in turns with the base model.

    `base` runs the base model; both run 15 times, or fewer, at least 3, if that takes more than 1.5 seconds.
    So a slow moment of the machine affects both, and the CPU caches are in a realistic state: without the
    base model a lookup seems two to three times as fast as it is. The time depends on shapes only, not on
    weights. If the measurement stays disturbed, a line is added to `notes`.
    """
    times, base_times = _timed_lookups(cache, hidden, base, backend, notes, machine)
    return InTurns(lookup_ms=quantiles(times, n=4)[0], base_ms=quantiles(base_times, n=4)[0])


def measure_lookup(
    cache: nn.Module, hidden: Tensor, *, backend: str = "torch", machine: Machine = MACHINE
) -> float:
    """Return the median milliseconds of one lookup with nothing in between, see `measure_in_turns`.

    Repeats the lookup until it has taken 30 ms, 15 to 200 times.
    """
    times, _ = _timed_lookups(cache, hidden, None, backend, None, machine)
    return median(times)


def _timed_lookups(
    cache: nn.Module,
    hidden: Tensor,
    base: Callable[[], Any] | None,
    backend: str,
    notes: list[str] | None,
    machine: Machine,
) -> tuple[list[float], list[float]]:
    """Milliseconds of lookups, and of `base` before each; none without it."""
    runner: SegmentBackend = segment_backend(backend)
    with quiet(), torch.inference_mode():
        lookup = runner.timed_lookup(cache, hidden)

        def measure() -> list[list[float]]:
            for _ in range(3):
                _looked_up(lookup, hidden)
            times: list[float] = []
            base_times: list[float] = []
            for _ in rounds(_LOOKUP_MINIMUM, LEAST_TURNS, TURNS_ENOUGH_S, machine):
                if base is not None:
                    base_times.append(time_call_ms(base, hidden.device, machine))
                times.append(time_call_ms(partial(_looked_up, lookup, hidden), hidden.device, machine))
            while base is None and sum(times) < _LOOKUP_BUDGET_S * 1e3 and len(times) < _LOOKUP_MAXIMUM:
                times.append(time_call_ms(partial(_looked_up, lookup, hidden), hidden.device, machine))
            return [times, base_times]

        found = measure_steadily([measure], lambda times: times, machine=machine, enough_s=2 * TURNS_ENOUGH_S)
    if notes is not None and found.note:
        notes.append(found.note)
    ((times, base_times),) = found.rounds
    return times, base_times


def time_call_ms(function: Callable[[], Any], device: torch.device, machine: Machine = MACHINE) -> float:
    """Return wall-clock milliseconds of one call, including the device's work."""
    start_ns = machine.now_ns()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (machine.now_ns() - start_ns) / 1e6


def rounds(most: int, least: int, enough_s: float, machine: Machine = MACHINE) -> Iterator[int]:
    """Count to `most`, or after `enough_s` seconds only to `least`."""
    began_ns = machine.now_ns()
    for number in range(most):
        if number >= least and machine.now_ns() - began_ns > enough_s * 1e9:
            return
        yield number


@contextmanager
def quiet() -> Iterator[None]:
    """Disable garbage collection while timing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _looked_up(lookup: Lookup, hidden: Tensor) -> float:
    return lookup(hidden)[1].item()


def _walk_ms(
    segments: Sequence[Segment], request: Tensor, device: torch.device, machine: Machine
) -> list[float]:
    """Return milliseconds from the start of a request to the end of each segment."""
    carried: Any = (request.clone(),)
    if device.type == "cuda":
        return _walk_cuda_ms(segments, carried)
    times = [machine.now_ns()]
    for segment in segments:
        carried = segment.run(*carried)
        times.append(machine.now_ns())
    return [(moment - times[0]) / 1e6 for moment in times[1:]]


def _walk_cuda_ms(segments: Sequence[Segment], carried: Any) -> list[float]:
    marks = [cuda_event(timing=True) for _ in range(len(segments) + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for segment, mark in zip(segments, marks[1:], strict=True):
        carried = segment.run(*carried)
        mark.record()
    torch.cuda.synchronize()
    return [marks[0].elapsed_time(mark) for mark in marks[1:]]
