"""The cost of one lookup relative to its network."""

from __future__ import annotations

from collections.abc import Sequence

from gati.caches import LearnedCache, is_reduced
from gati.caches.selectors import BASELINE
from gati.costs.profile import measure_lookup, measure_overlap
from gati.exploration.budget import Clock
from gati.exploration.candidates import Specification
from gati.model.lengths import TracedSequences, at_lengths
from gati.model.segments import TracedModel


def lookup_seconds(traced: TracedModel, specifications: Sequence[Specification], clock: Clock) -> float:
    """Seconds to measure one lookup as `explore` does at its end, for lookups built from a name."""
    trained = [item for item in specifications if item.trial.status == "trained"]
    costly = [item for item in trained if not is_reduced(item.trial.variant)]
    if not costly:
        return 0.0
    item = costly[len(costly) // 2]
    cache = LearnedCache(item.trial.variant, item.hidden_shape, traced.classes, BASELINE).to(traced.device)
    began = clock()
    lookup_costs(traced, item.trial.block, cache)
    return clock() - began


def lookup_costs(
    traced: TracedModel, block: str, cache: LearnedCache, notes: list[str] | None = None
) -> tuple[float, float | None, float | None]:
    """Milliseconds of a lookup inline, of one overlapped, and what that one costs the base model.

    Of sequences of many lengths it is the mean over these; lookups are not overlapped there.
    """
    inline_ms = sum(share * _inline_ms(each, block, cache, notes) for share, each in at_lengths(traced))
    if isinstance(traced, TracedSequences):
        return inline_ms, None, None
    # Each measurement takes the worker's core away from the base model by itself, as serving will: what
    # that costs the base model is part of the penalty.
    overlap = measure_overlap(traced, block, cache, repetitions=10, notes=notes)
    return inline_ms, overlap.lookup_ms, overlap.penalty_ms


def _inline_ms(traced: TracedModel, block: str, cache: LearnedCache, notes: list[str] | None) -> float:
    request = traced.example()
    hidden = traced.hidden_example(block)
    return measure_lookup(cache, hidden, between=lambda: traced.base(request.clone()), notes=notes)
