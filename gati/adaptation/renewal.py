"""Renewal of the serving caches: reuse an earlier version, retrain, or keep them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from gati.adaptation.contenders import NewCaches
from gati.adaptation.deployments import Deployed, Deployments
from gati.adaptation.lookups import LookupCosts
from gati.adaptation.retrain import Retrained, check_places, retrain
from gati.adaptation.samples import Sample, Samples, window_of
from gati.adaptation.scene import Signature, nearest_scene, scene_signature
from gati.adaptation.settings import AdaptSettings
from gati.adaptation.tune import TuneRecipe
from gati.adaptation.window import Window, most_inputs, original_sample
from gati.caches import TOKEN_VARIANTS, parse_variant
from gati.caches.tokens import of_any_length
from gati.composition.composition import Composition
from gati.composition.engines import graph_backend, graph_kind
from gati.composition.load import Served
from gati.composition.plans import DEFAULT_CONFIDENCE
from gati.engine.exits import BASE, Prediction
from gati.errors import AdaptError, DataError, GatiError
from gati.model.entry import INPUT_KIND
from gati.model.lengths import TracedSequences
from gati.priority import let_requests_pass
from gati.units import percent
from gati.variants import SCENE
from gati.versions.lineage import SampleWindow

_log = logging.getLogger(__name__)

_LEAST_ADVANTAGE = 0.03  # share of expected latency to save before caches that keep the promise are replaced
_MORE_HITS = 1.2  # hits that an earlier version needs, in multiples of the serving one's
_EARLY = (0.0, 0.08, 0.2)  # how deep in the network new predictors are tried, as a share of its blocks
_LEAST_INPUTS = 200
_TRIED_AT_ONCE = 8  # inputs between which requests pass
_LEAST_FRESH = 40  # samples since the hit rate fell that show whether the library's caches answer more


@dataclass(frozen=True)
class Promise:
    """Agreement of at least `accuracy`, at that `confidence`."""

    accuracy: float
    confidence: float


def promise_of(served: Served, settings: AdaptSettings) -> Promise:
    """The promise of the settings, by default the composition's.

    Raises AdaptError if caches are to be learned for a promise in every class, as audits are too few to prove
    each of them, or on a backend whose calibration inputs are missing.
    """
    chosen = served.composition
    if chosen.per_class and settings.enabled:
        raise AdaptError(
            f"composition '{chosen.name}' promises its agreement in every class, and what is learned from "
            "requests is proven for all classes together; compose without --per-class, or do not adapt"
        )
    if settings.enabled:
        _check_calibration(served)
    return Promise(
        chosen.accuracy_target if settings.accuracy is None else settings.accuracy,
        settings.confidence or chosen.confidence or DEFAULT_CONFIDENCE,
    )


def _check_calibration(served: Served) -> None:
    """Raise AdaptError now if the graphs of new caches could not be made: training would be in vain."""
    backend = served.composition.backend
    kind = graph_kind(backend)
    if kind is None or not kind.calibrated:
        return
    try:
        graph_backend(served.library, backend, calibrate_on=1)
    except DataError as error:
        raise AdaptError(
            f"retraining for {backend} needs the held-out inputs of gati explore, to calibrate new caches: "
            f"{error}; bring them back, or do not adapt"
        ) from error


@dataclass(frozen=True)
class RenewalOutcome:
    """The outcome of a renewal: `deployed` goes on trial, unless the old one is kept."""

    kind: Literal["activated", "reused", "kept"]
    deployed: Deployed
    message: str
    details: dict[str, Any] = field(default_factory=dict)


class Renewal:
    """Looks for better caches among earlier versions, then by retraining. Not thread-safe."""

    def __init__(
        self,
        deployments: Deployments,
        first: Served,
        settings: AdaptSettings,
        promise: Promise,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._deployments = deployments
        self._first = first
        self._settings = settings
        self._promise = promise
        self._clock = clock
        self._costs = LookupCosts(first)
        self._blocks, self._variants = candidate_blocks(first, settings), candidate_variants(first, settings)
        if self._variants != settings.variants:
            _log.warning(
                "new caches are of %s: the network runs sequences at several lengths, and %s reads one only",
                *(", ".join(self._variants), ", ".join(settings.variants)),
            )
        self._original: Window | None = None
        self._original_known = False

    @property
    def least_inputs(self) -> int:
        """The number of samples below which retraining is not worth a trial."""
        return min(_LEAST_INPUTS, self._settings.window_inputs or _LEAST_INPUTS)

    def __call__(
        self,
        current: Deployed,
        samples: Samples,
        reason: str,
        changed_at: int | None = None,
        *,
        unproven: Collection[int] = (),
    ) -> RenewalOutcome | None:
        """Find what to put on trial next; None with too few samples.

        Only samples of requests after `changed_at` are counted and trained on. Versions in `unproven` are
        not brought back. This neither proves nor activates anything: later requests must prove the result.
        """
        recent = samples.recent(self._settings.recent_inputs)
        if (
            reason != "interval"
            and (known := self._known_scene({current.number, *unproven}, current, recent)) is not None
        ):
            return known
        if (again := self._library_again(current, samples, changed_at)) is not None:
            return again
        if not self.enough(samples, changed_at):
            return None
        self._deployments.check_numbers()  # now: training would be in vain
        return self._retrained(current, samples.window(changed_at), recent, reason)

    def figures(self, deployed: Deployed) -> Composition:
        """The composition of a version, with lower bounds on the costs of its lookups."""
        return self._costs.corrected(deployed.served).composition

    def enough(self, samples: Samples, changed_at: int | None) -> bool:
        """Whether there are enough samples to retrain."""
        return (len(samples) if changed_at is None else samples.count(changed_at)) >= self.least_inputs

    def _known_scene(
        self, excluded: Collection[int], current: Deployed, recent: list[Sample]
    ) -> RenewalOutcome | None:
        """An earlier version made for a scene like that of the `recent` samples, if it does well on them."""
        scenes = [each for each in self._deployments.scenes() if each[0] not in excluded]
        if len(recent) < self._settings.recent_inputs or not scenes:
            return None
        window = window_of(recent)
        earlier = self._made_for(scene_signature(window.inputs), scenes)
        if earlier is None:
            return None
        hits, losses = _tried(earlier, window)
        usual = earlier.promised * self._settings.falls_to
        now, _ = _tried(current, window)
        tolerated = (1.0 - self._promise.accuracy) * len(window)
        if losses > tolerated or hits < max(usual * len(window), _MORE_HITS * now):
            return None
        details = {"samples": len(window), "hit_rate": hits / len(window), "losses": losses}
        return RenewalOutcome("reused", earlier, f"version {earlier.number} knows this scene", details)

    def _made_for(self, now: Signature, scenes: list[tuple[int, Signature]]) -> Deployed | None:
        """The version made for the scene most like this one, of those that can serve here."""
        tolerance = self._settings.scene_tolerance
        while (found := nearest_scene([each for _, each in scenes], now, tolerance)) is not None:
            number, _ = scenes.pop(found)
            with suppress(GatiError):  # such as a version for another backend: others may know the scene
                return self._deployments.open(number)
        return None

    def _library_again(
        self, current: Deployed, samples: Samples, changed_at: int | None
    ) -> RenewalOutcome | None:
        """The library's own caches, if they answer more than the serving ones since the hit rate fell."""
        if current.number == 0 or changed_at is None or samples.count(changed_at) < _LEAST_FRESH:
            return None
        window, library = samples.window(changed_at), self._deployments.open(0)
        (hits, losses), (now, _) = _tried(library, window), _tried(current, window)
        tolerated = (1.0 - self._promise.accuracy) * len(window)
        if losses > tolerated or hits <= _MORE_HITS * now:
            return None
        details = {"samples": len(window), "hit_rate": hits / len(window), "losses": losses}
        return RenewalOutcome("reused", library, "the library's own caches answer more", details)

    def _retrained(
        self, current: Deployed, window: Window, recent: list[Sample], reason: str
    ) -> RenewalOutcome:
        chosen = current.served.composition
        network = self._to_train_on(current)
        window = self._in_memory(network, window)
        found = retrain(
            network,
            window,
            library=self._costs.corrected(self._first),
            original=self._mixed_in(),
            new=self._new_caches(),
            accuracy=1.0 - (1.0 - self._promise.accuracy) * (1.0 - self._settings.margin),
            confidence=self._promise.confidence,
            held_share=self._settings.held_share,
            recipe=TuneRecipe(),
            version=f"{self._first.composition.name}-at-{recent[-1].request}",
            seed=self._settings.seed,
            clock=self._clock,
        )
        details = _details(found, len(window))
        if not _worth_it(found, alarmed=reason == "alarm"):
            what = "no caches can be promised" if not found.settings else "retrained caches are not faster"
            return RenewalOutcome("kept", current, f"{what} on {found.after.n} inputs kept back", details)
        oldest, newest = recent[0].time_s, recent[-1].time_s
        deployed = self._deployments.publish(
            found,
            parent=current,
            trained=SampleWindow(len(window), oldest, newest),
            signature=scene_signature(torch.stack([sample.input for sample in recent])),
            reason=reason,
        )
        message = (
            f"hit rate {percent(found.after.hit_rate, 0)} instead of "
            f"{percent(found.before.hit_rate, 0)} expected, "
            f"{len(found.exits)} caches instead of {len(chosen.exits)}"
        )
        return RenewalOutcome("activated", deployed, message, details)

    def _to_train_on(self, current: Deployed) -> Served:
        """The version that serves or, if it has no caches left, the library's own."""
        return self._costs.corrected(current.served if current.served.engine.exits else self._first)

    def _in_memory(self, network: Served, window: Window) -> Window:
        """The newest inputs of a window, as many as can be trained on next to the original data.

        Raises AdaptError if these are too few: a process that takes too much memory is killed without a word.
        """
        traced = network.engine.traced
        exits = (*network.engine.exits, *self._first.engine.exits)
        blocks = {*self._blocks, *(leaving.block for leaving in exits)}
        most, least = most_inputs(traced, blocks, self._originals()), self.least_inputs
        if most is None:
            return window
        if most < least:
            raise AdaptError(
                f"there is memory to train on {max(most, 0)} samples, {least} are needed: stop other "
                "programs, or try caches at later blocks, which pass on less (--blocks)"
            )
        if most < len(window):
            _log.warning("memory is left to retrain on the newest %d of %d samples", most, len(window))
        return window.newest(most)

    def _new_caches(self) -> NewCaches | None:
        if not self._blocks:
            return None
        costs = {variant: self._costs.of_variant(variant, self._blocks[0]) for variant in self._variants}
        return NewCaches(self._blocks, self._variants, lookup_ms=costs)

    def _originals(self) -> Window | None:
        """Original data, kept from one retraining to the next."""
        if not self._original_known and self._settings.original_inputs > 0:
            try:
                self._original = original_sample(
                    self._first, self._settings.original_inputs, seed=self._settings.seed
                )
            except DataError as error:  # the inputs of explore are gone
                _log.warning("retraining uses recent inputs alone, without original data: %s", error)
        self._original_known = True
        return self._original

    def _mixed_in(self) -> Window | None:
        """Original data with its hidden outputs, which are kept as well."""
        if (original := self._originals()) is not None:
            blocks = {leaving.block for leaving in self._first.engine.exits}
            self._original = original.collected(self._first.engine.traced, {*blocks, *self._blocks})
        return self._original


def candidate_blocks(served: Served, settings: AdaptSettings) -> tuple[str, ...]:
    """Where new predictors are tried.

    Raises AdaptError for a block that does not exist or where a variant cannot be, and as
    `candidate_variants`.
    """
    kinds, variants = served.engine.traced.block_kinds, candidate_variants(served, settings)
    if settings.blocks is not None:
        for block in settings.blocks:
            if block not in kinds:
                raise AdaptError(f"no block '{block}' to try new caches at; choose from {', '.join(kinds)}")
        blocks = settings.blocks
    else:
        names = [name for name, kind in kinds.items() if kind != INPUT_KIND]  # most read hidden outputs
        blocks = tuple(dict.fromkeys(names[int(share * len(names))] for share in _EARLY))
    check_places(blocks, variants, served.engine.traced)
    return blocks


def candidate_variants(served: Served, settings: AdaptSettings) -> tuple[str, ...]:
    """The variants of new predictors.

    A network that runs sequences at several lengths has caches that read any length, since retraining and
    proofs run it at the longest one: others would answer otherwise at a shorter one. So the default becomes
    the first of these.

    Raises AdaptError for a variant that reads one length only, VariantError for one that does not exist.
    """
    for variant in settings.variants:
        parse_variant(variant)
    if not isinstance(served.engine.traced, TracedSequences):
        return settings.variants
    if settings.variants == (SCENE,):
        return TOKEN_VARIANTS[:1]
    if fixed := [variant for variant in settings.variants if not of_any_length(variant)]:
        raise AdaptError(
            f"{fixed[0]} reads sequences of one length, but the network runs them at several; try "
            f"{', '.join(TOKEN_VARIANTS)}"
        )
    return settings.variants


def _worth_it(found: Retrained, *, alarmed: bool) -> bool:
    """Whether the new caches are clearly better: every change is a risk.

    Old ones that are in alarm, or broke the promise on the inputs kept back, are always replaced.
    """
    if not found.settings:
        return False
    if found.before.broken or alarmed:
        return True
    return found.after.mean_latency_ms < found.before.mean_latency_ms * (1.0 - _LEAST_ADVANTAGE)


@torch.inference_mode()
def _tried(version: Deployed, window: Window) -> tuple[int, int]:
    """The number of inputs of a window that a version answers early, and how many of these are wrong.

    Uses a copy of its engine: the serving one belongs to another thread, and only that one reserves cores.
    """
    engine = version.served.engine.twin()
    answers: list[Prediction] = []
    for rows in window.inputs.split(_TRIED_AT_ONCE):
        let_requests_pass()
        answers += engine.inline(rows)
    early = [
        answer.class_index == base
        for answer, base in zip(answers, window.base_class.tolist(), strict=True)
        if answer.exit != BASE
    ]
    return len(early), early.count(False)


def _details(found: Retrained, count: int) -> dict[str, Any]:
    return {
        "samples": count,
        "held_back": found.after.n,
        "hit_rate_before": found.before.hit_rate,
        "hit_rate": found.after.hit_rate,
        "agreement": found.after.agreement,
        "settings": len(found.settings),
        "expected_gain": found.composition.expected.gain if found.settings else 1.0,
        "exits": [f"{leaving.block} {leaving.variant}" for leaving in found.exits],
        "seconds": {name: round(value, 3) for name, value in found.seconds.items()},
    }
