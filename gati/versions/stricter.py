"""Stricter settings of a composition, which its certificate covers.

Raising the threshold of the last exit lets fewer inputs leave there; the others run to the end, where they
get the base model's answer. Nothing else changes, so only fewer answers are wrong, and agreement is at least
as high. Once the last exit is left out, the exit before it is the last. All of these settings are nested, and
the certificate of the loosest holds for each.

Raising all thresholds at once would not do: an input that an early exit no longer answers may be answered
wrongly by a later one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from gati.composition.composition import Composition
from gati.composition.load import Served
from gati.composition.outcomes import SplitOutcomes
from gati.composition.replay import ReplayExit, exit_costs, replay
from gati.errors import LibraryError
from gati.exploration.library import SELECT
from gati.versions.setting import Setting

# Hits of the last exit that stricter settings keep, before it is left out. What a guard has found is stored
# by the number of settings (`gati.guard.standing`): other shares need another number of them.
SHARES = (0.85, 0.6, 0.3)


def stricter_settings(served: Served) -> tuple[Setting, ...]:
    """The settings of a composition from strict to loose; the last one is the composition itself.

    Empty without caches, or if the library no longer has the held-out outcomes, from which thresholds and
    expected figures are taken.
    """
    chosen, exits = served.composition, served.engine.exits
    if not chosen.exits or not served.library.has_outcomes:
        return ()
    try:
        select = SplitOutcomes(served.library, SELECT)
        outcomes = [select.trial(leaving.trial_id) for leaving in chosen.exits]
    except LibraryError:
        return ()
    lookups = [
        ReplayExit(each.score, each.predicted, leaving.threshold, cost)
        for each, leaving, cost in zip(outcomes, chosen.exits, exit_costs(chosen.exits), strict=True)
    ]
    found = [Setting(chosen, tuple(exits))]
    for left in _stricter(lookups, select):
        leaving = zip(exits, left, strict=False)
        composition = _composition(chosen, left, select)
        found.append(
            Setting(composition, tuple(replace(one, threshold=each.threshold) for one, each in leaving))
        )
    return tuple(reversed(found)) if len(found) > 1 else ()


def _stricter(lookups: Sequence[ReplayExit], select: SplitOutcomes) -> Iterator[list[ReplayExit]]:
    """The exits of ever stricter settings, by replayed hits; at least one exit is left."""
    left = list(lookups)
    while left:
        *earlier, last = left
        here = replay(left, select.base_class, base_ms=0.0).left_at == len(earlier)
        reached = np.sort(last.score[here])
        for share in SHARES:
            threshold = float(reached[int((1.0 - share) * len(reached))]) if len(reached) else np.inf
            if last.threshold < threshold < np.inf:
                last = replace(last, threshold=threshold)
                yield [*earlier, last]
        left = earlier
        if left:
            yield left


def _composition(chosen: Composition, left: Sequence[ReplayExit], select: SplitOutcomes) -> Composition:
    """The composition with its first exits, at these thresholds."""
    count, base_ms = len(select), chosen.expected.base_latency_ms
    replayed = replay(left, select.base_class, base_ms)
    exits = tuple(
        replace(
            described,
            threshold=each.threshold,
            expected_hit_rate=hits / count,
            expected_agreement=agreeing / hits if hits else 1.0,
        )
        for described, each, hits, agreeing in zip(
            chosen.exits, left, replayed.hits, replayed.agreeing, strict=False
        )
    )
    return replace(
        chosen,
        exits=exits,
        gap=None,
        headroom=None,
        graph_sha256=None,  # its exits are others
        note=f"stricter than composition '{chosen.name}', whose certificate covers it",
        expected=replayed.expected(base_ms, exits),
        expected_from="replay",
    )
