"""Retraining the caches that serve on recent inputs.

Most of a window of recent inputs is used for training; on a small held-out part, a ladder of settings is
chosen, from strict to loose. As the parts are interleaved, this proves nothing, but shows what is worth
trying; later requests prove which settings may answer (`gati.guard.ladder`). Each deployed predictor is
fine-tuned on a mix with original data, to avoid forgetting; if the caller names blocks, small new predictors
are trained for the current scene. Old, retrained and new caches then compete for the exits: a cache that
retraining made worse keeps its old weights, and an exit that no longer pays is dropped.

The serving engine is not changed; the caller decides whether to use the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from gati.adaptation.contenders import NewCaches, StepTimes, Work
from gati.adaptation.contest import Contender, Costs, Laid, costs_of, exits_of, lay, replay_deployed
from gati.adaptation.tune import TuneRecipe
from gati.adaptation.window import Window, split_window
from gati.caches import reads_input
from gati.composition.binomial import p_value
from gati.composition.composition import Composition
from gati.composition.load import Served
from gati.composition.plans import DEFAULT_CONFIDENCE
from gati.composition.replay import Replay
from gati.engine.exits import EngineExit
from gati.errors import AdaptError
from gati.model.entry import INPUT, INPUT_KIND
from gati.model.segments import TracedModel
from gati.versions.setting import Setting

_LEAST_PART = 20  # inputs in each part of the window


@dataclass(frozen=True)
class Measurement:
    """A set of exits, measured on the held-out inputs; latencies by the composition's measurements."""

    n: int
    hit_rate: float
    agreement: float
    mean_latency_ms: float
    broken: bool = False  # agreement misses the target, at the required confidence


@dataclass(frozen=True)
class Retrained:
    """The new settings and the serving exits, measured on the same inputs; `seconds` of `clock` by step.

    `aimed` is the setting to deploy if only one can be; `after` is measured with it. `settings` is empty if
    no cache is good enough to answer anything.
    """

    settings: tuple[Setting, ...]  # from strict to loose
    aimed: int
    before: Measurement
    after: Measurement
    seconds: Mapping[str, float]

    @property
    def exits(self) -> tuple[EngineExit, ...]:
        """The exits of the setting aimed at."""
        return self.settings[self.aimed].exits if self.settings else ()

    @property
    def composition(self) -> Composition:
        """The composition of the setting aimed at. Raises AdaptError if there is none."""
        if not self.settings:
            raise AdaptError("retraining found no caches to deploy")
        return self.settings[self.aimed].composition


def retrain(
    served: Served,
    window: Window,
    *,
    library: Served | None = None,
    original: Window | None = None,
    new: NewCaches | None = None,
    accuracy: float | None = None,
    confidence: float | None = None,
    held_share: float = 0.25,
    recipe: TuneRecipe | None = None,
    version: str | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.thread_time,
) -> Retrained:
    """Retrain the deployed caches of `served` on `window`, oldest input first.

    The caches of `library`, the library's own composition, compete as well, unchanged: each retraining starts
    from what serves, and an earlier one may have made that worse. `original` is mixed in with a quarter of
    the training draws. `accuracy` and `confidence` are the composition's unless given. `recipe` bounds the
    training of each deployed cache (of a student ten times as long), `new.recipe` that of each new one, in
    seconds of `clock`. It uses the calling thread's number of torch threads; neither engine nor base model is
    changed.

    **Raises:** `AdaptError` for a window too small to be split, or a block that does not exist.
    """
    chosen, traced = served.composition, served.engine.traced
    parts = split_window(len(window), held_share, window.number)
    if min(map(len, parts)) < _LEAST_PART:
        raise AdaptError(
            f"a window of {len(window)} inputs is too small to retrain on: its parts for training and for "
            f"choosing settings have {', '.join(str(len(part)) for part in parts)}; each needs {_LEAST_PART}"
        )
    wanted = () if new is None else new.blocks
    if unknown := [block for block in wanted if block not in traced.hidden_shapes]:
        raise AdaptError(
            f"no block {unknown[0]!r} to train caches at; choose from {', '.join(traced.blocks)}"
        )
    if new is not None:
        check_places(new.blocks, new.variants, traced)
    times = StepTimes(clock)
    earlier = () if library is None else library.engine.exits
    blocks = {*(leaving.block for leaving in (*served.engine.exits, *earlier)), *wanted}
    with times.of("collect"):
        window = window.collected(traced, blocks)
        original = None if original is None else original.collected(traced, blocks)
    work = Work(served, window, original, parts, times, seed)
    costs = costs_of(served)
    asked = accuracy if accuracy is not None else chosen.accuracy_target
    sure = confidence if confidence is not None else chosen.confidence or DEFAULT_CONFIDENCE
    deployed = {each.block: each for each in work.deployed()}
    contenders = [*deployed.values(), *work.retrained(recipe or TuneRecipe())]
    contenders += [] if library is None else work.of_library(library)
    contenders += [] if new is None else work.new(new)
    with times.of("choose"):
        laid, aimed = lay(contenders, costs, window.base_class, parts.select, accuracy=asked, served=chosen)
        before = replay_deployed(served.engine.exits, deployed, costs, window.base_class, parts.select)
        after = (
            laid[aimed].replay if laid else replay_deployed((), {}, costs, window.base_class, parts.select)
        )
    return Retrained(
        tuple(_setting(each, chosen, costs, asked, sure, version) for each in laid),
        aimed,
        before=_measurement(before, asked, sure),
        after=_measurement(after, asked, sure),
        seconds=times.seconds,
    )


def check_places(blocks: Sequence[str], variants: Sequence[str], traced: TracedModel) -> None:
    """Raise AdaptError unless each of the variants can read what each of the blocks passes on."""
    for block in blocks:
        for variant in variants:
            if reads_input(variant) != (traced.block_kinds[block] == INPUT_KIND):
                raise AdaptError(
                    f"no place for {variant} at block '{block}'; what reads the input belongs at block "
                    f"'{INPUT}', all else elsewhere"
                )


def _engine_exit(each: Contender, threshold: float) -> EngineExit:
    cache = each.cache
    return EngineExit(each.block, cache, threshold, each.placement, cache.variant, cache.memory_bytes)


def _measurement(replayed: Replay, accuracy: float, confidence: float) -> Measurement:
    count = len(replayed.wrong)
    wrong = int(replayed.wrong.sum())
    failed = wrong > 0 and p_value(count - wrong, count, 1.0 - accuracy) <= 1.0 - confidence
    return Measurement(count, replayed.hit_rate, replayed.agreement, replayed.mean_latency_ms, failed)


def _setting(
    laid: Laid, chosen: Composition, costs: Costs, accuracy: float, confidence: float, version: str | None
) -> Setting:
    """A setting as a composition, without a certificate, as it is not proven yet."""
    replayed, exits = laid.replay, exits_of(laid, costs)
    composition = replace(
        chosen,
        name=version or chosen.name,
        solver="retrain",
        gap=None,
        accuracy_target=accuracy,
        confidence=confidence,
        exits=exits,
        expected=replayed.expected(costs.base_ms, exits),
        certificate=None,
        graph_sha256=None,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        note="",
        expected_from="replay",
    )
    return Setting(composition, tuple(_engine_exit(each, threshold) for each, threshold in laid.chosen))
