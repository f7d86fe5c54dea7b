"""Training in resumable stages: caches at the input first, then exits for the inputs that they miss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from safetensors.torch import load_file, save_file

from gati.caches import is_reduced, load_cache, reads_input, save_cache
from gati.exploration.augment import Augmentation
from gati.exploration.budget import Budget
from gati.exploration.candidates import Specification
from gati.exploration.executors import Executor, OngoingRun
from gati.exploration.groups import (
    Classroom,
    GroupLesson,
    GroupTask,
    TrainedTrial,
    batch_size_of,
    group_training,
)
from gati.exploration.library import SELECT, Library, TrialOutcomes
from gati.exploration.measure import accuracy_curve, held_out_probabilities
from gati.exploration.prepare import Prepared
from gati.exploration.progress import Progress
from gati.exploration.recipes import EXITS, REDUCED_NETWORK, Emphasis, Recipe, recipe_of_students
from gati.exploration.schedule import (
    DEFAULT_EPOCHS,
    DEFAULT_STUDENT_EPOCHS,
    LEAST_EXIT_STEPS,
    LEAST_STUDENT_STEPS,
    STUDENT_EPOCHS,
    affordable,
    batch_size_for,
    divide_time,
    reserve,
    rounds_of_steps,
    steps_for_epochs,
)
from gati.exploration.state import FinishedTrial, RunState, StagePlan
from gati.exploration.train import LATENESS, Learner
from gati.files import atomic_write
from gati.model.entry import INPUT_KIND
from gati.types import Trial, TrialId

_SAVE_EVERY_S = 60.0
_SCARCE = 10_000  # with fewer training inputs, students need stronger views and also match hidden outputs
_SURE_AT = 0.99  # agreement of the earlier cache's answers on inputs that exits may neglect
_REDUCED, _STUDENTS, _EXITS = "reduced network", "students", "exits"
_PROBE_STEPS = 8
_PROBE_STEPS_CUDA = 40  # the first ones are slow: see gati.exploration.graphs
_ALWAYS_AVAILABLE = "torch"  # engine
_FURTHER_RATE = 0.5  # share of the learning rate for weights that are already trained


class TrainingStages:
    """Decides what `executor` trains and for how long, and stores every trial as soon as it is finished.

    `before` are the trials of an earlier round, from whose weights training continues. A cache that is no
    better than its earlier trial is discarded.
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
        executor: Executor,
        before: Mapping[TrialId, Trial] | None = None,
    ) -> None:
        self.prepared, self.library, self.state, self.budget = prepared, library, state, budget
        self.epochs, self.progress, self.executor = epochs, progress, executor
        self.before = dict(before or {})
        self.classroom = Classroom(
            prepared.module,
            prepared.inputs.train,
            prepared.inputs.held_out,
            prepared.inputs.split,
            prepared.held_out.base_class,
            prepared.held_out.outputs_kind,
            prepared.held_out.classes,
            batch_size_for(len(prepared.inputs.train)),
            seed,
            prepared.device,
        )
        self._under_way: dict[str, GroupTask] = {}
        trained = [item for item in prepared.specifications if item.trial.status == "trained"]
        self.first = [item for item in trained if reads_input(item.trial.variant)]  # run first
        self.exits = [item for item in trained if not reads_input(item.trial.variant)]

    def run(self) -> None:
        """Train everything that is not trained yet."""
        bold = self.prepared.bold_augmentation
        scarce = len(self.prepared.inputs.train) < _SCARCE
        last = self.prepared.profile.blocks[-1]
        feature_block = last.name if scarce and last.kind != INPUT_KIND else None
        recipe = recipe_of_students(self.prepared.traced.example())
        exits_s = self._planned_for_exits_s() if self.executor.concurrent else None
        reduced = self._first_tasks(self._lesson(_REDUCED, REDUCED_NETWORK, bold))
        views = bold if scarce else self.prepared.augmentation
        students = self._first_tasks(self._lesson(_STUDENTS, recipe, views, feature_block=feature_block))
        self._train(chain(reduced, students))
        self._train(self._exit_tasks(exits_s))

    # The stages -----------------------------------------------------------------------------------------

    def _first_tasks(self, lesson: GroupLesson) -> Iterator[GroupTask]:
        """Tasks for the trials at the input that `lesson` trains, in their share of the time."""
        waiting = self._waiting(self.first)
        own = [item for item in self.first if is_reduced(item.trial.variant) == (lesson.name == _REDUCED)]
        todo = [item for item in waiting if item in own]
        if not todo:
            return
        left_s = self._left_s([*waiting, *self._waiting(self.exits)], passes=2)
        allowed_s = None
        if left_s is not None:
            of_all_s, _ = self._divided(left_s, len(waiting))
            allowed_s = of_all_s * len(todo) / len(waiting)
        yield from self._tasks(lesson, own, allowed_s)

    def _exit_tasks(self, allowed_s: float | None) -> Iterator[GroupTask]:
        """Tasks for exits, in `allowed_s` or, if that is None, in the time that is left."""
        todo = self._waiting(self.exits)
        if not todo:
            return
        left_s = self._left_s([*self.first, *todo], passes=1) if allowed_s is None else allowed_s
        lesson = self._lesson(_EXITS, EXITS, self.prepared.augmentation, self._emphasis())
        yield from self._tasks(lesson, self.exits, left_s)

    def _planned_for_exits_s(self) -> float | None:
        """Seconds for exits, decided before any training; None without a budget.

        In a concurrent run it must not depend on when the earlier stages end.
        """
        if self.budget.budget_s is None or not self.exits:
            return None
        known_s = self.state.exits_s
        if known_s is None:
            left_s = self._left_s([*self.first, *self.exits], passes=2)
            known_s = self._divided(left_s or 0.0, len(self.first))[1]
            self.state.write_exits_s(known_s)
        return known_s

    def _divided(self, left_s: float, first: int) -> tuple[float, float]:
        return divide_time(left_s, students=first, exits=len(self._waiting(self.exits)))

    def _left_s(self, items: Sequence[Specification], passes: int) -> float | None:
        """Seconds left for training after reserving time to measure `items`; None without a budget."""
        left_s = self.budget.left_s()
        lookups = len({(item.trial.variant, item.hidden_shape) for item in items})
        expected_s = self.prepared.expected.all_of(len(items), lookups, passes)
        return None if left_s is None else left_s - reserve(expected_s, left_s) - self._promised_s()

    def _promised_s(self) -> float:
        """Seconds of the tasks that are planned but not finished."""
        return sum(task.plan.planned_s or 0.0 for task in self._under_way.values())

    def _waiting(self, items: Sequence[Specification]) -> list[Specification]:
        """The trials that are neither finished nor part of a task."""
        taken = set(self.state.finished())
        for task in self._under_way.values():
            taken.update(item.trial.trial_id for item in task.specifications)
        return [item for item in items if item.trial.trial_id not in taken]

    def _lesson(
        self,
        name: str,
        recipe: Recipe,
        augmentation: Augmentation,
        emphasis: Emphasis | None = None,
        feature_block: str | None = None,
    ) -> GroupLesson:
        if self.before:
            recipe = replace(recipe, learning_rate=_FURTHER_RATE * recipe.learning_rate)
        return GroupLesson(name, recipe, augmentation, emphasis, feature_block)

    def _emphasis(self) -> Emphasis | None:
        """Less weight for inputs that the best cache at the input answers confidently and correctly."""
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

    def _train(self, tasks: Iterator[GroupTask]) -> None:
        run = OngoingRun(self.state, self.budget, self.progress, _SAVE_EVERY_S)
        for task, trained in self.executor.train(self.classroom, tasks, run):
            for item, trial in zip(task.specifications, trained, strict=True):
                self._keep(item, trial)
            self._report(task.specifications)
            del self._under_way[task.name]
            self.state.training_path(task.name).unlink(missing_ok=True)
            self.budget.note()

    def _tasks(
        self, lesson: GroupLesson, items: Sequence[Specification], left_s: float | None
    ) -> Iterator[GroupTask]:
        """Yield one task per group, planned when it is requested, in its share of the rest of `left_s`.

        Groups are made of all `items`, so that a resumed run has the same groups; finished ones are skipped.
        """
        every = self.executor.groups(items, self.prepared.traced)
        groups = [group for group in every if self._waiting(group)]
        promised_s = self._promised_s()
        end_s = None if left_s is None else self.budget.spent_s + left_s
        for number, group in enumerate(groups):
            allowed_s = None
            if end_s is not None:
                own_s = end_s - self.budget.spent_s - (self._promised_s() - promised_s)
                allowed_s = max(0.0, own_s) / (len(groups) - number)
            task = self._task(lesson, group, allowed_s)
            self._under_way[task.name] = task
            yield task

    def _task(
        self, lesson: GroupLesson, group: Sequence[Specification], allowed_s: float | None
    ) -> GroupTask:
        name = "+".join((lesson.name, group[0].trial.trial_id))
        weights = {
            item.trial.trial_id: load_file(self.library.training_path(known.trial_id))
            for item in group
            if (known := self.before.get(item.trial.trial_id)) is not None
        }
        steps = _PROBE_STEPS_CUDA if self.prepared.device.type == "cuda" else _PROBE_STEPS
        task = GroupTask(name, lesson, tuple(group), StagePlan(steps, None), weights)
        plan = self.state.plan(name)
        if plan is not None:
            return replace(task, plan=plan, left_s=allowed_s)
        plan = self._plan(task, allowed_s)
        self.state.write_plan(name, plan)
        return replace(task, plan=plan)

    def _plan(self, task: GroupTask, allowed_s: float | None) -> StagePlan:
        """Choose the number of steps, from epochs or from the time per step."""
        lesson = task.lesson
        inputs, of_students = len(self.prepared.inputs.train), lesson.name != _EXITS
        batch_size = batch_size_of(self.classroom, lesson)
        if self.epochs is not None or allowed_s is None:
            least = LEAST_STUDENT_STEPS if of_students else LEAST_EXIT_STEPS
            steps = steps_for_epochs(self._epochs(of_students), inputs, batch_size, least=least)
            # the fastest engine may be another one next time, but the same seed must give the same weights
            return StagePlan(
                steps,
                None if allowed_s is None else allowed_s / (1.0 + LATENESS),
                _ALWAYS_AVAILABLE,
                rounds_of_steps(steps, inputs, batch_size, lesson.recipe),
            )
        began = self.budget.clock()
        few = self.prepared.inputs.train.subset(range(min(inputs, task.plan.steps * batch_size)))
        with self.executor.probing():
            probe = group_training(self.classroom, _probe(task), self.budget.clock, inputs=few)
            for _ in probe.run():
                pass  # only the time matters
        left_s = max(0.0, allowed_s - (self.budget.clock() - began)) / (1.0 + LATENESS)
        pace = probe.pace
        steps, rounds = affordable(left_s, pace, inputs, batch_size, lesson.recipe, students=of_students)
        fresh_cost = 1.0 + pace.answer_s / pace.learn_s if pace.learn_s > 0 else 1.0
        return StagePlan(max(1, steps), left_s, probe.engine_name, rounds, fresh_cost)

    def _epochs(self, of_students: bool) -> float:
        if self.epochs is not None:
            return STUDENT_EPOCHS * self.epochs if of_students else self.epochs
        return DEFAULT_STUDENT_EPOCHS if of_students else DEFAULT_EPOCHS

    # Keeping --------------------------------------------------------------------------------------------

    def _keep(self, item: Specification, trained: TrainedTrial) -> None:
        trial_id, known = item.trial.trial_id, self.before.get(item.trial.trial_id)
        measured = trained.measured
        trial = replace(
            item.trial,
            selector=measured.cache.selector_name,
            memory_bytes=measured.cache.memory_bytes,
            images_seen=trained.images_seen + (known.images_seen if known else 0),
            loss=trained.loss,
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
        weights = trained.weights
        atomic_write(self.library.training_path(trial_id), lambda temporary: save_file(weights, temporary))
        self.state.write_finished(FinishedTrial(trial, tuple(measured.points)))

    def _report(self, group: Sequence[Specification]) -> None:
        """Report the results: all caches at the input, and the best exit of each block."""
        finished = self.state.finished()
        trials = [finished[item.trial.trial_id].trial for item in group]
        best = {
            trial.variant if reads_input(trial.variant) else trial.block: trial
            for trial in sorted(trials, key=worth)
        }
        for trial in best.values():
            better = "" if trial.status == "trained" else f", {trial.reason}"
            self.progress.note(
                f"{trial.variant} at {trial.block}: hit rate {trial.hit_rate_at_97:.0%} at agreement 0.97, "
                f"{trial.hit_rate_at_99:.0%} at 0.99{better}"
            )


def _probe(task: GroupTask) -> GroupTask:
    """The task with as many steps again, on the views of the first ones, if its views repeat."""
    if task.lesson.recipe.rounds is None:
        return task
    return replace(task, plan=task.plan._replace(steps=2 * task.plan.steps, rounds=1))


def worth(trial: Trial) -> tuple[float, float]:
    """The key that compares trials of the same variant and block: larger is better."""
    return (trial.hit_rate_at_97 or 0.0) + (trial.hit_rate_at_99 or 0.0), trial.agreement or 0.0
