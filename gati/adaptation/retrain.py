"""Retraining the caches that serve on what came lately.

Stretches of a window of recent inputs are dealt to three parts: to train on, to choose thresholds on, and to
count what comes of it. That shows what is worth trying and proves nothing: the parts lie among each other.
Each deployed predictor goes on learning from the weights it has, mixed with original data so that it forgets
nothing; where the caller names blocks, small new predictors are trained for the scene at hand. Old, retrained
and new caches then compete for the exits, so a cache that retraining made worse keeps its old weights, and an
exit that no longer pays is dropped.

Nothing that serves is touched: the result is for the caller to take or leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from gati.adaptation.contenders import NewCaches, StopWatch, Work
from gati.adaptation.contest import Contender, Costs, Verdict, costs_of, exits_of, hold, replay_deployed
from gati.adaptation.tune import TuneRecipe
from gati.adaptation.window import Window, split_window
from gati.caches import reads_input
from gati.composition.certificate import Certificate, p_value
from gati.composition.composition import Composition, Expected
from gati.composition.load import Served
from gati.composition.replay import Replay
from gati.engine.exits import EngineExit
from gati.errors import AdaptError
from gati.model.entry import INPUT, INPUT_KIND
from gati.model.segments import TracedModel

__all__ = ["Measurement", "NewCaches", "Retrained", "retrain"]

_LEAST_PART = 20  # inputs in each part of the window


@dataclass(frozen=True)
class Measurement:
    """What a set of exits does to the inputs kept back for the certificate; latency as the composition's."""

    n: int
    hit_rate: float
    agreement: float
    mean_latency_ms: float
    certified: bool  # agreement reaches the target at the confidence asked for, on these inputs
    broken: bool = False  # it misses the target, at the same confidence


@dataclass(frozen=True)
class Retrained:
    """New exits beside the old, measured on the same inputs. `seconds` by what they were spent on."""

    exits: tuple[EngineExit, ...]
    before: Measurement
    after: Measurement
    certificate: Certificate
    composition: Composition  # of the new exits, ready to be saved
    seconds: Mapping[str, float]

    @property
    def proven(self) -> bool:
        """Whether there are new exits and they keep the promise."""
        return bool(self.exits) and self.after.certified

    @property
    def better(self) -> bool:
        """Whether the new exits keep the promise, and are faster than the old, or those broke it.

        Old exits need not prove themselves again: a few hundred inputs are too few to certify most of those
        that were certified on thousands, and new ones pass on so few only by hardly hitting.
        """
        faster = self.after.mean_latency_ms < self.before.mean_latency_ms
        return self.proven and (self.before.broken or faster)


def retrain(
    served: Served,
    window: Window,
    *,
    original: Window | None = None,
    new: NewCaches | None = None,
    accuracy: float | None = None,
    confidence: float | None = None,
    held_share: float = 0.5,
    recipe: TuneRecipe | None = None,
    version: str | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Retrained:
    """Retrain the deployed caches of `served` on `window`, oldest input first.

    `original` is mixed in with a quarter of the training draws. `accuracy` and `confidence` are the
    composition's unless given. `recipe` bounds the training of each deployed cache, `new.recipe` that of each
    new one. It computes with as many threads as the calling thread has in torch; neither engine nor base
    model is changed.

    **Raises:** `AdaptError` for a window too small to be split, or a block that does not exist.
    """
    chosen, traced = served.composition, served.engine.traced
    parts = split_window(len(window), held_share, window.number)
    if min(map(len, parts)) < _LEAST_PART:
        raise AdaptError(
            f"a window of {len(window)} inputs is too small to retrain on: its parts to train, choose "
            f"and certify on have {', '.join(str(len(part)) for part in parts)}, each needs {_LEAST_PART}"
        )
    wanted = () if new is None else new.blocks
    if unknown := [block for block in wanted if block not in traced.hidden_shapes]:
        raise AdaptError(f"no block {unknown[0]!r} to train caches at; there are {', '.join(traced.blocks)}")
    if wrong := [] if new is None else _misplaced(new, traced):
        raise AdaptError(f"{wrong[0]}; what reads the input belongs at block '{INPUT}', all else elsewhere")
    watch = StopWatch(clock)
    blocks = {*(leaving.block for leaving in served.engine.exits), *wanted}
    with watch.of("collect"):
        window = window.collected(traced, blocks)
        original = None if original is None else original.collected(traced, blocks)
    work = Work(served, window, original, parts, watch, seed)
    costs = costs_of(served)
    asked = accuracy if accuracy is not None else chosen.accuracy_target
    sure = confidence if confidence is not None else chosen.confidence or 0.95
    deployed = {each.block: each for each in work.deployed()}
    contenders = [*deployed.values(), *work.retrained(recipe or TuneRecipe())]
    contenders += [] if new is None else work.new(new)
    with watch.of("choose"):
        verdict = hold(
            contenders, costs, window.base_class, parts, accuracy=asked, confidence=sure, served=chosen
        )
        before = replay_deployed(served.engine.exits, deployed, costs, window.base_class, parts.certify)
    return Retrained(
        exits=tuple(_engine_exit(each, threshold) for each, threshold in verdict.chosen),
        before=_measurement(before, asked, sure),
        after=_measurement(verdict.replay, asked, sure),
        certificate=verdict.certificate,
        composition=_composition(chosen, verdict, costs, asked, sure, version),
        seconds=watch.seconds,
    )


def _misplaced(new: NewCaches, traced: TracedModel) -> list[str]:
    return [
        f"no place for {variant} at block '{block}'"
        for block in new.blocks
        for variant in new.variants
        if reads_input(variant) != (traced.block_kinds[block] == INPUT_KIND)
    ]


def _engine_exit(each: Contender, threshold: float) -> EngineExit:
    cache = each.cache
    return EngineExit(each.block, cache, threshold, each.placement, cache.variant, cache.memory_bytes)


def _measurement(replayed: Replay, accuracy: float, confidence: float) -> Measurement:
    count = len(replayed.wrong)
    wrong, delta = int(replayed.wrong.sum()), 1.0 - confidence
    passed = p_value(wrong, count, accuracy) <= delta
    failed = wrong > 0 and p_value(count - wrong, count, 1.0 - accuracy) <= delta
    return Measurement(count, replayed.hit_rate, replayed.agreement, replayed.mean_latency_ms, passed, failed)


def _composition(
    chosen: Composition,
    verdict: Verdict,
    costs: Costs,
    accuracy: float,
    confidence: float,
    version: str | None,
) -> Composition:
    replayed = verdict.replay
    exits = exits_of(verdict, costs)
    return replace(
        chosen,
        name=version or chosen.name,
        solver="retrain",
        gap=None,
        accuracy_target=accuracy,
        confidence=confidence,
        exits=exits,
        expected=Expected(
            mean_latency_ms=replayed.mean_latency_ms,
            base_latency_ms=costs.base_ms,
            gain=costs.base_ms / replayed.mean_latency_ms,
            hit_rate=replayed.hit_rate,
            agreement=replayed.agreement,
            memory_bytes=sum(leaving.memory_bytes for leaving in exits),
        ),
        certificate=None,  # the certify rows lie among those it was trained on
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        note="" if exits else f"no caches: {verdict.certificate.sentence()}",
        expected_from="replay",
    )
