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
    FailedTrial,
    GroupLesson,
    GroupTask,
    TrialResult,
)
from gati.exploration.learned import usual_answer
from gati.exploration.library import SELECT, Library, TrialOutcomes
from gati.exploration.measure import accuracy_curve, held_out_probabilities
from gati.exploration.planning import GroupPlanner
from gati.exploration.prepared import Prepared
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
    reserve,
    too_slow_for_exits,
)
from gati.exploration.state import FinishedTrial, RunState, StagePlan
from gati.exploration.train import Learner
from gati.files import atomic_write
from gati.model.entry import INPUT_KIND
from gati.types import Trial, TrialId
from gati.units import percent

_SAVE_EVERY_S = 60.0
_SCARCE = 10_000  # with fewer training inputs, students need stronger views and also match hidden outputs
_SURE_AT = 0.99  # agreement of the earlier cache's answers on inputs that exits may neglect
_REDUCED, _STUDENTS, _EXITS = "reduced network", "students", "exits"
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
        self.planner = GroupPlanner(self.classroom, budget, executor, prepared.answer_s)
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
        self._leave_out_dear_exits()
        exits_s = self._planned_for_exits_s() if self.executor.concurrent else None
        reduced = self._first_tasks(self._lesson(_REDUCED, REDUCED_NETWORK, bold))
        views = bold if scarce else self.prepared.augmentation
        students = self._first_tasks(self._lesson(_STUDENTS, recipe, views, feature_block=feature_block))
        self._train(chain(reduced, students))
        self._train(self._exit_tasks(exits_s))

    # The stages -----------------------------------------------------------------------------------------

    def _leave_out_dear_exits(self) -> None:
        """Leave out exits that are not begun, if there are students and even a few steps take too long."""
        left_s, groups = self.budget.left_s(), self.executor.groups(self.exits, self.prepared.traced)
        if left_s is None or not self.first or any(self.state.plan(_name(_EXITS, each)) for each in groups):
            return
        step_s = self.classroom.batch_size * self.planner.answer_s
        reason = too_slow_for_exits(step_s, self.prepared.expected.held_out_s, left_s)
        waiting = self._waiting(self.exits)
        if reason and waiting:
            self._leave_out(waiting, reason)

    def _first_tasks(self, lesson: GroupLesson) -> Iterator[GroupTask]:
        """Tasks for the trials at the input that `lesson` trains, in their share of the time."""
        waiting = self._waiting(self.first)
        own = [item for item in self.first if is_reduced(item.trial.variant) == (lesson.name == _REDUCED)]
        todo = [item for item in waiting if item in own]
        if not todo:
            return
        left_s = self._left_s([*waiting, *self._waiting(self.exits)])
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
        lesson = self._lesson(_EXITS, EXITS, self.prepared.augmentation, self._emphasis())
        left_s = self._left_s([*self.first, *todo]) if allowed_s is None else allowed_s
        yield from self._tasks(lesson, self.exits, left_s)

    def _planned_for_exits_s(self) -> float | None:
        """Seconds for exits, decided before any training; None without a budget.

        In a concurrent run it must not depend on when the earlier stages end.
        """
        if self.budget.budget_s is None or not self.exits:
            return None
        known_s = self.state.exits_s
        if known_s is None:
            left_s = self._left_s([*self.first, *self.exits])
            known_s = self._divided(left_s or 0.0, len(self.first))[1]
            self.state.write_exits_s(known_s)
        return known_s

    def _divided(self, left_s: float, first: int) -> tuple[float, float]:
        return divide_time(left_s, students=first, exits=len(self._waiting(self.exits)))

    def _left_s(self, items: Sequence[Specification]) -> float | None:
        """Seconds left for training after reserving time to measure `items`; None without a budget."""
        left_s = self.budget.left_s()
        if left_s is None:
            return None
        lookups = len({(item.trial.variant, item.hidden_shape) for item in items})
        measuring_s, certain_s = self.prepared.expected.of_all(
            self._waiting(items), lookups, self.prepared.profile.base_ms
        )
        return left_s - reserve(measuring_s, left_s, certain_s) - self._promised_s()

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
        rows = [finished[item.trial.trial_id].trial for item in self.first]
        kept = [row if row.status == "trained" else self.before.get(row.trial_id) for row in rows]
        trials = [trial for trial in kept if trial is not None]
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
            if task is None:
                self._leave_out(group, "the budget leaves no time to train it: give it more time")
                continue
            self._under_way[task.name] = task
            yield task

    def _task(
        self, lesson: GroupLesson, group: Sequence[Specification], allowed_s: float | None
    ) -> GroupTask | None:
        """The task with its plan, which is made once; None if the time is too short for it."""
        name = _name(lesson.name, group)
        weights = {
            item.trial.trial_id: load_file(self.library.training_path(known.trial_id))
            for item in group
            if (known := self.before.get(item.trial.trial_id)) is not None
        }
        task = GroupTask(name, lesson, tuple(group), StagePlan(1, None), weights)
        plan = self.state.plan(name)
        if plan is not None:
            return replace(task, plan=plan, left_s=allowed_s)
        plan = self._plan(task, allowed_s)
        if plan is None:
            return None
        self.state.write_plan(name, plan)
        return replace(task, plan=plan)

    def _plan(self, task: GroupTask, allowed_s: float | None) -> StagePlan | None:
        of_students = task.lesson.name != _EXITS
        if self.epochs is None and allowed_s is not None:
            return self.planner.by_time(task, allowed_s, students=of_students)
        least = LEAST_STUDENT_STEPS if of_students else LEAST_EXIT_STEPS
        return self.planner.by_epochs(task, self._epochs(of_students), least, allowed_s)

    def _epochs(self, of_students: bool) -> float:
        if self.epochs is not None:
            return STUDENT_EPOCHS * self.epochs if of_students else self.epochs
        return DEFAULT_STUDENT_EPOCHS if of_students else DEFAULT_EPOCHS

    # Keeping --------------------------------------------------------------------------------------------

    def _keep(self, item: Specification, trained: TrialResult) -> None:
        if isinstance(trained, FailedTrial):
            failed = replace(item.trial, status="failed", reason=trained.reason)
            self.state.write_finished(FinishedTrial(failed, ()))
            self.progress.note(f"left out {failed.variant} at {failed.block}: {failed.reason}")
            return
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

    def _leave_out(self, items: Sequence[Specification], reason: str) -> None:
        """Finish trials without training them."""
        for item in items:
            self.state.write_finished(FinishedTrial(replace(item.trial, status="skipped", reason=reason), ()))
        what = ", ".join(dict.fromkeys(item.trial.variant for item in items))
        self.progress.note(f"left out {what}: {reason}")

    def _report(self, group: Sequence[Specification]) -> None:
        """Report the results: all caches at the input, and the best exit of each block."""
        finished = self.state.finished()
        trials = [finished[item.trial.trial_id].trial for item in group]
        trials = [trial for trial in trials if trial.status != "failed"]
        best = {
            trial.variant if reads_input(trial.variant) else trial.block: trial
            for trial in sorted(trials, key=worth)
        }
        usual = usual_answer(self.prepared.held_out.base_class, self.prepared.inputs.split)
        for trial in best.values():
            better = "" if trial.status == "trained" else f", {trial.reason}"
            if usual.is_all(trial):
                better = ", not clearly better than always giving the network's most frequent answer"
            self.progress.note(
                f"{trial.variant} at {trial.block}: hit rate {percent(trial.hit_rate_at_97 or 0.0, 0)} at "
                f"agreement 0.97, {percent(trial.hit_rate_at_99 or 0.0, 0)} at 0.99{better}"
            )


def _name(lesson: str, group: Sequence[Specification]) -> str:
    """The name of a group's task."""
    return "+".join((lesson, group[0].trial.trial_id))


def worth(trial: Trial) -> tuple[float, float]:
    """The key that compares trials of the same variant and block: larger is better."""
    return (trial.hit_rate_at_97 or 0.0) + (trial.hit_rate_at_99 or 0.0), trial.agreement or 0.0
