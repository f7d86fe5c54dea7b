"""Plans of groups: how long each trains, on which views, and with how many inputs a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from gati.caches import is_reduced
from gati.engine.threads import on_threads
from gati.exploration.answers import CLEARLY, ENGINES, IN_8_BITS, calls_to_choose
from gati.exploration.budget import Budget
from gati.exploration.crowding import CROWDED, crowding_since
from gati.exploration.executors import Executor
from gati.exploration.groups import (
    LEAST_BATCH,
    Classroom,
    GroupTask,
    batch_size_of,
    group_training,
    in_smaller_batches,
)
from gati.exploration.memory import fitting, may_be_short, need_of
from gati.exploration.pace import LATENESS, Pace
from gati.exploration.recipes import Recipe
from gati.exploration.remembered import bytes_to_plan_with
from gati.exploration.schedule import (
    ProbeSize,
    affordable,
    is_worth_a_step,
    most_steps,
    pays_quantising,
    probe_size,
    rounds_of_steps,
    steps_for_epochs,
)
from gati.exploration.state import StagePlan
from gati.exploration.train import SharedTraining

_PROBE_STEPS = 8
_PROBE_STEPS_CUDA = 40  # the first ones are slow: see gati.exploration.graphs
_ALWAYS_AVAILABLE = ENGINES[-1]
_FASTER = 4.0  # times as fast as torch, an engine for answers may be
_MIXING = 4  # tensors like the inputs live while these are mixed
_TIMES_ANSWERS = 2.0  # memory of a step, relative to that of answers
_SHORT_STEPS = 100  # at least, if the time ends a training: the last step may exceed it


class GroupPlanner:
    """Plans groups of `classroom`, which `executor` trains.

    `answer_s` is the time of the network per input of a batch.
    """

    def __init__(self, classroom: Classroom, budget: Budget, executor: Executor, answer_s: float) -> None:
        self.classroom, self.budget, self.executor, self.answer_s = classroom, budget, executor, answer_s

    def by_epochs(
        self, task: GroupTask, epochs: float, least_steps: int, allowed_s: float | None
    ) -> StagePlan | None:
        """The plan of so many epochs, which are cut short after `allowed_s` seconds; None means no limit.

        The result is None if that is too little for a step. Batches are smaller than usual if memory is
        short.

        **Raises:** `ModelError` if even two inputs do not fit.
        """
        task = self._fitting(task)
        inputs, batch_size = len(self.classroom.train), batch_size_of(self.classroom, task)
        if allowed_s is not None and not self._is_worth(batch_size * self.answer_s, allowed_s):
            return None
        steps = steps_for_epochs(epochs, inputs, batch_size, least=least_steps)
        # the fastest engine may be another one next time, but the same seed must give the same weights
        return task.plan._replace(
            steps=steps,
            planned_s=None if allowed_s is None else allowed_s / (1.0 + LATENESS),
            engine=_ALWAYS_AVAILABLE,
            rounds=rounds_of_steps(steps, inputs, batch_size, task.lesson.recipe),
        )

    def by_time(self, task: GroupTask, allowed_s: float, *, students: bool) -> StagePlan | None:
        """The plan of as many steps as fit into `allowed_s` seconds; None if that is too little for any.

        `students` says that the trials read the input. Batches are as for `by_epochs`.
        """
        task = self._fitting(task)
        while True:
            try:
                return self._timed(task, allowed_s, students=students)
            except Exception as error:
                task = in_smaller_batches(self.classroom, task, error)

    def _timed(self, task: GroupTask, allowed_s: float, *, students: bool) -> StagePlan | None:
        inputs, batch_size = len(self.classroom.train), batch_size_of(self.classroom, task)
        recipe, on_cuda = self._recipe(task), self.classroom.device.type == "cuda"
        if not self._is_worth(batch_size * self.answer_s / _FASTER, allowed_s):
            return None
        calls = calls_to_choose(self.classroom.device) if students else 0
        usual = ProbeSize(_PROBE_STEPS_CUDA if on_cuda else _PROBE_STEPS, batch_size)
        size = probe_size(usual, self.answer_s, allowed_s, calls)
        began = self.budget.clock()
        engine, pace, opening_s = self._found_pace(task, size, allowed_s, students=students)
        left_s = max(0.0, allowed_s - (self.budget.clock() - began)) / (1.0 + LATENESS)
        if not self._is_worth(pace.answer_s + pace.learn_s, left_s):
            return None
        steps, rounds, places = affordable(
            max(0.0, left_s - opening_s), pace, inputs, batch_size, recipe, students=students
        )
        most = most_steps(inputs, batch_size, students=students)
        # what a probe of a few steps expects is no more than that, unless the time suffices for all of them
        by_time = _SHORT_STEPS <= steps < most and not self.executor.concurrent
        return task.plan._replace(
            steps=max(1, steps),
            planned_s=left_s,
            engine=engine,
            rounds=rounds,
            fresh_cost=1.0 + pace.answer_s / pace.learn_s if pace.learn_s > 0 else 1.0,
            places=places,
            most_steps=most if by_time else None,
        )

    def _recipe(self, task: GroupTask) -> Recipe:
        """The recipe, with the memory for answers. Where these hold features, there are no further rounds."""
        kept_bytes = 0 if task.lesson.feature_block else bytes_to_plan_with(self.classroom.device)
        return task.lesson.recipe.keeping(self.classroom.classes, kept_bytes)

    def _found_pace(
        self, task: GroupTask, size: ProbeSize, allowed_s: float, *, students: bool
    ) -> tuple[str | None, Pace, float]:
        """The engine for answers, the pace of a whole batch with it, and the seconds to open it."""
        inputs, batch_size = len(self.classroom.train), batch_size_of(self.classroom, task)
        with self.executor.probing():
            alone = self.classroom.device.type == "cpu" and not self.executor.concurrent
            probe = self._probed_in_a_crowd(task, size) if alone else self._probed(task, size)
            pace = self._pace_of_batch(task, probe, students=students)
            quantised = students and self._may_answer_in_8_bits()
            if quantised and pays_quantising(allowed_s, pace, inputs, batch_size, self._recipe(task)):
                other, opening_s = self._probed_in_8_bits(task, size, probe)
                if other is not probe:
                    return other.engine_name, self._pace_of_batch(task, other, students=True), opening_s
        return probe.engine_name, pace, 0.0

    def _is_worth(self, step_s: float, allowed_s: float) -> bool:
        return is_worth_a_step(step_s, allowed_s, self.budget.budget_s)

    def _pace_of_batch(self, task: GroupTask, probe: SharedTraining, *, students: bool) -> Pace:
        """The pace of a whole batch, from a `probe` that may have had fewer inputs a step."""
        larger = min(batch_size_of(self.classroom, task), len(self.classroom.train)) / probe.batch_size
        answer_s, learn_s = (larger * each for each in probe.pace)
        if larger > 1 and students and not any(is_reduced(x.trial.variant) for x in task.specifications):
            learn_s = self._seconds_to_learn(task)
        return Pace(answer_s, learn_s)

    def _seconds_to_learn(self, task: GroupTask) -> float:
        """The time of a step without answers; that of a few inputs is mostly the operators' own."""
        lesson = task.lesson._replace(feature_block=None)
        plan = task.plan._replace(steps=_PROBE_STEPS, rounds=1, engine=_ALWAYS_AVAILABLE)
        classroom = replace(self.classroom, module=_AnswersAtOnce(self.classroom.classes))
        task = replace(task, lesson=lesson, plan=plan)
        return self._trained(task, batch_size_of(classroom, task), classroom).pace.learn_s

    def _probed_in_a_crowd(self, task: GroupTask, size: ProbeSize) -> SharedTraining:
        """As `_probed`; if other programs use the cores, also on fewer threads, and the faster one counts."""
        waiting = crowding_since(self.budget.clock)
        probe, threads = self._probed(task, size), torch.get_num_threads()
        if threads == 1 or waiting() < CROWDED:
            return probe
        with on_threads(threads // 2):
            return min(probe, self._probed(task, size), key=lambda each: sum(each.pace))

    def _may_answer_in_8_bits(self) -> bool:
        """Whether inputs are pictures, answered on the CPU: elsewhere 8-bit integers are not tried."""
        return self.classroom.device.type == "cpu" and self.classroom.train.images(np.arange(1)).dim() == 4

    def _probed_in_8_bits(
        self, task: GroupTask, size: ProbeSize, probe: SharedTraining
    ) -> tuple[SharedTraining, float]:
        """The probe that answers in 8-bit integers and the seconds it took, if it can and is clearly faster.

        Else the result is `probe`, and 0. Training quantises again.
        """
        began = self.budget.clock()
        other = self._probed(replace(task, plan=task.plan._replace(engine=IN_8_BITS)), size)
        if other.engine_name != IN_8_BITS or CLEARLY * other.pace.answer_s > probe.pace.answer_s:
            return probe, 0.0
        return other, self.budget.clock() - began

    def _probed(self, task: GroupTask, size: ProbeSize) -> SharedTraining:
        """Train a few steps, of which only the time matters.

        If views repeat, there are as many steps again, on the views of the first ones.
        """
        plan = task.plan._replace(steps=size.steps, batch_size=size.batch_size)
        if task.lesson.recipe.rounds is not None:
            plan = plan._replace(steps=2 * size.steps, rounds=1)
        return self._trained(replace(task, plan=plan), size.steps * size.batch_size)

    def _trained(self, task: GroupTask, inputs: int, classroom: Classroom | None = None) -> SharedTraining:
        few = self.classroom.train.subset(range(min(inputs, len(self.classroom.train))))
        training = group_training(classroom or self.classroom, task, self.budget.clock, inputs=few)
        for _ in training.run():
            pass
        return training

    def _fitting(self, task: GroupTask) -> GroupTask:
        """The task with the usual inputs per step, or with fewer if memory is short."""
        usual = batch_size_of(self.classroom, task)
        example = self.classroom.train.images(np.arange(1)).to(self.classroom.device)
        if not may_be_short(example, usual, _TIMES_ANSWERS):
            return task
        recipe = task.lesson.recipe
        plan = task.plan._replace(
            steps=1, rounds=None if recipe.rounds is None else 1, engine=_ALWAYS_AVAILABLE
        )
        # how inputs are mixed is drawn, so two batches would run other operators
        lesson = task.lesson._replace(recipe=replace(recipe, mixed=0.0))

        def step(inputs: int) -> SharedTraining:
            few = replace(task, lesson=lesson, plan=plan._replace(batch_size=inputs))
            return self._trained(few, inputs)

        need = need_of(step, LEAST_BATCH)
        if recipe.mixed:
            need = need._replace(input_bytes=need.input_bytes + _MIXING * example.nbytes)
        fits = fitting(usual, need, LEAST_BATCH)
        return task if fits == usual else replace(task, plan=task.plan._replace(batch_size=fits))


class _AnswersAtOnce(nn.Module):
    """A network [B, ...] -> [B, classes] that takes no time."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), self.classes)
