"""The caches that compete for the exits after a retraining: built, trained and scored on the window."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gati.adaptation.contest import Contender
from gati.adaptation.tune import Lesson, TuneRecipe, train_new, tuned
from gati.adaptation.window import Parts, Window
from gati.caches import LearnedCache, is_companion, reads_input
from gati.composition.load import Served
from gati.composition.replay import exit_costs
from gati.costs.profile import measure_lookup
from gati.errors import AdaptError
from gati.exploration.candidates import trial_name
from gati.exploration.library import SELECT
from gati.exploration.measure import measure_cache
from gati.priority import let_requests_pass
from gati.types import TrialId
from gati.variants import SCENE

_NEW_CACHES = TuneRecipe(epochs=20.0, limit_s=0.3, learning_rate=3e-3)
_PART = 16  # inputs between which requests pass: a companion takes as long as a network for them
_STUDENT_TIME = 10.0  # times that of other caches, as a step takes so many times longer
_ORIGINAL_SHARE = 0.25  # share of original data in the training draws


@dataclass(frozen=True)
class NewCaches:
    """Predictors to train from scratch for the scene: each of `variants` at each of `blocks`."""

    blocks: tuple[str, ...]
    variants: tuple[str, ...] = (SCENE,)
    recipe: TuneRecipe = _NEW_CACHES
    lookup_ms: Mapping[str, float] = field(default_factory=dict)  # by variant, if known


class StepTimes:
    """Adds up `seconds` by step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Add the time spent in this context to step `what`."""
        began = self.clock()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + self.clock() - began


@dataclass(frozen=True)
class Work:
    """One retraining: builds contenders, each trained on the fit part and scored on the held-out part."""

    served: Served
    window: Window
    original: Window | None
    parts: Parts
    times: StepTimes
    seed: int

    def deployed(self) -> list[Contender]:
        """The serving caches, unchanged."""
        return self._as_they_are(self.served)

    def of_library(self, library: Served) -> list[Contender]:
        """The caches of the library's composition that do not serve any more, unchanged."""
        return self._as_they_are(library, left_out=self._serving)

    @property
    def _serving(self) -> set[TrialId]:
        """The names of the serving caches."""
        return {described.trial_id for described in self.served.composition.exits}

    def _as_they_are(self, served: Served, left_out: Collection[TrialId] = ()) -> list[Contender]:
        found = []
        chosen = served.composition.exits
        for leaving, described, cost in zip(served.engine.exits, chosen, exit_costs(chosen), strict=True):
            if described.trial_id in left_out:
                continue
            cache = leaving.cache
            if not isinstance(cache, LearnedCache):
                raise AdaptError(
                    f"the cache at block '{leaving.block}' is not a learned cache; it cannot be retrained"
                )
            cache = copy.deepcopy(cache).cpu()  # the serving cache stays on its device
            with self.times.of("measure"):
                answers = self._spread(
                    *_answers_of(cache, self.window.hidden[leaving.block][self.parts.select])
                )
            found.append(
                Contender(
                    described.trial_id,
                    leaving.block,
                    cache,
                    leaving.placement,
                    cost.lookup_ms,
                    cost.penalty_ms,
                    *answers,
                )
            )
        return found

    def retrained(self, recipe: TuneRecipe) -> list[Contender]:
        """The serving caches after further training; students have `_STUDENT_TIME` times the limit."""
        found, costs = [], exit_costs(self.served.composition.exits)
        for leaving, cost in zip(self.served.engine.exits, costs, strict=True):
            if not isinstance(leaving.cache, LearnedCache) or is_companion(leaving.cache.variant):
                continue  # a companion is a network of its own, and stays as it is
            lesson = self._lesson(leaving.block)
            name = self._new_name(leaving.block, leaving.cache.variant, "retrained")
            longer = _STUDENT_TIME if reads_input(leaving.cache.variant) else 1.0
            own = replace(recipe, limit_s=longer * recipe.limit_s)
            with self.times.of(f"train {name}"):
                predictor = tuned(
                    leaving.cache.predictor, lesson, own, seed=self.seed, clock=self.times.clock
                )
            each = self._measured(name, leaving.block, leaving.cache.variant, predictor)
            found.append(
                replace(
                    each,
                    placement=leaving.placement,
                    lookup_ms=cost.lookup_ms,
                    penalty_ms=cost.penalty_ms,
                )
            )
        return found

    def new(self, new: NewCaches) -> list[Contender]:
        """Caches trained from scratch."""
        found = []
        shapes = self.served.engine.traced.hidden_shapes
        for block in new.blocks:
            lesson = self._lesson(block)
            for variant in new.variants:
                name = self._new_name(block, variant, "new")
                with self.times.of(f"train {name}"):
                    predictor = train_new(
                        variant, shapes[block], lesson, new.recipe, seed=self.seed, clock=self.times.clock
                    )
                each = self._measured(name, block, variant, predictor)
                lookup_ms = new.lookup_ms.get(variant)
                if lookup_ms is None:
                    with self.times.of("measure"):
                        lookup_ms = _lookup_ms_of(self.served, variant, block, each.cache)
                found.append(replace(each, lookup_ms=lookup_ms, penalty_ms=lookup_ms))
        return found

    def _new_name(self, block: str, variant: str, what: str) -> TrialId:
        """A name that no serving cache has: both may be in one version, whose files go by these names."""
        name = f"{trial_name(block, variant)}--{what}"
        names = (name if number == 1 else f"{name}-{number}" for number in count(1))
        return next(TrialId(each) for each in names if each not in self._serving)

    def _spread(
        self, score: NDArray[np.float32], predicted: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scatter values of the held-out rows to their positions in the window."""
        scores = np.full(len(self.window), np.nan, dtype=np.float32)
        classes = np.full(len(self.window), -1, dtype=np.int64)
        scores[self.parts.select], classes[self.parts.select] = score, predicted
        return scores, classes

    def _lesson(self, block: str) -> Lesson:
        classes, fit = self.served.engine.traced.classes, torch.from_numpy(self.parts.fit)
        window = self.window
        weights = torch.ones(len(window)) if window.weights is None else torch.from_numpy(window.weights)
        recent = weights[fit].double()
        lesson = Lesson(window.hidden[block][fit], window.teacher(classes)[fit], recent)
        if self.original is None:
            return lesson
        originals = len(self.original)
        mixed = recent.sum() * _ORIGINAL_SHARE / (1.0 - _ORIGINAL_SHARE) / originals
        return Lesson(
            torch.cat((lesson.hidden, self.original.hidden[block])),
            torch.cat((lesson.teacher, self.original.teacher(classes))),
            torch.cat((recent, mixed.repeat(originals))),
            len(fit),
        )

    def _measured(self, name: TrialId, block: str, variant: str, predictor: nn.Module) -> Contender:
        """A contender with that predictor and the selector that does best on the select rows; it costs 0."""
        held = self.parts.select
        split = np.full(len(held), SELECT, dtype=np.uint8)
        with self.times.of("measure"):
            measured = measure_cache(
                name,
                (variant, self.served.engine.traced.hidden_shapes[block], predictor),
                _probabilities(predictor, self.window.hidden[block][held]),
                self.window.base_class[held],
                split,
                self.seed,
            )
        outcomes = measured.outcomes
        answers = self._spread(outcomes.score, outcomes.predicted)
        return Contender(name, block, measured.cache, "inline", 0.0, 0.0, *answers)


@torch.no_grad()
def _probabilities(predictor: nn.Module, hidden: Tensor) -> Tensor:
    return torch.cat([predictor(rows).softmax(1) for rows in _parts(hidden)])


def _parts(hidden: Tensor) -> Iterator[Tensor]:
    for rows in hidden.split(_PART):
        let_requests_pass()
        yield rows


def _lookup_ms_of(served: Served, variant: str, block: str, cache: LearnedCache) -> float:
    """Latency measured for that variant on hidden outputs of that shape, or measured now on torch."""
    shapes = served.engine.traced.hidden_shapes
    for leaving in served.composition.exits:
        if leaving.variant == variant and shapes.get(leaving.block) == shapes[block]:
            return leaving.lookup_ms
    return measure_lookup(cache, served.engine.traced.hidden_example(block))


@torch.no_grad()
def _answers_of(cache: LearnedCache, hidden: torch.Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Scores and classes [n] of a cache on hidden outputs [n, ...]."""
    found = [cache(rows) for rows in _parts(hidden)]
    score = torch.cat([score for _, score in found]).float().numpy()
    return score, torch.cat([likely.argmax(1) for likely, _ in found]).numpy()
