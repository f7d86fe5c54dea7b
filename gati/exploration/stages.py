"""Training in stages, each resumable: caches at the input, then exits for the inputs they leave over."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gati.caches import (
    ReducedNetwork,
    build_predictor,
    fold_normalisation,
    is_reduced,
    load_cache,
    reads_input,
    save_cache,
)
from gati.errors import ModelError
from gati.exploration.augment import Augmentation
from gati.exploration.budget import Budget
from gati.exploration.candidates import Specification
from gati.exploration.library import SELECT, Library, TrialOutcomes
from gati.exploration.measure import Measured, accuracy_curve, held_out_probabilities, measure_cache
from gati.exploration.pace import affordable_steps
from gati.exploration.prepare import Prepared
from gati.exploration.progress import Progress
from gati.exploration.recipes import EXITS, REDUCED_NETWORK, Emphasis, Recipe, recipe_of_students
from gati.exploration.schedule import (
    DEFAULT_EPOCHS,
    DEFAULT_STUDENT_EPOCHS,
    LEAST_EXIT_STEPS,
    LEAST_STUDENT_STEPS,
    STUDENT_EPOCHS,
    batch_size_for,
    divide_time,
    most_steps,
    reserve,
    steps_an_epoch,
    steps_for_epochs,
)
from gati.exploration.state import FinishedTrial, RunState, StagePlan
from gati.exploration.train import LATENESS, Learner, SharedTraining
from gati.files import atomic_write
from gati.model.data import Data
from gati.model.entry import INPUT_KIND
from gati.types import Trial, TrialId

__all__ = ["TrainingStages", "worth"]

_SAVE_EVERY_S = 60.0
_GROUP_PARAMETERS = 60_000_000  # weights, gradients and two moments of these take 1 GB
_GROUP_TRIALS = 80
_SCARCE = 10_000  # so few training inputs: students match hidden outputs, too
_SURE_AT = 0.99  # agreement of the earlier answers that exits need not know
_REDUCED, _STUDENTS, _EXITS = "network at fewer pixels", "students", "exits"
_PROBE_STEPS = 8
_STEADY = "torch"  # the engine that is always there
_AGAIN = 0.5  # share of the learning rate at which trained weights go on


class _Lesson(NamedTuple):
    """What a stage trains with."""

    name: str
    recipe: Recipe
    augmentation: Augmentation
    emphasis: Emphasis | None = None
    feature_block: str | None = None


class TrainingStages:
    """Trains and measures; every finished trial is on disk before the next group starts.

    `weights` of a trial are what an earlier exploration ended with; others start anew. `before` are
    the trials to beat: a cache that is no better than the one of that trial is not kept.
    """

    def __init__(
        self,
        prepared: Prepared,
        library: Library,
        state: RunState,
        budget: Budget,
        *,
        epochs: float | None,
        seed: int,
        progress: Progress,
        before: Mapping[TrialId, Trial] | None = None,
    ) -> None:
        self.prepared, self.library, self.state, self.budget = prepared, library, state, budget
        self.epochs, self.seed, self.progress = epochs, seed, progress
        self.before = dict(before or {})
        self.batch_size = batch_size_for(len(prepared.inputs.train))
        trained = [item for item in prepared.specifications if item.trial.status == "trained"]
        self.first = [item for item in trained if reads_input(item.trial.variant)]  # run first
        self.exits = [item for item in trained if not reads_input(item.trial.variant)]

    def run(self) -> None:
        """Train what is not trained yet."""
        bold = self.prepared.bold_augmentation
        self._train_first(_Lesson(_REDUCED, REDUCED_NETWORK, bold))
        scarce = len(self.prepared.inputs.train) < _SCARCE
        last = self.prepared.profile.blocks[-1]
        feature_block = last.name if scarce and last.kind != INPUT_KIND else None
        recipe = recipe_of_students(self.prepared.traced.example())
        self._train_first(_Lesson(_STUDENTS, recipe, bold, feature_block=feature_block))
        self._train_exits()

    # The stages -----------------------------------------------------------------------------------------

    def _train_first(self, lesson: _Lesson) -> None:
        """Those at the input that have this lesson, in their share of the time."""
        waiting = self._unfinished(self.first)
        todo = [item for item in waiting if is_reduced(item.trial.variant) == (lesson.name == _REDUCED)]
        if not todo:
            return
        exits = self._unfinished(self.exits)
        left_s = self._left_s([*waiting, *exits], passes=2)
        allowed_s = None
        if left_s is not None:
            of_all_s, _ = divide_time(left_s, students=len(waiting), exits=len(exits))
            allowed_s = of_all_s * len(todo) / len(waiting)
        self._train_groups(lesson, todo, allowed_s)

    def _train_exits(self) -> None:
        todo = self._unfinished(self.exits)
        if not todo:
            return
        left_s = self._left_s([*self.first, *todo], passes=1)
        emphasis = self._emphasis()
        lesson = _Lesson(_EXITS, EXITS, self.prepared.augmentation, emphasis)
        self._train_groups(lesson, todo, left_s)

    def _left_s(self, items: Sequence[Specification], passes: int) -> float | None:
        """Seconds for training when what measuring `items` will take is kept free; None without a budget."""
        left_s = self.budget.left_s()
        lookups = len({(item.trial.variant, item.hidden_shape) for item in items})
        expected_s = self.prepared.expected.all_of(len(items), lookups, passes)
        return None if left_s is None else left_s - reserve(expected_s, left_s)

    def _unfinished(self, items: Sequence[Specification]) -> list[Specification]:
        finished = self.state.finished()
        return [item for item in items if item.trial.trial_id not in finished]

    def _emphasis(self) -> Emphasis | None:
        """What the best of those at the input is sure of and right about need not be known by exits."""
        finished = self.state.finished()
        trials = [finished[item.trial.trial_id].trial for item in self.first]
        trials = [each if each.status == "trained" else self.before[each.trial_id] for each in trials]
        if not trials:
            return None
        best = max(trials, key=worth)
        predictor = load_cache(self.library.cache_path(best.trial_id)).predictor.to(self.prepared.device)
        learner = Learner(best.trial_id, best.block, predictor)
        probabilities = held_out_probabilities(
            self.prepared.module, self.prepared.inputs.held_out, [learner], self.prepared.device
        )[best.trial_id].numpy()
        select = self.prepared.inputs.split == SELECT
        agrees = probabilities.argmax(1) == self.prepared.held_out.base_class
        thresholds, _, accuracies = accuracy_curve(probabilities.max(1)[select], agrees[select])
        sure = np.flatnonzero(accuracies >= _SURE_AT)
        return Emphasis(predictor, float(thresholds[sure[-1]])) if len(sure) else None

    # Training -------------------------------------------------------------------------------------------

    def _train_groups(self, lesson: _Lesson, items: Sequence[Specification], left_s: float | None) -> None:
        groups = _groups(items)
        end_s = None if left_s is None else self.budget.spent_s + left_s
        for number, group in enumerate(groups):
            allowed_s = None
            if end_s is not None:
                allowed_s = max(0.0, end_s - self.budget.spent_s) / (len(groups) - number)
            name = "+".join((lesson.name, group[0].trial.trial_id))
            self._train_group(lesson, name, group, allowed_s)
            self.budget.note()

    def _train_group(
        self, lesson: _Lesson, name: str, group: Sequence[Specification], allowed_s: float | None
    ) -> None:
        plan = self.state.plan(name)
        if plan is None:
            plan = self._plan(lesson, group, allowed_s)
            self.state.write_plan(name, plan)
        training = self._training(lesson, group, plan.steps, plan.engine)
        path = self.state.training_path(name)
        if path.is_file():
            training.restore(path)
            self.progress.note(f"going on at step {training.step} of {training.total_steps}")
        self._announce(lesson, group, plan)
        self.progress.stage(lesson.name, plan.steps, training.step)
        began, start = self.budget.clock(), training.step / plan.steps
        saved = began
        planned_s = plan.planned_s

        def share() -> float:
            return start + (self.budget.clock() - began) / max(planned_s or 0.0, 1e-3)

        for loss in training.run(None if planned_s is None else share):
            self.progress.advance(1, f"loss {loss:.3f}")
            if self.budget.clock() - saved >= _SAVE_EVERY_S:
                training.save(path)
                self.budget.note()
                saved = self.budget.clock()
        training.save(path)
        self._measure(training, group)
        path.unlink()

    def _plan(self, lesson: _Lesson, group: Sequence[Specification], allowed_s: float | None) -> StagePlan:
        """Decide on the number of steps: by epochs, or by what a step takes."""
        inputs, of_students = len(self.prepared.inputs.train), lesson.name != _EXITS
        batch_size = self._batch_size(lesson)
        if self.epochs is not None or allowed_s is None:
            least = LEAST_STUDENT_STEPS if of_students else LEAST_EXIT_STEPS
            steps = steps_for_epochs(self._epochs(of_students), inputs, batch_size, least=least)
            # which engine is fastest may come out otherwise the next time, the same seed gives the same
            return StagePlan(steps, None if allowed_s is None else allowed_s / (1.0 + LATENESS), _STEADY)
        began = self.budget.clock()
        few = self.prepared.inputs.train.subset(range(min(inputs, _PROBE_STEPS * batch_size)))
        probe = self._training(lesson, group, _PROBE_STEPS, None, few)
        for _ in probe.run():
            pass  # discarded: only its duration is of interest
        left_s = max(0.0, allowed_s - (self.budget.clock() - began)) / (1.0 + LATENESS)
        steps = affordable_steps(
            left_s,
            probe.pace,
            steps_per_round=steps_an_epoch(inputs, batch_size),
            rounds=lesson.recipe.rounds,
        )
        most = most_steps(inputs, batch_size, students=of_students)
        return StagePlan(max(1, min(steps, most)), left_s, probe.engine_name)

    def _batch_size(self, lesson: _Lesson) -> int:
        return min(self.batch_size, lesson.recipe.most_inputs or self.batch_size)

    def _epochs(self, of_students: bool) -> float:
        if self.epochs is not None:
            return STUDENT_EPOCHS * self.epochs if of_students else self.epochs
        return DEFAULT_STUDENT_EPOCHS if of_students else DEFAULT_EPOCHS

    def _announce(self, lesson: _Lesson, group: Sequence[Specification], plan: StagePlan) -> None:
        inputs = len(self.prepared.inputs.train)
        what = ", ".join(dict.fromkeys(item.trial.variant for item in group))
        places = len({item.trial.block for item in group})
        where = f"after {places} blocks" if lesson.name == _EXITS else "at the input"
        long = "" if plan.planned_s is None else f" in {plan.planned_s / 60:.1f} min"
        self.progress.note(
            f"{lesson.name}: {what} {where}, {plan.steps} steps "
            f"({plan.steps * self._batch_size(lesson) / inputs:.0f} passes){long}"
        )

    def _training(
        self,
        lesson: _Lesson,
        group: Sequence[Specification],
        steps: int,
        engine: str | None,
        inputs: Data | None = None,
    ) -> SharedTraining:
        recipe = lesson.recipe
        if self.before:
            recipe = replace(recipe, learning_rate=_AGAIN * recipe.learning_rate)
        return SharedTraining(
            self.prepared.module,
            self.prepared.inputs.train if inputs is None else inputs,
            [self._learner(item) for item in group],
            total_steps=steps,
            batch_size=self._batch_size(lesson),
            seed=self.seed,
            augmentation=lesson.augmentation,
            outputs_kind=self.prepared.held_out.outputs_kind,
            device=self.prepared.device,
            recipe=recipe,
            emphasis=lesson.emphasis,
            feature_block=lesson.feature_block,
            engine=engine,
            clock=self.budget.clock,
        )

    def _learner(self, item: Specification) -> Learner:
        trial, held_out = item.trial, self.prepared.held_out
        if is_reduced(trial.variant):
            example, kind = self._example(), held_out.outputs_kind
            predictor: nn.Module = ReducedNetwork.of(self.prepared.module, trial.variant, example, kind)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(zlib.crc32(f"{self.seed} {trial.trial_id}".encode()))
                predictor = build_predictor(trial.variant, item.hidden_shape, held_out.classes)
        known = self.before.get(trial.trial_id)
        if known is not None:
            predictor.load_state_dict(load_file(self.library.training_path(known.trial_id)))
        return Learner(trial.trial_id, trial.block, predictor)

    def _example(self) -> Tensor:
        return self.prepared.inputs.held_out.images(np.arange(2)).to(self.prepared.device)

    # Measuring ------------------------------------------------------------------------------------------

    def _measure(self, training: SharedTraining, group: Sequence[Specification]) -> None:
        folded = [
            learner._replace(predictor=self._folded(learner.predictor)) for learner in training.learners
        ]
        held = self.prepared.inputs.held_out
        probabilities = held_out_probabilities(self.prepared.module, held, folded, self.prepared.device)
        for item, learner, trained in zip(group, folded, training.learners, strict=True):
            if not bool(torch.isfinite(probabilities[learner.trial_id]).all()):
                raise ModelError(
                    f"training {item.trial.variant} at {item.trial.block} gave NaN: check the hidden outputs "
                    "of that block, or leave the variant out with --variants"
                )
            measured = measure_cache(
                learner.trial_id,
                (item.trial.variant, item.hidden_shape, learner.predictor),
                probabilities[learner.trial_id],
                self.prepared.held_out.base_class,
                self.prepared.inputs.split,
                self.seed,
            )
            self._keep(item, measured, training, trained.predictor)
        self._tell(group)

    def _folded(self, predictor: nn.Module) -> nn.Module:
        if isinstance(predictor, ReducedNetwork):
            return predictor.companion(self._example()).to(self.prepared.device)
        return fold_normalisation(predictor).requires_grad_(False)

    def _keep(
        self, item: Specification, measured: Measured, training: SharedTraining, trained: nn.Module
    ) -> None:
        trial_id, known = item.trial.trial_id, self.before.get(item.trial.trial_id)
        trial = replace(
            item.trial,
            selector=measured.cache.selector_name,
            memory_bytes=measured.cache.memory_bytes,
            images_seen=training.images_seen + (known.images_seen if known else 0),
            loss=training.losses.get(trial_id),
            agreement=measured.agreement,
            hit_rate_at_97=measured.hit_rate_at_97,
            hit_rate_at_99=measured.hit_rate_at_99,
        )
        if known is not None and worth(trial) <= worth(known):
            no_better = replace(trial, status="skipped", reason=f"no better than {known.trial_id}")
            self.state.write_finished(FinishedTrial(no_better, ()))
            return
        save_cache(self.library.cache_path(trial_id), measured.cache)
        self.library.write_outcomes(trial_id, TrialOutcomes(*measured.outcomes))
        weights = {name: tensor.cpu().contiguous() for name, tensor in trained.state_dict().items()}
        atomic_write(self.library.training_path(trial_id), lambda temporary: save_file(weights, temporary))
        self.state.write_finished(FinishedTrial(trial, tuple(measured.points)))

    def _tell(self, group: Sequence[Specification]) -> None:
        """Report what was learned: all caches at the input, and the best exit of each block."""
        finished = self.state.finished()
        trials = [finished[item.trial.trial_id].trial for item in group]
        best = {
            trial.variant if reads_input(trial.variant) else trial.block: trial
            for trial in sorted(trials, key=worth)
        }
        for trial in best.values():
            better = "" if trial.status == "trained" else f", {trial.reason}"
            self.progress.note(
                f"{trial.variant} at {trial.block}: answers {trial.hit_rate_at_97:.0%} at 0.97, "
                f"{trial.hit_rate_at_99:.0%} at 0.99{better}"
            )


def worth(trial: Trial) -> tuple[float, float]:
    """What two trainings of the same variant at the same block are compared by: larger is better."""
    return (trial.hit_rate_at_97 or 0.0) + (trial.hit_rate_at_99 or 0.0), trial.agreement or 0.0


def _groups(items: Sequence[Specification]) -> list[list[Specification]]:
    """Consecutive trials whose training fits into memory together."""
    groups: list[list[Specification]] = []
    size = 0
    for item in items:
        fits = groups and size + item.trial.parameters <= _GROUP_PARAMETERS
        if not fits or len(groups[-1]) >= _GROUP_TRIALS:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.trial.parameters
    return groups
