"""Costs of network and lookups on a backend that runs segments, at batch size 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from gati.costs.graph import GraphCosts, anchors, of_many, profile_between
from gati.costs.lengths import of_base
from gati.costs.profile import measure_in_turns, measure_profile
from gati.engine.backends import segment_backend
from gati.model.alike import work_of
from gati.model.segments import TracedModel
from gati.types import Profile


def measure_segments(
    traced: TracedModel,
    known: Profile,
    backend: str,
    caches: Mapping[str, tuple[str, nn.Module]],
    progress: Callable[[int, int], None] | None = None,
) -> GraphCosts:
    """Time the base model, the network up to a few blocks, and lookups; arguments as for `measure_graph`.

    `progress` counts lookups. The exit decision is a comparison in Python, so `if_ms` is 0.
    """
    at = anchors(known)
    names = [known.blocks[index].name for index in at]
    found = measure_profile(traced, names, backend=backend)
    every = [block.name for block in known.blocks]
    profile = profile_between(
        known,
        backend,
        at,
        [block.reach_ms for block in found.blocks],
        found.base_ms,
        found.device,
        work_of(traced, every)[:-1],
    )
    notes = [found.disturbance] if found.disturbance else []
    request = traced.example()
    base = segment_backend(backend).path(traced, names[:1]).base
    lookup_ms: dict[str, float] = {}
    for done, (key, (block, cache)) in enumerate(caches.items(), start=1):
        hidden = traced.hidden_example(block)
        turns = measure_in_turns(
            cache.to(traced.device), hidden, lambda: base(request.clone()), backend=backend, notes=notes
        )
        lookup_ms[key] = of_base(found.base_ms, [(1.0, turns)])
        if progress is not None:
            progress(done, len(caches))
    profile = replace(profile, disturbance=of_many(notes, 1 + len(caches)))
    return GraphCosts(profile, 0.0, lookup_ms)
