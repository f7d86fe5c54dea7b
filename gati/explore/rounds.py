"""The two rounds of training, each resumable: screening in groups of blocks, then the main round."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from gati.caches import build_predictor, fold_normalisation, save_cache
from gati.errors import ModelError
from gati.explore.library import SELECT, Library, TrialOutcomes
from gati.explore.measure import Measured, held_out_probabilities, hit_rate_at, measure_cache
from gati.explore.prepare import Prepared, Specification
from gati.explore.progress import Progress
from gati.explore.schedule import Plan, select_for_main_round
from gati.explore.state import FinishedTrial, RunState
from gati.explore.train import LATENESS, Learner, SharedTraining
from gati.types import Trial, TrialId

__all__ = ["Clock", "Rounds"]

Clock = Callable[[], float]

_SAVE_EVERY_S = 60.0
_GROUP_PARAMETERS = 60_000_000  # weights, gradients and two moments of these take 1 GB
_GROUP_TRIALS = 40
_SCREENING_SHARE = 0.35  # of a time budget
_MEASURING_SHARE = 0.08
_SCREENING_TARGETS = (0.90, 0.95, 0.97)  # lower than what is composed for: short training reaches no more


class Rounds:
    """Trains and measures; every finished trial is on disk before the next group starts."""

    def __init__(
        self,
        prepared: Prepared,
        library: Library,
        state: RunState,
        plan: Plan,
        *,
        seed: int,
        progress: Progress,
        budget_s: float | None,
        clock: Clock = time.monotonic,
        began: float | None = None,
    ) -> None:
        self.prepared, self.library, self.state, self.plan = prepared, library, state, plan
        self.seed, self.progress, self.budget_s, self.clock = seed, progress, budget_s, clock
        self.began = clock() if began is None else began  # the budget counts from here

    # Screening ------------------------------------------------------------------------------------------

    def screen(self) -> None:
        """Train every variant that could pay for a short while and measure it."""
        finished = self.state.finished()
        todo = [
            item
            for item in self.prepared.specifications
            if item.trial.status == "trained" and item.trial.trial_id not in finished
        ]
        groups = _groups(todo)
        self.progress.stage("screening", self.plan.screening_steps * max(1, len(groups)))
        for number, group in enumerate(groups):
            training = self._training(group, self.plan.screening_steps)
            allowed = self._allowed_group_s(len(groups) - number) if self.budget_s else None
            self._train(training, allowed, f"{len(group)} of {len(todo)} variants")
            self._measure(training, group, "screening")

    # Main round -----------------------------------------------------------------------------------------

    def main(self) -> None:
        """Train the variants with most to win anew, for long."""
        finished = self.state.finished()
        chosen = self._chosen(finished)
        group = [item for item in self.prepared.specifications if item.trial.trial_id in chosen]
        if not group or all(finished[item.trial.trial_id].round == "main" for item in group):
            return
        training = self._training(group, self.plan.main_steps)
        if self.state.training_path.is_file():
            training.restore(self.state.training_path)
            self.progress.note(f"going on at step {training.step} of {training.total_steps}")
        self.progress.stage("training", self.plan.main_steps, training.step)
        allowed = self._allowed_s(1 - _MEASURING_SHARE) if self.budget_s else None
        self._train(training, allowed, f"{len(group)} variants", keep_state=True)
        self._measure(training, group, "main")

    def _chosen(self, finished: dict[TrialId, FinishedTrial]) -> set[TrialId]:
        """Decided on the screening round's outcomes, which a resumed run still finds unchanged."""
        stored = self.state.selection()
        if stored is None:
            screened = [row.trial for row in finished.values()]
            rates = {trial.trial_id: self._screening_rate(trial.trial_id) for trial in screened}
            stored = select_for_main_round(
                screened,
                rates,
                self._weight_layers(),
                len(self.prepared.profile.blocks),
                self.prepared.profile.base_ms,
                self.plan.main_blocks,
            )
            self.state.write_selection(stored)
        return set(stored)

    def _weight_layers(self) -> dict[str, int]:
        shapes = {item.trial.variant: item.hidden_shape for item in self.prepared.specifications}
        classes = self.prepared.held_out.classes
        return {
            variant: sum(
                isinstance(layer, nn.Conv2d | nn.Linear)
                for layer in build_predictor(variant, shape, classes).modules()
            )
            for variant, shape in shapes.items()
        }

    def _screening_rate(self, trial_id: TrialId) -> float:
        select = self.library.base_outcomes().split == SELECT
        outcomes = self.library.outcomes(trial_id)
        agrees = outcomes.predicted[select] == self.prepared.held_out.base_class[select]
        rates = [hit_rate_at(outcomes.score[select], agrees, target) for target in _SCREENING_TARGETS]
        return sum(rates) / len(rates)

    # Both -----------------------------------------------------------------------------------------------

    def _training(self, group: Sequence[Specification], steps: int) -> SharedTraining:
        learners = []
        for item in group:
            trial = item.trial
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(zlib.crc32(f"{self.seed} {trial.trial_id}".encode()))
                predictor = build_predictor(trial.variant, item.hidden_shape, self.prepared.held_out.classes)
            learners.append(Learner(trial.trial_id, trial.block, predictor))
        return SharedTraining(
            self.prepared.module,
            self.prepared.inputs.train,
            learners,
            total_steps=steps,
            batch_size=self.plan.batch_size,
            seed=self.seed,
            augmentation=self.prepared.augmentation,
            outputs_kind=self.prepared.held_out.outputs_kind,
            device=self.prepared.device,
        )

    def _train(
        self, training: SharedTraining, allowed_s: float | None, what: str, *, keep_state: bool = False
    ) -> None:
        began = saved = self.clock()
        planned_s = None if allowed_s is None else max(allowed_s, 1e-3) / (1.0 + LATENESS)
        share = None if planned_s is None else lambda: (self.clock() - began) / planned_s
        for loss in training.run(share):
            self.progress.advance(1, f"{what}, loss {loss:.3f}")
            if keep_state and self.clock() - saved >= _SAVE_EVERY_S:
                training.save(self.state.training_path)
                saved = self.clock()
        if keep_state:
            training.save(self.state.training_path)

    def _measure(self, training: SharedTraining, group: Sequence[Specification], name: str) -> None:
        folded = [
            learner._replace(predictor=fold_normalisation(learner.predictor).requires_grad_(False))
            for learner in training.learners
        ]
        held = self.prepared.inputs.held_out
        probabilities = held_out_probabilities(self.prepared.module, held, folded, self.prepared.device)
        before = self.state.finished()
        best = 0.0
        for item, learner in zip(group, folded, strict=True):
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
            best = max(best, measured.hit_rate_at_97)
            screened = before.get(learner.trial_id)
            if screened is not None and _worth(screened.trial) > _worth(measured):
                # A main round that ran out of time may end below the screening round: the better cache stays.
                self.state.write_finished(screened._replace(round=name))
            else:
                self._keep(item, measured, training, name)
        self.progress.note(
            f"{name}: {len(group)} caches measured on {len(held)} held-out inputs, "
            f"best hit rate {best:.0%} at 97 % agreement"
        )

    def _keep(self, item: Specification, measured: Measured, training: SharedTraining, name: str) -> None:
        trial_id = item.trial.trial_id
        save_cache(self.library.cache_path(trial_id), measured.cache)
        self.library.write_outcomes(trial_id, TrialOutcomes(*measured.outcomes))
        trial = replace(
            item.trial,
            selector=measured.cache.selector_name,
            memory_bytes=measured.cache.memory_bytes,
            images_seen=training.images_seen,
            loss=training.losses.get(trial_id),
            agreement=measured.agreement,
            hit_rate_at_97=measured.hit_rate_at_97,
            hit_rate_at_99=measured.hit_rate_at_99,
        )
        self.state.write_finished(FinishedTrial(name, trial, tuple(measured.points)))

    def _allowed_group_s(self, groups_left: int) -> float:
        """Seconds for the next screening group: twice an even share, as early blocks take longest."""
        left_s = self._allowed_s(_SCREENING_SHARE)
        return min(left_s, 2 * left_s / groups_left)

    def _allowed_s(self, share: float) -> float:
        """Seconds until `share` of the budget is used."""
        return max(0.0, share * (self.budget_s or 0.0) - (self.clock() - self.began))


def _worth(found: Trial | Measured) -> tuple[float, float]:
    """What two trainings of the same trial are compared by."""
    return (found.hit_rate_at_97 or 0.0) + (found.hit_rate_at_99 or 0.0), found.agreement or 0.0


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
