"""Compare the exact formulation with the published ones, at equal agreement on unseen images.

    python -m benchmarks.compositions runs/benchmark/resnet56 --unseen runs/benchmark/unseen.npz

Three tables: gain and agreement of each accuracy target (wall clock); gain of the published formulations at
the same measured agreement, with all caches and with published variants only; and exact against published at
equal agreement, on the inputs used for the choice.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import gati
from benchmarks.fresh import FreshOutcomes
from gati.caches import PUBLISHED_VARIANTS
from gati.composition.candidates import reach_by_block
from gati.composition.compose import compose_library
from gati.composition.composition import Composition
from gati.composition.costs import on_backend
from gati.composition.outcomes import SplitOutcomes
from gati.composition.plans import SLOWDOWN, Settings
from gati.composition.problem import Candidate, Problem
from gati.composition.replay import Replay
from gati.exploration.library import Library

TARGETS = (0.97, 0.985, 0.99, 0.995)
ASKED = (0.93, 0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975, 0.999)
FORMS = ("relaxed", "full")


def main() -> int:
    """Compose, replay and evaluate; print one JSON document to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--unseen", type=Path, required=True)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--slowdown", type=float, default=SLOWDOWN)
    parser.add_argument("--limit", type=int, help="time only this many inputs")
    parser.add_argument("--no-clock", action="store_true", help="replay only, measure nothing")
    arguments = parser.parse_args()
    library = on_backend(Library.open(arguments.library), arguments.backend)
    unseen = FreshOutcomes(library, arguments.unseen)
    published = {form: curve(library, form, unseen) for form in FORMS}
    theirs = of_published_variants(library)
    published |= {f"{form}_on_published_caches": curve(theirs, form, unseen) for form in FORMS}
    rows = []
    for target in TARGETS:
        row = target_row(library, target, unseen, published, arguments.backend, arguments.slowdown)
        if not arguments.no_clock and row["exits"]:
            row["clock"] = clock(library, arguments.unseen, target, arguments.limit)
        print(json.dumps(row), file=sys.stderr)
        rows.append(row)
    document = {
        "model": library.manifest.model_source,
        "n": len(unseen),
        "oracle_gain": round(oracle_gain(library, unseen), 2),
        "targets": rows,
        "published": published,
        "exact_against_published_on_select": [
            against(library, form, asked) for form in FORMS for asked in ASKED
        ],
    }
    print(json.dumps(document, indent=1))
    return 0


def target_row(
    library: Library,
    target: float,
    unseen: SplitOutcomes,
    published: dict[str, list[dict[str, float]]],
    backend: str,
    slowdown: float,
) -> dict[str, Any]:
    """Return the results of one certified target on unseen inputs, with the published formulations' gains."""
    began_s = time.monotonic()
    composition = gati.compose(
        library.directory,
        accuracy=target,
        placement="inline",
        backend=backend,
        slowdown=slowdown,
        name=f"target-{target:g}",
    )
    compose_s = time.monotonic() - began_s
    outcome = replayed(library, composition, unseen)
    gain = library.manifest.profile.base_ms / outcome.mean_latency_ms
    certificate = composition.certificate
    counted = (None, None) if certificate is None else (certificate.losses, certificate.inputs)
    row: dict[str, Any] = {
        "accuracy_target": target,
        "agreement": round(outcome.agreement, 4),
        "standard_error": round(float((target * (1 - target) / len(unseen)) ** 0.5), 4),
        "gain": round(gain, 3),
        "exits": len(composition.exits),
        "certified_losses": f"{counted[0]} of {counted[1]}",
        "gap": composition.gap,
        "compose_s": round(compose_s, 1),
    }
    for form, points in published.items():
        at_equal = at_agreement(points, outcome.agreement)
        row[f"{form}_gain_at_equal_agreement"] = None if at_equal is None else round(at_equal, 3)
    return row


def clock(library: Library, unseen: Path, target: float, limit: int | None) -> dict[str, float]:
    """Measure the same by wall clock."""
    measured = gati.evaluate(library.directory, str(unseen), composition=f"target-{target:g}", limit=limit)
    eager = measured.eager_latency_ms
    return {
        "gain": round(measured.gain, 3),
        "tail_ratio": round(measured.tail_ratio, 3),
        "agreement": round(measured.agreement, 4),
        "hit_rate": round(measured.hit_rate, 4),
        "accuracy": measured.accuracy or 0.0,
        "base_latency_ms": round(measured.base_latency_ms.mean, 3),
        "latency_ms": round(measured.latency_ms.mean, 3),
        "eager_gain": 0.0 if eager is None else round(eager.mean / measured.latency_ms.mean, 3),
        "memory_bytes": measured.memory_bytes,
    }


def of_published_variants(library: Library) -> Library:
    """Return the library with published variants only; exit if one of them is missing."""
    tried = {trial.variant for trial in library.trials}
    if missing := [variant for variant in PUBLISHED_VARIANTS if variant not in tried]:
        raise SystemExit(
            f"error: {library.directory} was explored without {', '.join(missing)}, needed for the "
            "comparison: gati explore ... --variants default,published"
        )
    theirs = copy(library)
    theirs.__dict__["trials"] = tuple(
        trial for trial in library.trials if trial.variant in PUBLISHED_VARIANTS
    )
    return theirs


def curve(library: Library, form: str, unseen: SplitOutcomes) -> list[dict[str, float]]:
    """Return target, agreement and gain on unseen inputs of a published formulation, by rising accuracy."""
    points = []
    for asked in ASKED:
        settings = Settings(accuracy=asked, confidence=None, objective=form, placement="inline")  # type: ignore[arg-type]
        outcome = replayed(library, compose_library(library, settings), unseen)
        gain = library.manifest.profile.base_ms / outcome.mean_latency_ms
        points.append({"asked": asked, "agreement": outcome.agreement, "gain": gain})
    return points


def at_agreement(points: list[dict[str, float]], agreement: float) -> float | None:
    """Interpolate the largest gain of a formulation at an agreement; None above the highest it reaches."""
    reached = [(point["agreement"], point["gain"]) for point in points] + [(1.0, 1.0)]
    best = None
    for low in reached:
        for high in reached:
            if low[0] <= agreement <= high[0]:
                share = 0.0 if high[0] == low[0] else (agreement - low[0]) / (high[0] - low[0])
                # mixing both settings at random gives the weighted mean of their latencies
                gain = 1.0 / ((1.0 - share) / low[1] + share / high[1])
                best = gain if best is None else max(best, gain)
    return best


def against(library: Library, form: str, asked: float) -> dict[str, Any]:
    """Compare expected latencies of both formulations at the agreement that the published one reaches."""
    settings = Settings(accuracy=asked, confidence=None, objective=form, placement="inline")  # type: ignore[arg-type]
    theirs = compose_library(library, settings).expected
    if theirs.agreement >= 1.0:
        return {"form": form, "asked": asked, "agreement": theirs.agreement, "published_over_exact": None}
    same = replace(settings, objective="exact", accuracy=theirs.agreement - 1e-9)
    ours = compose_library(library, same).expected
    return {
        "form": form,
        "asked": asked,
        "agreement": round(theirs.agreement, 4),
        "published_ms": round(theirs.mean_latency_ms, 4),
        "exact_ms": round(ours.mean_latency_ms, 4),
        "published_over_exact": round(theirs.mean_latency_ms / ours.mean_latency_ms, 3),
    }


def oracle_gain(library: Library, unseen: SplitOutcomes) -> float:
    """Return the gain if each input exits at its earliest correct lookup, and other lookups are free."""
    base_ms = library.manifest.profile.base_ms
    reach_ms = reach_by_block(library.manifest.blocks)
    best_ms = np.full(len(unseen), base_ms)
    for trial in library.trials:
        if trial.status == "trained" and trial.lookup_ms is not None:
            right = unseen.trial(trial.trial_id).predicted == unseen.base_class
            exit_ms = reach_ms[trial.block_index] + trial.lookup_ms
            best_ms[right] = np.minimum(best_ms[right], exit_ms)
    return base_ms / float(best_ms.mean())


def replayed(library: Library, composition: Composition, outcomes: SplitOutcomes) -> Replay:
    """Replay the inputs through a composition, at the costs it was composed for."""
    candidates = tuple(
        Candidate(
            trial_id=one.trial_id,
            block_index=one.block_index,
            variant=one.variant,
            threshold=one.threshold,
            hit_rate=one.expected_hit_rate,
            accuracy=one.expected_agreement,
            lookup_ms=one.lookup_ms,
            penalty_ms=one.lookup_ms,  # inline
            memory_bytes=one.memory_bytes,
        )
        for one in composition.exits
    )
    problem = Problem(
        reach_ms=reach_by_block(library.manifest.blocks),
        base_ms=library.manifest.profile.base_ms,
        candidates=candidates,
        accuracy=composition.accuracy_target,
    )
    return outcomes.replay(problem, candidates)


if __name__ == "__main__":
    sys.exit(main())
