"""Estimate how far `explore` would get, by timing a few of its training steps and discarding the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from gati.caches import ReducedNetwork, build_predictor, is_reduced, reads_input
from gati.evaluation.diagnosis import ExploreForecast
from gati.exploration import schedule
from gati.exploration.answers import ENGINES
from gati.exploration.augment import Augmentation
from gati.exploration.candidates import Specification
from gati.exploration.lookups import lookup_seconds
from gati.exploration.measure import selector_seconds
from gati.exploration.pace import Pace
from gati.exploration.prepared import MeasuringTimes
from gati.exploration.recipes import EXITS, REDUCED_NETWORK, Recipe, recipe_of_students
from gati.exploration.remembered import bytes_to_plan_with
from gati.exploration.train import Learner, SharedTraining
from gati.model.segments import TracedModel
from gati.model.sequence import Data
from gati.types import OutputsKind

_STEPS, _BATCH, _LEAST_BATCH = 3, 16, 2
_ENOUGH_S = 5.0  # of answers for these steps; a slow network gets smaller batches
_MOST_SELECTING = 2_000  # most inputs used to time selector fitting


@dataclass(frozen=True)
class Rates:
    """Measured speeds of the plain network."""

    answer_s: float  # per input, in a batch, on torch
    engines_ms: Mapping[str, float]  # per single input, by engine, including torch

    @property
    def of_answers(self) -> float:
        """The time of the engine that answers during training, relative to torch."""
        own_ms = self.engines_ms.get("torch")
        known = [self.engines_ms[name] for name in ENGINES if name in self.engines_ms]
        return min(known) / own_ms if own_ms and known else 1.0


@dataclass(frozen=True)
class _Stage:
    """Caches trained together and their seconds per input; None if there are none."""

    count: int
    pace: Pace | None
    recipe: Recipe
    students: bool

    def pass_s(self, inputs: int) -> float | None:
        """Return the seconds of one pass over `inputs`, including computing all answers."""
        return None if self.pace is None else inputs * (self.pace.answer_s + self.pace.learn_s)

    def passes(self, left_s: float, inputs: int, batch: int) -> float | None:
        """Return how many passes `explore` makes in `left_s` seconds."""
        if self.pace is None:
            return None
        a_step = Pace(batch * self.pace.answer_s, batch * self.pace.learn_s)
        found = schedule.affordable(left_s, a_step, inputs, batch, self.recipe, students=self.students)
        return found.steps * batch / inputs

    def usual_s(self, inputs: int, batch: int) -> float:
        """Return the seconds that `explore` trains without a budget."""
        if self.pace is None:
            return 0.0
        epochs = schedule.DEFAULT_STUDENT_EPOCHS if self.students else schedule.DEFAULT_EPOCHS
        least = schedule.LEAST_STUDENT_STEPS if self.students else schedule.LEAST_EXIT_STEPS
        steps = schedule.steps_for_epochs(epochs, inputs, batch, least=least)
        rounds = schedule.rounds_of_steps(steps, inputs, batch, self.recipe)
        fresh = steps if rounds is None else min(steps, rounds * schedule.steps_an_epoch(inputs, batch))
        return batch * (fresh * self.pace.answer_s + steps * self.pace.learn_s)


def forecast_explore(
    module: nn.Module,
    traced: TracedModel,
    specifications: Sequence[Specification],
    training: Data,
    held_out: int,
    kind: OutputsKind,
    rates: Rates,
    base_ms: float,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> ExploreForecast:
    """Estimate what `explore` would train by default on `training` and how far it gets in `budget_s`.

    `held_out` is the number of inputs to measure on; the network takes `base_ms` for one. Raises the same
    errors as training.
    """
    trained = [item for item in specifications if item.trial.status == "trained"]
    first = [item for item in trained if reads_input(item.trial.variant)]
    behind = [item for item in trained if not reads_input(item.trial.variant)]
    reduced = any(is_reduced(item.trial.variant) for item in first)
    recipe = REDUCED_NETWORK if reduced else recipe_of_students(traced.example())
    recipe = recipe.keeping(traced.classes, bytes_to_plan_with(traced.device))
    at_input = _Stage(len(first), _pace(module, traced, first, training, kind, recipe, rates), recipe, True)
    exits = _Stage(len(behind), _pace(module, traced, behind, training, kind, EXITS, rates), EXITS, False)
    lookups = len({(item.trial.variant, item.hidden_shape) for item in trained})
    times = MeasuringTimes(
        held_out * rates.answer_s,
        _selector_seconds(held_out, traced.classes, clock),
        lookup_seconds(traced, specifications, clock),
    )
    measuring_s, certain_s = times.of_all(trained, lookups, base_ms)
    left_s = budget_s - schedule.reserve(measuring_s, budget_s, certain_s)
    input_s, exit_s = schedule.divide_time(left_s, students=len(first), exits=len(behind))
    count, batch = len(training), schedule.batch_size_for(len(training))
    return ExploreForecast(
        at_the_input=tuple(item.trial.variant for item in first),
        exits=tuple((item.trial.block, item.trial.variant) for item in behind),
        measuring_s=measuring_s,
        input_pass_s=at_input.pass_s(count),
        exit_pass_s=exits.pass_s(count),
        budget_s=budget_s,
        input_passes=at_input.passes(input_s, count, batch),
        exit_passes=exits.passes(exit_s, count, batch),
        usual_s=measuring_s + at_input.usual_s(count, batch) + exits.usual_s(count, batch),
    )


def _pace(
    module: nn.Module,
    traced: TracedModel,
    items: Sequence[Specification],
    training: Data,
    kind: OutputsKind,
    recipe: Recipe,
    rates: Rates,
) -> Pace | None:
    """Return the seconds per input to train all `items` together; None if there are none."""
    if not items:
        return None
    fitting = _ENOUGH_S / (_STEPS * max(rates.answer_s, 1e-9))
    batch = int(min(max(fitting, _LEAST_BATCH), _BATCH))
    few = training.subset(np.arange(min(len(training), _STEPS * batch)))
    probe = SharedTraining(
        module,
        few,
        [_learner(module, traced, item, kind) for item in items],
        total_steps=_STEPS,
        batch_size=batch,
        seed=0,
        augmentation=Augmentation(),
        outputs_kind=kind,
        device=traced.device,
        recipe=recipe,
        engine="torch",
        clock=time.perf_counter,
    )
    for _ in probe.run():
        pass  # discard what was learned
    batch = min(batch, len(few))
    return Pace(probe.pace.answer_s / batch * rates.of_answers, probe.pace.learn_s / batch)


def _learner(module: nn.Module, traced: TracedModel, item: Specification, kind: OutputsKind) -> Learner:
    variant = item.trial.variant
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if is_reduced(variant):
            example = torch.cat((traced.example(), traced.example()))
            predictor: nn.Module = ReducedNetwork.of(module, variant, example, kind)
        else:
            predictor = build_predictor(variant, item.hidden_shape, traced.classes)
    return Learner(item.trial.trial_id, item.trial.block, predictor)


def _selector_seconds(held_out: int, classes: int, clock: Callable[[], float]) -> float:
    """Time fitting one trial's selector, on noise: the time does not depend on the values."""
    count = min(held_out, _MOST_SELECTING)
    noise = torch.randn(count, classes, generator=torch.Generator().manual_seed(0))
    split = (np.arange(count) % 2).astype(np.uint8)
    return selector_seconds(noise, split, 0, clock) * held_out / count
