"""What network and lookups cost inside one compiled graph, at batch size 1, on the machine that will serve.

The network is made into a graph that may leave after a few blocks along the way. The same graph, with
thresholds that nothing or everything reaches, tells how long it takes to get to each, and what an `If` costs
that leaves nowhere. All are measured in turns, so that a slow moment hits all alike; medians are kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from gati.model.segments import TracedModel
from gati.runtime.backends import Graph, GraphBackend, OutputsKind
from gati.runtime.exits import EngineExit
from gati.runtime.profile import quiet
from gati.types import BlockProfile, Profile

__all__ = ["GraphCosts", "measure_graph", "measure_graph_lookup"]

_ANCHORS = 6  # blocks measured; those between lie where the library's own profile puts them
_ROUNDS, _WARM_UP_ROUNDS = 80, 10
_NEVER = 1e30


@dataclass(frozen=True)
class GraphCosts:
    """`if_ms` is what a decision adds to a request that goes on; `call_ms` what a call without work takes."""

    profile: Profile
    if_ms: float
    call_ms: float


class _Glance(nn.Module):
    """A lookup without work: a few values of the hidden output."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        values = hidden.flatten(1)
        repeated = values[:, :1].repeat(1, self.classes)
        return repeated, values[:, 0] * 1.0


class _Alone(nn.Module):
    """A cache as a network of its own, of which nothing can be left out."""

    def __init__(self, cache: nn.Module) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, hidden: Tensor) -> Tensor:
        probabilities, score = self.cache(hidden)
        return torch.as_tensor(probabilities + score.unsqueeze(1))


def measure_graph(
    traced: TracedModel, known: Profile, backend: GraphBackend, outputs_kind: OutputsKind
) -> GraphCosts:
    """Time the base model and how long it takes to get to each block, for one request on `backend`.

    `known` is a profile of the same network elsewhere, for the proportions between measured blocks.
    """
    names = [block.name for block in known.blocks]
    at = sorted({round(position) for position in np.linspace(0, len(names) - 1, _ANCHORS + 1)[:-1]})
    exits = [EngineExit(names[index], _Glance(traced.classes).eval(), _NEVER) for index in at]
    graphs = [backend.early_exit(traced, (), outputs_kind)]
    graphs += backend.early_exits(traced, [exits, *_each_open(exits)], outputs_kind)
    base_ms, through_ms, *there_ms = _medians(graphs, [traced.example()] * len(graphs))
    if_ms = max(0.0, (through_ms - base_ms) / len(exits))
    call_ms = measure_graph_lookup(_Glance(traced.classes).eval(), torch.zeros(1, 4, 4), backend)
    reach = [max(0.0, value - (passed + 1) * if_ms) for passed, value in enumerate(there_ms)]
    reach = np.minimum(np.maximum.accumulate(reach), base_ms).tolist()
    elsewhere = [0.0, *(known.blocks[index].reach_ms for index in at), known.base_ms]
    here = [0.0, *reach, base_ms]
    reach_ms = np.interp([block.reach_ms for block in known.blocks], elsewhere, here)
    own_ms = np.diff(reach_ms, prepend=0.0)
    blocks = tuple(
        BlockProfile(block.index, block.name, block.kind, block.output_shape, float(own), float(reached))
        for block, own, reached in zip(known.blocks, own_ms, reach_ms, strict=True)
    )
    profile = Profile(backend.name, "cpu", torch.get_num_threads(), base_ms, blocks)
    return GraphCosts(profile, if_ms, call_ms)


def measure_graph_lookup(
    cache: nn.Module,
    hidden: Tensor,
    backend: GraphBackend,
    before: Graph | None = None,
    request: Tensor | None = None,
) -> float:
    """Median milliseconds of a lookup as a graph of its own, the call included.

    `before`, run on `request` ahead of each repetition, leaves the processor's caches as in use.
    """
    graph = backend.alone(_Alone(cache).eval(), hidden)
    if before is None or request is None:
        return _medians([graph], [hidden])[0]
    return _medians([graph, before], [hidden, request])[0]


def _each_open(exits: Sequence[EngineExit]) -> list[list[EngineExit]]:
    """For each exit, all of them with that one taking everything."""
    return [
        [replace(leaving, threshold=-_NEVER if leaving is taken else _NEVER) for leaving in exits]
        for taken in exits
    ]


def _medians(graphs: Sequence[Graph], requests: Sequence[Tensor]) -> list[float]:
    times: list[list[float]] = [[] for _ in graphs]
    with quiet(), torch.inference_mode():
        for number in range(_ROUNDS + _WARM_UP_ROUNDS):
            for graph, request, taken in zip(graphs, requests, times, strict=True):
                start = time.perf_counter_ns()
                graph.answer(request)
                if number >= _WARM_UP_ROUNDS:
                    taken.append((time.perf_counter_ns() - start) / 1e6)
    return [median(taken) for taken in times]
