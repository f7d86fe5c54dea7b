"""Executors, which train groups of learners, and the one that trains them in this process, one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple, Protocol

from gati.caches import build_predictor, reads_input
from gati.costs.least import Arithmetic
from gati.exploration.budget import Budget
from gati.exploration.candidates import Specification
from gati.exploration.crowding import watched
from gati.exploration.groups import (
    Classroom,
    GroupTask,
    TrialResult,
    batch_size_of,
    group_training,
    in_smaller_batches,
    measured_trials,
    timekeeper,
)
from gati.exploration.pace import LATENESS
from gati.exploration.progress import Progress
from gati.exploration.state import RunState
from gati.model.segments import TracedModel

_GROUP_PARAMETERS = 60_000_000  # with gradients and two moments, these take 1 GB
_GROUP_TRIALS = 80
_BACKWARD = 3.0  # arithmetic of a training step, relative to a forward pass


class OngoingRun(NamedTuple):
    """What an executor needs of a run: where to keep states, the budget, and where to report progress."""

    state: RunState
    budget: Budget
    progress: Progress
    save_every_s: float


class Executor(Protocol):
    """Trains groups. If `concurrent`, all groups are planned before the first one trains.

    A concurrent executor must give the same trials however many groups train in parallel: groups, steps and
    engines are decided in advance, and as long as the budget lasts, timing decides nothing after that.
    """

    concurrent: bool

    def groups(self, items: Sequence[Specification], traced: TracedModel) -> list[list[Specification]]:
        """Divide trials with the same lesson into groups, each trained as a whole."""

    def probing(self) -> AbstractContextManager[None]:
        """While this context is open, this process computes like the one that will train."""

    def train(
        self, classroom: Classroom, tasks: Iterable[GroupTask], run: OngoingRun
    ) -> Iterator[tuple[GroupTask, list[TrialResult]]]:
        """Train each task to its end and yield it with its trials, in the order in which they end.

        A task with a saved state in `run.state` resumes from it. The caller removes the state afterwards.
        """


class LocalExecutor:
    """Trains groups in this process; each is planned when the previous one has ended."""

    concurrent = False

    def groups(self, items: Sequence[Specification], traced: TracedModel) -> list[list[Specification]]:
        """As few groups as memory allows: the trials of a group share the base model's forward pass."""
        del traced
        return packed(items)

    def probing(self) -> AbstractContextManager[None]:
        """Do nothing: this process does the training."""
        return nullcontext()

    def train(
        self, classroom: Classroom, tasks: Iterable[GroupTask], run: OngoingRun
    ) -> Iterator[tuple[GroupTask, list[TrialResult]]]:
        """Train one task after the other; a GPU with too little memory gets smaller batches."""
        for task in tasks:
            yield self._train_in_memory(classroom, task, run)

    def _train_in_memory(
        self, classroom: Classroom, task: GroupTask, run: OngoingRun
    ) -> tuple[GroupTask, list[TrialResult]]:
        while True:
            began = run.budget.clock()
            try:
                return task, self._train(classroom, task, run)
            except Exception as error:
                task = begun_again(classroom, task, run, error)
                lost_s = run.budget.clock() - began
                if task.plan.planned_s is not None:
                    left_s = (1.0 + LATENESS) * task.plan.planned_s if task.left_s is None else task.left_s
                    task = replace(task, left_s=max(0.0, left_s - lost_s))

    def _train(self, classroom: Classroom, task: GroupTask, run: OngoingRun) -> list[TrialResult]:
        state, budget, progress, save_every_s = run
        training = group_training(classroom, task, budget.clock)
        path = state.training_path(task.name)
        if path.is_file():
            if training.restore(path):
                progress.note(f"resuming at step {training.step} of {_steps(task)}")
            else:
                progress.note(f"{task.lesson.name} begin again: the code of a predictor has changed")
        progress.note(announcement(classroom, task))
        plan = task.plan
        steps = plan.steps if plan.most_steps is None else None  # the time ends it
        progress.stage(task.lesson.name, steps, training.step, _most_seconds(task, training.share))
        saved = budget.clock()
        share_done = timekeeper(plan, training, plan.planned_s, budget.clock, left_s=task.left_s)
        with watched(task.lesson.name, plan.steps, progress, budget.clock, classroom.device) as crowding:
            for loss in training.run(share_done):
                progress.advance(1, f"loss {loss:.3f}")
                crowding.look()
                if budget.clock() - saved >= save_every_s:
                    training.save(path)
                    budget.note()
                    saved = budget.clock()
            crowding.end(training.step)
        tell_unanswered(task, training.unanswered_batches, progress)
        training.save(path)
        return measured_trials(classroom, training, task.specifications)


def _most_seconds(task: GroupTask, share: float) -> float | None:
    """After how many seconds a training ends at the latest, if a `share` of it is done; None for never."""
    if task.plan.planned_s is None:
        return None
    left_s = (1.0 + LATENESS) * task.plan.planned_s * (1.0 - share)
    return left_s if task.left_s is None else min(left_s, task.left_s)


def begun_again(classroom: Classroom, task: GroupTask, run: OngoingRun, error: Exception) -> GroupTask:
    """The task in smaller batches and without a saved state, after `error`; as `in_smaller_batches`."""
    task = in_smaller_batches(classroom, task, error)
    run.state.training_path(task.name).unlink(missing_ok=True)  # before the plan, which it does not fit
    run.state.write_plan(task.name, task.plan)
    run.progress.note(
        f"too little memory: {task.lesson.name} begin again with {task.plan.batch_size} inputs a step"
    )
    return task


def tell_unanswered(task: GroupTask, batches: int, progress: Progress) -> None:
    """Say how many `batches` of a task had inputs without answers, if any."""
    if batches:
        progress.note(
            f"{task.lesson.name}: {batches} batches had inputs that the network answers with NaN or "
            "infinity; these were left out"
        )


def announcement(classroom: Classroom, task: GroupTask) -> str:
    """One line about what a task trains, and for how long."""
    plan, items = task.plan, task.specifications
    what = ", ".join(dict.fromkeys(item.trial.variant for item in items))
    places = len({item.trial.block for item in items})
    where = "at the input" if reads_input(items[0].trial.variant) else f"after {places} blocks"
    passes = plan.steps * batch_size_of(classroom, task) / len(classroom.train)
    most = "at most " if plan.most_steps is None else ""
    long = "" if plan.planned_s is None else f" in {most}{(1.0 + LATENESS) * plan.planned_s / 60:.1f} min"
    return f"{task.lesson.name}: {what} {where}, {_steps(task)} steps ({passes:.0f} passes){long}"


def _steps(task: GroupTask) -> str:
    """How many steps a task takes, for the user."""
    return str(task.plan.steps) if task.plan.most_steps is None else f"about {task.plan.steps}"


def packed(items: Sequence[Specification]) -> list[list[Specification]]:
    """Group consecutive trials whose training fits into memory together."""
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


def divided(items: Sequence[Specification], traced: TracedModel) -> list[list[Specification]]:
    """Divide trials into small groups that can be distributed; they do not depend on the cluster.

    Each trial that reads the input is a group of its own. Exits of a group share the base model's forward
    pass. A group is filled until training its exits costs as much as that pass, so that splitting them into
    groups never doubles the work.
    """
    arithmetic = Arithmetic(traced)
    groups: list[list[Specification]] = []
    cost = 1.0
    for item in items:
        trial = item.trial
        alone = reads_input(trial.variant)
        if alone or cost >= 1.0:
            groups.append([])
            cost = 0.0
        groups[-1].append(item)
        if alone:
            cost = 1.0
            continue
        predictor = build_predictor(trial.variant, item.hidden_shape, traced.classes).to(traced.device)
        cost += _BACKWARD * arithmetic.share(predictor.eval(), trial.block)
    return [part for group in groups for part in packed(group)]
