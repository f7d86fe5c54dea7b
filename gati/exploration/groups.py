"""Groups of learners: the inputs and results of their training, on this machine or another one.

All groups of an exploration share one `Classroom`. A `GroupTask` is one group with its lesson, its number of
steps and its initial weights. Random numbers depend only on the seed and on names, so a task gives the same
`TrainedTrial`s on all machines whose processors compute the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gati.caches import (
    ReducedNetwork,
    build_predictor,
    fold_normalisation,
    is_reduced,
    separate_weights,
)
from gati.errors import ModelError
from gati.exploration.augment import Augmentation
from gati.exploration.candidates import Specification
from gati.exploration.failures import GAVE_NAN, noting_failure
from gati.exploration.measure import Measured, held_out_probabilities, measure_cache
from gati.exploration.memory import MemoryNeed, fitting, halved
from gati.exploration.pace import LATENESS, Course
from gati.exploration.recipes import Emphasis, Recipe
from gati.exploration.state import StagePlan
from gati.exploration.train import Learner, SharedTraining
from gati.model.sequence import Data
from gati.types import OutputsKind, TrialId

LEAST_BATCH = 2  # inputs: layers that normalise over a batch need two


class GroupLesson(NamedTuple):
    """How a group trains."""

    name: str
    recipe: Recipe
    augmentation: Augmentation
    emphasis: Emphasis | None = None
    feature_block: str | None = None


@dataclass(frozen=True)
class Classroom:
    """The network, the data and the settings that all groups of an exploration share."""

    module: nn.Module  # the base model
    train: Data
    held_out: Data
    split: npt.NDArray[np.uint8]  # [n] of the held-out inputs
    base_class: npt.NDArray[np.int64]  # [n], the base model's answers to them
    outputs_kind: OutputsKind
    classes: int
    batch_size: int
    seed: int
    device: torch.device


@dataclass(frozen=True)
class GroupTask:
    """One group to train. `weights` are the initial weights of learners that continue an earlier training."""

    name: str
    lesson: GroupLesson
    specifications: tuple[Specification, ...]
    plan: StagePlan
    weights: Mapping[TrialId, Mapping[str, Tensor]] = field(default_factory=dict)
    left_s: float | None = None  # what the budget leaves for a plan of an interrupted run


class TrainedTrial(NamedTuple):
    """A trained cache with its measurements, and the weights to resume training from."""

    measured: Measured
    weights: dict[str, Tensor]
    images_seen: int
    loss: float | None


class FailedTrial(NamedTuple):
    """A trial that could not be trained or measured, and why; the others of its group can."""

    reason: str


TrialResult = TrainedTrial | FailedTrial


def group_training(
    classroom: Classroom,
    task: GroupTask,
    clock: Callable[[], float],
    *,
    inputs: Data | None = None,
) -> SharedTraining:
    """The training of a group, at its first step; on `inputs` instead of the training inputs, if given."""
    lesson = task.lesson
    return SharedTraining(
        classroom.module,
        classroom.train if inputs is None else inputs,
        [_learner(classroom, item, task.weights) for item in task.specifications],
        total_steps=task.plan.most_steps or task.plan.steps,
        batch_size=batch_size_of(classroom, task),
        seed=classroom.seed,
        augmentation=lesson.augmentation,
        outputs_kind=classroom.outputs_kind,
        device=classroom.device,
        recipe=replace(lesson.recipe, rounds=task.plan.rounds),
        emphasis=lesson.emphasis,
        feature_block=lesson.feature_block,
        engine=task.plan.engine,
        places=task.plan.places,
        clock=clock,
    )


def timekeeper(
    plan: StagePlan,
    training: SharedTraining,
    allowed_s: float | None,
    clock: Callable[[], float],
    *,
    left_s: float | None = None,
) -> Callable[[], float] | None:
    """Return what tells the share of a training that is done, as `SharedTraining.run` takes it.

    It is planned for `allowed_s` seconds, None without a limit, and for `left_s` from now on at most: one
    that is resumed may have lagged before it was interrupted. While the steps keep up with the time, they
    count, so that the same seed gives the same weights. Once they lag by more than `LATENESS`, the time does,
    and training ends after 1 + `LATENESS` of it. With `most_steps`, the time counts from the beginning.
    """
    if allowed_s is None:
        return None
    slack = LATENESS if plan.most_steps is None else 0.0
    fresh_steps = (plan.rounds or 0) * training.steps_per_round
    course = Course(plan.steps, fresh_steps, plan.fresh_cost)
    done = min(1.0, course.share_of_time(training.share * plan.steps))
    whole_s = (1.0 + LATENESS - slack) * allowed_s
    if left_s is not None:
        whole_s = min(whole_s, left_s / max(1.0 - done + slack, 1e-9))
    whole_s = max(whole_s, 1e-3)
    began_s = clock() - whole_s * done
    most_steps = plan.most_steps or plan.steps

    def share_done() -> float:
        due = course.share_of_steps((clock() - began_s) / whole_s) - slack
        return max(training.step / most_steps, due)

    return share_done


def batch_size_of(classroom: Classroom, task: GroupTask) -> int:
    """Inputs per step."""
    usual = min(classroom.batch_size, task.lesson.recipe.most_inputs or classroom.batch_size)
    return task.plan.batch_size or usual


def in_smaller_batches(classroom: Classroom, task: GroupTask, error: Exception) -> GroupTask:
    """The same task with half the inputs in twice as many steps, after `error`.

    **Raises:** `ModelError` if two inputs are too many; any other `error` than a lack of memory.
    """
    plan = task.plan
    smaller = plan._replace(
        steps=2 * plan.steps,
        batch_size=halved(batch_size_of(classroom, task), error, least=LEAST_BATCH),
        places=None if plan.places is None else 2 * plan.places,
        most_steps=None if plan.most_steps is None else 2 * plan.most_steps,
    )
    return replace(task, plan=smaller)


def measured_trials(
    classroom: Classroom, training: SharedTraining, specifications: Sequence[Specification]
) -> list[TrialResult]:
    """Measure the trials of a finished training on the held-out inputs.

    A predictor that failed in training, or that raises or gives NaN now, is a `FailedTrial`.

    **Raises:** `DataError` for inputs that cannot be read.
    """
    failures = dict(training.failures)
    folded = []
    for learner in training.learners:
        with noting_failure(failures, learner.trial_id):
            folded.append(learner._replace(predictor=_folded(classroom, learner.predictor)))
    left = [each for each in folded if each.trial_id not in failures]
    items = {item.trial.trial_id: item for item in specifications}
    predictors = {learner.trial_id: learner.predictor for learner in left}
    measured: dict[TrialId, Measured] = {}
    for few in _whose_answers_fit(classroom, left):
        for trial_id, probabilities in _probabilities(classroom, few, failures).items():
            if not bool(torch.isfinite(probabilities).all()):
                failures[trial_id] = GAVE_NAN
                continue
            item = items[trial_id]
            measured[trial_id] = measure_cache(
                trial_id,
                (item.trial.variant, item.hidden_shape, predictors[trial_id]),
                probabilities,
                classroom.base_class,
                classroom.split,
                classroom.seed,
            )
    found: list[TrialResult] = []
    for trained in training.learners:
        trial_id = trained.trial_id
        if trial_id in failures:
            reason = failures[trial_id]
            raised = "" if reason == GAVE_NAN else "training or measuring it failed: "
            found.append(FailedTrial(raised + reason))
            continue
        found.append(
            TrainedTrial(
                measured[trial_id],
                separate_weights(trained.predictor),
                training.images_seen,
                training.losses.get(trial_id),
            )
        )
    return found


def _whose_answers_fit(classroom: Classroom, learners: Sequence[Learner]) -> Iterator[Sequence[Learner]]:
    """As many learners at a time as memory holds answers of: of thousands of classes, these are large."""
    answers_bytes = 4 * len(classroom.held_out) * classroom.classes
    most = fitting(max(1, len(learners)), MemoryNeed(0, answers_bytes))
    for start in range(0, len(learners), most):
        yield learners[start : start + most]


def _probabilities(
    classroom: Classroom, learners: Sequence[Learner], failures: dict[TrialId, str]
) -> dict[TrialId, Tensor]:
    """The answers of all learners that do not fail; if one fails, each half is asked alone."""
    if not learners:
        return {}
    own: dict[TrialId, str] = {}
    with noting_failure(own, learners[0].trial_id):
        return held_out_probabilities(classroom.module, classroom.held_out, learners, classroom.device)
    if len(learners) == 1:
        failures.update(own)
        return {}
    half = len(learners) // 2
    first = _probabilities(classroom, learners[:half], failures)
    return first | _probabilities(classroom, learners[half:], failures)


def _learner(
    classroom: Classroom, item: Specification, weights: Mapping[TrialId, Mapping[str, Tensor]]
) -> Learner:
    """A learner at its first step; one that cannot be built, as its code has changed, fails then."""
    trial_id, failed = item.trial.trial_id, dict[TrialId, str]()
    with noting_failure(failed, trial_id):
        return Learner(trial_id, item.trial.block, _predictor(classroom, item, weights.get(trial_id)))
    return Learner(trial_id, item.trial.block, _Unbuilt(failed[trial_id]))


class _Unbuilt(nn.Module):
    """Stands in for a predictor that cannot be built, and says why."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason
        self.nothing = nn.Parameter(torch.empty(0))  # optimisers need a parameter

    def forward(self, hidden: Tensor) -> Tensor:
        """Raise `ModelError`."""
        raise ModelError(f"it cannot be built ({self.reason})")


def _predictor(classroom: Classroom, item: Specification, weights: Mapping[str, Tensor] | None) -> nn.Module:
    trial = item.trial
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"{classroom.seed} {trial.trial_id}".encode()))
        if is_reduced(trial.variant):
            predictor: nn.Module = ReducedNetwork.of(
                classroom.module, trial.variant, _example(classroom), classroom.outputs_kind
            )
        else:
            predictor = build_predictor(trial.variant, item.hidden_shape, classroom.classes)
    if weights is not None:
        predictor.load_state_dict(weights)
    return predictor


def _example(classroom: Classroom) -> Tensor:
    return classroom.held_out.images(np.arange(2)).to(classroom.device)


def _folded(classroom: Classroom, predictor: nn.Module) -> nn.Module:
    if isinstance(predictor, ReducedNetwork):
        return predictor.companion(_example(classroom)).to(classroom.device)
    return fold_normalisation(predictor).requires_grad_(False)
