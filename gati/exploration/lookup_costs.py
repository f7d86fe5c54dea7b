"""The cost of one lookup relative to its network."""

from __future__ import annotations

from collections.abc import Sequence

from gati.caches import LearnedCache, is_reduced
from gati.caches.selectors import BASELINE
from gati.costs.lengths import lookup_at_lengths
from gati.costs.overlap import measure_overlap
from gati.exploration.budget import Clock
from gati.exploration.candidates import Specification
from gati.model.lengths import TracedSequences
from gati.model.segments import TracedModel


def lookup_seconds(traced: TracedModel, specifications: Sequence[Specification], clock: Clock) -> float:
    """Seconds that `explore` needs at its end to measure one lookup, measured on a typical one."""
    trained = [item for item in specifications if item.trial.status == "trained"]
    costly = [item for item in trained if not is_reduced(item.trial.variant)]
    if not costly:
        return 0.0
    item = costly[len(costly) // 2]
    cache = LearnedCache(item.trial.variant, item.hidden_shape, traced.classes, BASELINE).to(traced.device)
    began = clock()
    lookup_costs(traced, item.trial.block, cache, base_ms=1.0)
    return clock() - began


def lookup_costs(
    traced: TracedModel,
    block: str,
    cache: LearnedCache,
    base_ms: float,
    notes: list[str] | None = None,
    cores: int | None = 1,
) -> tuple[float, float | None, float | None]:
    """Milliseconds of an inline lookup, of an overlapped one, and the delay that this causes the base model.

    `base_ms` is the base model's time. Overlapped lookups have so many `cores`; None: they are not measured.
    For sequences of varying length, the first is the mean over the lengths; lookups are never overlapped.
    """
    inline_ms = lookup_at_lengths(traced, cache, lambda each: each.hidden_example(block), base_ms, notes)
    if cores is None or isinstance(traced, TracedSequences):
        return inline_ms, None, None
    # As in serving, the lookup's worker takes cores from the base model; the penalty includes that.
    overlap = measure_overlap(traced, block, cache, repetitions=10, cores=cores, notes=notes)
    return inline_ms, overlap.lookup_ms, overlap.penalty_ms
