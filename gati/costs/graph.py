"""Costs of network and lookups inside one compiled graph, at batch size 1, on the serving machine.

Each exit is measured in place, as a graph with one exit. Its runs alternate with those of the plain network,
and times are relative to it, so that a slow moment affects both. An exit that is never taken shows what its
lookup and decision add to a miss; one that is always taken shows the time to reach its block. A lookup timed
alone would also pay for waking threads, which are awake in a running network. Blocks that do the same work
share their time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gati.costs.disturbance import MACHINE, Machine, measure_steadily
from gati.costs.hardware import conditions_here
from gati.costs.profile import quiet, rounds
from gati.engine.backends import Graph, GraphBackend
from gati.engine.exits import EngineExit
from gati.engine.graph.convert import Converter
from gati.model.alike import work_of
from gati.model.segments import TracedModel
from gati.types import BlockProfile, OutputsKind, Profile

_ANCHORS = 6  # blocks measured; the others are interpolated from a known profile
_ROUNDS, _LEAST_ROUNDS, _WARM_UP_ROUNDS = 150, 20, 10
_TURNS, _LEAST_TURNS, _IN_A_ROW = 60, 5, 8
_ENOUGH_S = 1.0  # then fewer rounds are enough: timings of large networks vary less
_PASSES, _PATIENCE = 3, 2  # after _PATIENCE disturbed measurements, further ones are not repeated
_NEVER = 1e30


@dataclass(frozen=True)
class GraphCosts:
    """Latencies of the network and its lookups.

    `if_ms` is the time that a decision without a lookup adds to a miss; `lookup_ms` the time that each lookup
    adds, including its decision.
    """

    profile: Profile
    if_ms: float
    lookup_ms: dict[str, float]


class _Glance(nn.Module):
    """A lookup that does no work: it returns a few values of the hidden output."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        values = hidden.flatten(1)
        repeated = values[:, :1].repeat(1, self.classes)
        return repeated, values[:, 0] * 1.0


@cache
def _glance(classes: int) -> nn.Module:
    """The same one each time, so that it is converted once for all backends."""
    return _Glance(classes).eval()


def measure_graph(
    traced: TracedModel,
    known: Profile,
    backend: GraphBackend,
    outputs_kind: OutputsKind,
    caches: Mapping[str, tuple[str, nn.Module]],
    progress: Callable[[int, int], None] | None = None,
    *,
    convert: Converter | None = None,
    cuts: Collection[str] = (),
    network: GraphCosts | None = None,
    machine: Machine = MACHINE,
) -> GraphCosts:
    """Time the base model, the network up to each block, and lookups, for one request on `backend`.

    `known` is a profile of the same network on another backend, used to interpolate between measured blocks.
    `caches` are the lookups to measure, each with its block. `progress(done, of)` counts graphs; `convert`
    and `cuts` are as for `GraphBackend.assembled`. If `backend` runs the same network as another one and only
    lookups differently, `network` is what was measured there: then only lookups are measured.
    """
    names = [block.name for block in known.blocks]
    at = anchors(known) if network is None else []
    glance = _glance(traced.classes)
    settings: list[list[list[EngineExit]]] = [[[]]]
    settings += [[[EngineExit(names[i], glance, limit)] for limit in (_NEVER, -_NEVER)] for i in at]
    settings += [[[EngineExit(block, cache.eval(), _NEVER)]] for block, cache in caches.values()]
    notes: list[str] = []
    cuts = places_to_measure(known, caches) | set(cuts)
    convert = convert or Converter()
    shares: list[float] = []
    base: Graph | None = None
    base_ms: list[float] = []
    for done, alike in enumerate(settings, start=1):
        for model in backend.assembled(traced, alike, outputs_kind, convert=convert, cuts=cuts):
            graph = backend.compile(model)
            base = graph if base is None else base
            plain_ms, own_ms = _medians(base, graph, traced.example(), notes, machine)
            base_ms.append(plain_ms)
            shares.append(own_ms / plain_ms)
        if progress is not None:
            progress(done, len(settings))
    typical_ms = median(base_ms) if network is None else network.profile.base_ms
    _, *times_ms = (share * typical_ms for share in shares)
    at_anchors_ms, lookups = times_ms[: 2 * len(at)], times_ms[2 * len(at) :]
    lookup_ms = {name: max(0.0, passed - typical_ms) for name, passed in zip(caches, lookups, strict=True)}
    disturbance = of_many(notes, len(shares))
    if network is not None:
        profile = replace(network.profile, backend=backend.name)
        return GraphCosts(
            replace(profile, disturbance=disturbance or profile.disturbance), network.if_ms, lookup_ms
        )
    decisions_ms = [max(0.0, passed - typical_ms) for passed in at_anchors_ms[0::2]]
    through = zip(at_anchors_ms[1::2], decisions_ms, strict=True)
    reached = [max(0.0, there - if_ms) for there, if_ms in through]
    profile = profile_between(known, backend.name, at, reached, typical_ms, work=work_of(traced, names)[:-1])
    return GraphCosts(replace(profile, disturbance=disturbance), median(decisions_ms), lookup_ms)


def places_to_measure(known: Profile, caches: Mapping[str, tuple[str, nn.Module]]) -> set[str]:
    """Return the blocks at which `measure_graph` inserts an exit."""
    return {*(known.blocks[index].name for index in anchors(known)), *(block for block, _ in caches.values())}


def anchors(known: Profile) -> list[int]:
    """Return the indices of the blocks to measure: a few, evenly spaced, including the first."""
    last = len(known.blocks) - 1
    return sorted({round(position) for position in np.linspace(0, last, _ANCHORS + 1)[:-1]})


def profile_between(
    known: Profile,
    backend: str,
    at: Sequence[int],
    reached_ms: Sequence[float],
    base_ms: float,
    device: str = "cpu",
    work: Sequence[str] = (),
) -> Profile:
    """Return the profile of a backend that reaches the blocks `at` after `reached_ms`.

    Other blocks are interpolated from `known`, a profile of the same network on another backend. Blocks with
    the same `work` share their time.
    """
    rising = np.minimum(np.maximum.accumulate(reached_ms), base_ms).tolist()
    elsewhere = [*(known.blocks[index].reach_ms for index in at), known.base_ms]
    here = [*rising, base_ms]
    if elsewhere[0] > 0.0:  # else the first block is the input, reached after the call overhead alone
        elsewhere, here = [0.0, *elsewhere], [0.0, *here]
    reach_ms = np.interp([block.reach_ms for block in known.blocks], elsewhere, here)
    own_ms = _shared_ms(np.diff(reach_ms, prepend=0.0), work)
    reach_ms = np.cumsum(own_ms)
    blocks = tuple(
        BlockProfile(block.index, block.name, block.kind, block.output_shape, float(own), float(reached))
        for block, own, reached in zip(known.blocks, own_ms, reach_ms, strict=True)
    )
    now = conditions_here(device)
    return Profile(
        backend, device, now.threads, base_ms, blocks, processor=now.processor, software=now.software
    )


def of_many(notes: Sequence[str], measurements: int) -> str:
    """Return one line that counts the measurements with a note (disturbed ones), or "" if there is none."""
    return f"{len(notes)} of {measurements} measurements: {notes[0]}" if notes else ""


def _shared_ms(own_ms: npt.NDArray[np.float64], work: Sequence[str]) -> npt.NDArray[np.float64]:
    """Average the times of blocks that do the same work; the sum does not change."""
    alike: dict[str, list[int]] = {}
    for index, what in enumerate(work):
        alike.setdefault(what, []).append(index)
    shared = own_ms.copy()
    for indices in alike.values():
        shared[indices] = own_ms[indices].mean()
    return shared


def by_turns_ms(
    graphs: Sequence[Graph], request: Tensor, notes: list[str] | None = None, machine: Machine = MACHINE
) -> list[float]:
    """Return the median milliseconds of each of `graphs`, which take turns of a few requests in a row.

    If the measurement stays disturbed, a line is added to `notes`.
    """

    def measure() -> list[list[float]]:
        times: list[list[float]] = [[] for _ in graphs]
        for _ in rounds(_TURNS, _LEAST_TURNS, _ENOUGH_S * len(graphs), machine):
            for graph, taken in zip(graphs, times, strict=True):
                for number in range(_IN_A_ROW):
                    start_ns = machine.now_ns()
                    graph.answer(request)
                    if number >= _IN_A_ROW // 2:  # the graph's weights are in the CPU caches by now
                        taken.append((machine.now_ns() - start_ns) / 1e6)
        return times

    return _steady_medians(measure, notes, machine)


def _medians(
    base: Graph, graph: Graph, request: Tensor, notes: list[str] | None = None, machine: Machine = MACHINE
) -> tuple[float, float]:
    """Return median milliseconds of `base` and `graph`, which alternate; `notes` as for `by_turns_ms`.

    Only two graphs alternate: with more, each would find the CPU caches full of the others' weights.
    """

    def measure() -> list[list[float]]:
        times: list[list[float]] = [[], []]
        most, least = _ROUNDS + _WARM_UP_ROUNDS, _LEAST_ROUNDS + _WARM_UP_ROUNDS
        for number in rounds(most, least, _ENOUGH_S, machine):
            for each, taken in zip((base, graph), times, strict=True):
                start_ns = machine.now_ns()
                each.answer(request)
                if number >= _WARM_UP_ROUNDS:
                    taken.append((machine.now_ns() - start_ns) / 1e6)
        return times

    base_ms, graph_ms = _steady_medians(measure, notes, machine)
    return base_ms, graph_ms


def _steady_medians(
    measure: Callable[[], list[list[float]]], notes: list[str] | None, machine: Machine
) -> list[float]:
    with quiet(), torch.inference_mode():
        passes = _PASSES if notes is None or len(notes) < _PATIENCE else 1
        found = measure_steadily([measure], lambda times: times, machine=machine, passes=passes)
    if notes is not None and found.note:
        notes.append(found.note)
    return [median(taken) for taken in found.rounds[0]]
