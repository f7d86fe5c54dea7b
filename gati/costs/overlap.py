"""Costs of lookups that run in parallel with the base model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gati.costs.disturbance import Machine, Uncounted, measure_steadily
from gati.costs.profile import LEAST_TURNS, TURNS_ENOUGH_S, quiet, rounds, time_call_ms
from gati.engine.backends import segment_backend
from gati.engine.exits import Lookup
from gati.engine.placement import ParallelLookups, parallel_lookups
from gati.model.cuts import Segment
from gati.model.segments import TracedModel

# With few cores, waiting for a core is part of the cost, not a disturbance.
_NOT_ALONE = Uncounted()

T = TypeVar("T")


class OverlapCost(NamedTuple):
    """Costs of a parallel lookup: time from submission to answer, and time that it adds to the base model."""

    lookup_ms: float
    penalty_ms: float


def measure_overlap(
    traced: TracedModel,
    block: str,
    cache: nn.Module,
    repetitions: int = 10,
    *,
    cores: int = 1,
    notes: list[str] | None = None,
    machine: Machine = _NOT_ALONE,
) -> OverlapCost:
    """Measure the cost of a lookup after `block` that runs in parallel with the rest of the base model.

    On the CPU the lookup has so many `cores`. The penalty compares whole requests: the base model with a
    lookup in parallel, on the remaining cores, against the base model alone, on all cores. If `repetitions`
    take more than 1.5 seconds, there are fewer, at least 3. `notes` is as for `measure_in_turns`.
    """
    request, device = traced.example(), traced.device
    runner = segment_backend("torch")
    first, last = runner.path(traced, [block]).segments

    def run(x: Tensor) -> None:
        last.run(*first.run(x))

    with quiet(), torch.inference_mode():
        lookup = runner.lookup(cache, first.run(request.clone())[0])
        with parallel_lookups(device, cores) as lookups:

            def each_alone() -> float:
                return time_call_ms(partial(run, request.clone()), device, machine)

            def each_overlapped() -> tuple[float, float]:
                return _overlapped_ms(first, last, lookup, request.clone(), lookups, device, machine)

            def alone_ms() -> list[float]:
                with lookups.released():
                    return _repeated(each_alone, repetitions, machine)

            def measure() -> _Overlapped:
                before = alone_ms()
                during = _repeated(each_overlapped, repetitions, machine)
                return _Overlapped(before + alone_ms(), *map(list, zip(*during, strict=True)))

            found = measure_steadily(
                [measure], lambda times: times, machine=machine, enough_s=2 * TURNS_ENOUGH_S
            )
    if notes is not None and found.note:
        notes.append(found.note)
    base_ms, lookup_ms, request_ms = map(median, found.rounds[0])
    return OverlapCost(lookup_ms, max(0.0, request_ms - base_ms))


class _Overlapped(NamedTuple):
    """Milliseconds of requests without lookups, of parallel lookups, and of the requests with them."""

    alone_ms: list[float]
    lookup_ms: list[float]
    request_ms: list[float]


def _repeated(run: Callable[[], T], repetitions: int, machine: Machine) -> list[T]:
    """Results of `run`, after one or two that do not count."""
    for _ in rounds(2, 1, TURNS_ENOUGH_S / 2, machine):
        run()
    return [run() for _ in rounds(repetitions, LEAST_TURNS, TURNS_ENOUGH_S, machine)]


def _overlapped_ms(
    first: Segment,
    last: Segment,
    lookup: Lookup,
    request: Tensor,
    lookups: ParallelLookups,
    device: torch.device,
    machine: Machine,
) -> tuple[float, float]:
    """Milliseconds from submission to answer, and of the whole request."""
    answered = 0

    def timed(hidden: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal answered
        found = lookup(hidden)
        answered = machine.now_ns()
        return found

    start = machine.now_ns()
    carried = first.run(request)
    handed_over = machine.now_ns()
    lookups.submit(timed, carried[0].clone() if first.hidden_changes_later else carried[0])
    last.run(*carried)
    if device.type == "cuda":  # the host runs ahead: only waiting for the answer shows when the lookup ended
        lookups.answer()
        answered = machine.now_ns()
        torch.cuda.synchronize(device)
        end = machine.now_ns()
    else:
        end = machine.now_ns()
        lookups.answer()
    return (answered - handed_over) / 1e6, (end - start) / 1e6
