"""Train many predictors at once: one frozen forward pass per batch feeds them all.

Everything random in a step is drawn from (seed, step), so a run that stops after any step and starts again
from a saved state ends with the same weights as one that never stopped.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gati.caches import distillation_loss, feature_loss, runs_in_order
from gati.exploration.answers import BaseAnswers
from gati.exploration.augment import Augmentation
from gati.exploration.average import RunningAverage
from gati.exploration.failures import GAVE_NAN, noting_failure
from gati.exploration.fronts import Front, Fronts
from gati.exploration.graphs import EAGER_CALLS, ReplayedFunction, capture_training
from gati.exploration.lessons import BatchLesson, InputLessons, stand_ins_of
from gati.exploration.pace import Pace, Stopwatch
from gati.exploration.precision import gains_by_bfloat16, training_precision
from gati.exploration.recipes import EXITS, Emphasis, Recipe, make_optimiser
from gati.exploration.views import InputSource, ViewedBatch, Viewer, Views
from gati.files import atomic_write
from gati.model.entry import means_input
from gati.model.hooks import collect_hidden
from gati.types import OutputsKind, TrialId


class Learner(NamedTuple):
    """A predictor in training, and the block whose hidden output it reads."""

    trial_id: TrialId
    block: str
    predictor: nn.Module


class SharedTraining:
    """Trains `learners` for `total_steps` batches by `recipe`; the learning rate rises and falls once.

    The base model is not changed: it runs in inference mode, and its hidden outputs live for one batch. If
    all learners read the network's input, only the base model's answers are needed. The fastest engine
    available computes them (or the one that `engine` names), and they are kept for views that repeat. With
    `places`, only so many batches are shown per round.

    If `feature_block` is given, learners whose predictor ends with a linear layer also match the pooled
    hidden output of that block through a projection, which is discarded. `emphasis` weights the inputs.

    A learner that raises or gives NaN is left out from then on; `failures` says why. The others do not
    depend on it. Inputs that the base model answers with NaN teach nothing, and if it answers none of a whole
    round, all learners fail.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: InputSource,
        learners: Sequence[Learner],
        *,
        total_steps: int,
        batch_size: int,
        seed: int,
        augmentation: Augmentation,
        outputs_kind: OutputsKind,
        device: torch.device,
        recipe: Recipe = EXITS,
        emphasis: Emphasis | None = None,
        feature_block: str | None = None,
        engine: str | None = None,
        places: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.module, self.inputs, self.learners = module, inputs, tuple(learners)
        self.total_steps, self.batch_size, self.seed = total_steps, min(batch_size, len(inputs)), seed
        self.recipe, self.augmentation, self.emphasis, self.device = recipe, augmentation, emphasis, device
        self.step = 0
        self.share = 0.0  # of the training that was done before the latest step, see `run`
        self._steps_run = 0  # by this object; `step` also counts those before an interruption
        self.finished = False  # the learners have the averaged weights, if the recipe averages
        self.losses: dict[TrialId, float] = {}
        self.failures: dict[TrialId, str] = {}
        self.unanswered_batches = 0  # those with inputs that the base model gives no finite answer
        self._skipped = 0  # of these, those with no other inputs
        self._clock, self._stopwatch = clock, Stopwatch()
        self._base = BaseAnswers(module, outputs_kind, feature_block)
        views = Views(augmentation, recipe.mixed, recipe.rounds)
        self._viewer = Viewer(inputs, views, self.batch_size, seed, places)
        self._blocks = sorted({x.block for x in learners})
        at_the_input = all(means_input(module, block) for block in self._blocks)
        for learner in self.learners:
            learner.predictor.to(device).train()
            if means_input(module, learner.block):
                learner.predictor.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._fronts = Fronts({x.trial_id: (x.block, x.predictor) for x in learners})
        self._features = self._count_features()
        self._lessons = self._make_lessons(engine) if at_the_input else None
        self._gains = {x.trial_id: gains_by_bfloat16(x.predictor) for x in learners}
        self._projections = self._make_projections()
        self._forwards = {
            x.trial_id: _Forward(self._fronts.rests[x.trial_id], self._projections.get(x.trial_id))
            for x in learners
        }
        self._averages = {
            x.trial_id: RunningAverage(x.predictor, recipe.average_decay)
            for x in learners
            if recipe.average_decay
        }
        trained = [*(x.predictor for x in learners), *self._projections.values()]
        self._parameters = [p for part in trained for p in part.parameters()]
        self._optimiser = make_optimiser(recipe, self._parameters, device)

    @property
    def images_seen(self) -> int:
        """Number of inputs that each learner has seen so far."""
        return self.step * self.batch_size

    @property
    def pace(self) -> Pace:
        """Median seconds per step so far."""
        return self._stopwatch.pace

    @property
    def engine_name(self) -> str | None:
        """The engine that computes base answers, once it is known; None if hidden outputs are read."""
        return self._lessons.engine_name if self._lessons else None

    @property
    def steps_per_round(self) -> int:
        """Batches per round of views."""
        return self._viewer.places

    def run(self, share_done: Callable[[], float] | None = None) -> Iterator[float]:
        """Yield the mean loss of all learners after each batch, from the current step to the last.

        `share_done` returns the share of the training that is done; by default steps are counted. The
        learning rate follows it, and training ends at 1. Closing the iterator removes every hook. A training
        that has finished, even early, takes no step.
        """
        if self.finished:
            return
        with self._watched() as hidden:
            answer = ReplayedFunction(partial(self._answer, hidden))
            while self.step < self.total_steps and (self._trained or not self.failures):
                self.share = self.step / self.total_steps if share_done is None else share_done()
                without_answers = self._skipped == self.step == self.steps_per_round
                if self.share >= 1 or without_answers:
                    break
                yield self._advance(answer)
        self._finish()

    def _watched(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        return nullcontext({}) if self._lessons else collect_hidden(self.module, self._blocks)

    def _advance(self, answer: ReplayedFunction) -> float:
        began_s = self._clock()
        batch = self._viewer.batch(self.step)
        lesson = self._lessons(batch) if self._lessons else self._hidden_lesson(batch, answer)
        if lesson.stand_ins is not None:
            self.unanswered_batches += 1
            if not len(lesson.stand_ins):
                return self._skip(began_s)
            lesson = lesson.answered()
        if self._steps_run == EAGER_CALLS:
            for learner in self._trained:
                capture_training(self._forwards[learner.trial_id], lesson.read[learner.trial_id])
        for group in self._optimiser.param_groups:
            group["lr"] = self._learning_rate_at(self.share)
        self._optimiser.zero_grad(set_to_none=self.device.type == "cuda")  # see `capture_training`
        losses: dict[TrialId, Tensor] = {}
        for learner in self._trained:
            with noting_failure(self.failures, learner.trial_id):
                loss, compared = self._loss(learner, lesson)
                loss.backward()
                losses[learner.trial_id] = compared
            if self.recipe.longest_gradient is not None:
                nn.utils.clip_grad_norm_(learner.predictor.parameters(), self.recipe.longest_gradient)
        self._optimiser.step()
        for learner in self.learners:
            if learner.trial_id in self._averages:
                self._averages[learner.trial_id].update(learner.predictor, self.step)
        values: list[float] = torch.stack(list(losses.values())).tolist() if losses else []
        for trial_id, value in zip(losses, values, strict=True):
            self._note_loss(trial_id, value)
        finite = list(filter(math.isfinite, values))
        self._steps_run += 1
        self._end_step(began_s)
        return sum(finite) / max(1, len(finite))

    def _skip(self, began_s: float) -> float:
        """End a step whose inputs have no answers."""
        self._skipped += 1
        self._end_step(began_s)
        return sum(self.losses.values()) / max(1, len(self.losses))

    def _end_step(self, began_s: float) -> None:
        self.step += 1
        self._stopwatch.note(self._clock() - began_s, self._lessons.fresh_s if self._lessons else 0.0)

    @property
    def _trained(self) -> list[Learner]:
        """The learners that have not failed."""
        return [each for each in self.learners if each.trial_id not in self.failures]

    def _hidden_lesson(self, batch: ViewedBatch, answer: ReplayedFunction) -> BatchLesson:
        """The base model's hidden outputs and answers for a view."""
        shown = self._viewer.show(batch, self.device)
        looked, rows, weights = answer(shown.images)
        stand_ins = stand_ins_of(rows[:, : rows.shape[1] - self._features])
        return BatchLesson(self._fronts.read(looked), rows, weights, shown.mixed, stand_ins)

    def _answer(
        self, hidden: Mapping[str, Tensor], images: Tensor
    ) -> tuple[dict[Front, Tensor], Tensor, Tensor | None]:
        """What learners read, the base model's answers, and weights; its forward pass fills `hidden`."""
        with training_precision(self.device), torch.no_grad():
            rows = self._base(images).float()
            weights = None if self.emphasis is None else self.emphasis(images)
        return self._fronts.look(hidden), rows, weights

    def _loss(self, learner: Learner, lesson: BatchLesson) -> tuple[Tensor, Tensor]:
        """The loss of a learner with its gradient, and the part of it that compares answers, without."""
        with training_precision(self.device, self._gains[learner.trial_id]):
            logits, *features = self._forwards[learner.trial_id](lesson.read[learner.trial_id])
        found = features[0] if features else None
        classes = logits.shape[1]
        loss = distillation_loss(
            logits.float(),
            lesson.rows[:, :classes],
            temperature=self.recipe.temperature,
            soft_weight=1.0 if lesson.mixed else self.recipe.soft_weight,
            row_weights=lesson.row_weights,
        )
        compared = loss.detach()
        if found is not None:
            wanted = lesson.rows[:, classes:]
            finite = torch.isfinite(wanted).all(1, keepdim=True)
            wanted = torch.where(finite, wanted, 0.0)  # which has no gradient
            matched = feature_loss(found.float(), wanted, row_weights=lesson.row_weights)
            loss = loss + self.recipe.feature_weight * matched
        return loss, compared

    def _make_lessons(self, engine: str | None) -> InputLessons:
        return InputLessons(
            self._viewer,
            self._base,
            self._fronts,
            self.emphasis,
            self.device,
            features=self._features,
            rounds=self.recipe.rounds,
            engine=engine,
            clock=self._clock,
        )

    def _count_features(self) -> int:
        """How many pooled hidden outputs follow the logits of each answer."""
        if self._base.feature_block is None:
            return 0
        example = self.inputs.images(np.arange(1)).to(self.device)
        with torch.no_grad():
            return int(self._base(example).shape[1] - self.module(example).shape[1])

    def _make_projections(self) -> dict[TrialId, nn.Linear]:
        """Projections from learners' features to the base model's, if a learner ends with a linear layer."""
        if not self._features:
            return {}
        found = {}
        for learner in self.learners:
            last = learner.predictor[-1] if runs_in_order(learner.predictor) else None
            if isinstance(last, nn.Linear):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(zlib.crc32(f"{self.seed} {learner.trial_id}".encode()))
                    found[learner.trial_id] = nn.Linear(last.in_features, self._features).to(self.device)
        return found

    def _finish(self) -> None:
        if self.finished:
            return
        if self.step and self._skipped == self.step:  # no step had inputs with answers
            self.failures.update({x.trial_id: GAVE_NAN for x in self._trained})
        for learner in self.learners:
            if learner.trial_id in self._averages:
                self._averages[learner.trial_id].copy_to(learner.predictor)
        self.finished = True

    def _learning_rate_at(self, share: float) -> float:
        rise = self.recipe.warm_up
        if share < rise:
            return self.recipe.learning_rate * max(0.04, share / rise)
        falling = (share - rise) / (1 - rise)
        return self.recipe.learning_rate * max(0.005, 0.5 * (1 + math.cos(math.pi * falling)))

    def _note_loss(self, trial_id: TrialId, value: float) -> None:
        if not math.isfinite(value):  # its weights will stay so
            self.failures[trial_id] = GAVE_NAN
            return
        before = self.losses.get(trial_id)
        self.losses[trial_id] = value if before is None else 0.95 * before + 0.05 * value

    # State: plain tensors, so that nothing is ever unpickled --------------------------------------------

    def save(self, path: Path) -> None:
        """Write weights, their averages, the optimiser's state and the step number, atomically."""
        tensors = dict(self._tensors())
        tensors["step"] = torch.tensor(self.step)
        tensors["share"] = torch.tensor(self.share, dtype=torch.float64)
        tensors["finished"] = torch.tensor(self.finished)
        losses = [self.losses.get(x.trial_id, 0.0) for x in self.learners]
        tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
        tensors["engine"] = _bytes(self.engine_name or "")
        tensors["failures"] = _bytes(json.dumps(self.failures))
        tensors["unanswered"] = torch.tensor([self.unanswered_batches, self._skipped])
        atomic_write(path, lambda temporary: save_file(tensors, temporary))

    def restore(self, path: Path) -> bool:
        """Resume from what `save` wrote; False, and nothing changes, if the learners' tensors are others."""
        saved = load_file(path)
        known = [name for name in saved if "." in name and not name.startswith("optimiser.")]
        if {name: tensor.shape for name, tensor in self._state()} != {x: saved[x].shape for x in known}:
            return False
        with torch.no_grad():
            for index, parameter in enumerate(self._parameters):
                prefix = f"optimiser.{index}."
                for name in (key for key in saved if key.startswith(prefix)):
                    value = saved[name].clone()
                    if value.shape == parameter.shape:  # fused optimisers need the same memory layout
                        value = torch.empty_like(parameter).copy_(value)
                    self._optimiser.state[parameter][name.removeprefix(prefix)] = value
            for name, tensor in self._state():
                tensor.copy_(saved[name])
        self.step, self.finished = int(saved["step"]), bool(saved["finished"])
        self.share = float(saved["share"]) if "share" in saved else self.step / self.total_steps
        if self._lessons:
            self._lessons.engine_name = _text(saved["engine"]) or self.engine_name
        self.failures = json.loads(_text(saved["failures"])) if "failures" in saved else {}
        if "unanswered" in saved:
            self.unanswered_batches, self._skipped = saved["unanswered"].tolist()
        if self.step:
            values = saved["losses"].tolist()
            self.losses = {x.trial_id: value for x, value in zip(self.learners, values, strict=True)}
        return True

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """All trained tensors and their averages, by name."""
        for learner in self.learners:
            for name, tensor in learner.predictor.state_dict().items():
                yield f"{learner.trial_id}.{name}", tensor
        for trial_id, projection in self._projections.items():
            for name, tensor in projection.state_dict().items():
                yield f"projection.{trial_id}.{name}", tensor
        for trial_id, average in self._averages.items():
            for name, tensor in average.tensors.items():
                yield f"average.{trial_id}.{name}", tensor

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._state():  # cloned, because layers may share tensors
            yield name, tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for index, parameter in enumerate(self._parameters):
            for name, value in self._optimiser.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"optimiser.{index}.{name}", value.detach().cpu().contiguous()


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _text(content: Tensor) -> str:
    return bytes(content.tolist()).decode()


class _Forward(nn.Module):
    """What a learner computes for its loss: logits and, if it has a projection, projected features."""

    def __init__(self, predictor: nn.Module, projection: nn.Module | None) -> None:
        super().__init__()
        self.predictor, self.projection = predictor, projection

    def forward(self, read: Tensor) -> tuple[Tensor, ...]:
        """Logits [B, K] and, if projected, features [B, D]."""
        if self.projection is None or not runs_in_order(self.predictor):
            return (self.predictor(read),)
        features = self.predictor[:-1](read)
        return self.predictor[-1](features), self.projection(features)
