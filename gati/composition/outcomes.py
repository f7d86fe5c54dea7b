"""The held-out outcomes of a cache library for one split, ready for replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gati.composition.costs import CostedLibrary
from gati.composition.problem import Candidate, Problem
from gati.composition.replay import ExitCost, Replay, ReplayExit, replay, summarise
from gati.exploration.library import Library, TrialOutcomes
from gati.types import TrialId

if TYPE_CHECKING:
    from gati.composition.engines import EngineAnswers


class SplitOutcomes:
    """Answers of the base model and each trial on the inputs of one split; trials are read on first use."""

    def __init__(self, library: Library, split: int) -> None:
        base = library.base_outcomes()
        self.library = library
        self.inputs: NDArray[np.int64] = np.flatnonzero(base.split == split)
        self.base_class = base.base_class[self.inputs]
        self.label = None if base.label is None else base.label[self.inputs]
        self.copies = library.copies().of(self.inputs)  # see `gati.composition.copies`
        self._trials: dict[TrialId, TrialOutcomes] = {}

    @property
    def coarse(self) -> bool:
        """Whether an input may get another class than the base model's even if it misses every cache."""
        return False

    @property
    def lost_without_exits(self) -> int:
        """The number of inputs that get another class than the base model's without any exit."""
        return int(self._lost_alone.sum())

    @property
    def _lost_alone(self) -> NDArray[np.bool_]:
        """Whether each input [n] gets another class than the base model's without any exit."""
        return np.zeros(len(self), dtype=bool)

    def costs_agreement(self, predicted: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each input loses the base model's class if its answer is `predicted` [n]."""
        lost: NDArray[np.bool_] = (predicted != self.base_class) & ~self._lost_alone
        return lost

    def announce(self, path: Sequence[Sequence[Candidate]]) -> None:
        """Tell which settings may be replayed, so that work for them can be shared."""

    def expect(self, path: Sequence[Sequence[Candidate]]) -> None:
        """Prepare to replay these settings, all at once if that is cheaper."""

    def __len__(self) -> int:
        return len(self.inputs)

    def trial(self, trial_id: TrialId) -> TrialOutcomes:
        """Return score and predicted class of one trial on the inputs of this split, [n] each.

        Raises LibraryError if the library has no outcomes for it.
        """
        if trial_id not in self._trials:
            whole = self.library.outcomes(trial_id)
            self._trials[trial_id] = TrialOutcomes(whole.score[self.inputs], whole.predicted[self.inputs])
        return self._trials[trial_id]

    def tabled(self) -> SplitOutcomes:
        """Return the outcomes from the tables, on which replay is fast."""
        return self

    def replay(self, problem: Problem, chosen: Sequence[Candidate]) -> Replay:
        """Send every input of the split through `chosen` (forward order)."""
        exits = []
        for candidate in chosen:
            outcomes = self.trial(candidate.trial_id)
            exits.append(
                ReplayExit(
                    outcomes.score,
                    outcomes.predicted,
                    candidate.threshold,
                    cost_of(problem, candidate),
                )
            )
        return replay(exits, self.base_class, problem.base_ms)


class EngineOutcomes(SplitOutcomes):
    """Outcomes of an engine of reduced precision, which uses the engine's own answers to replay settings.

    The engine is also asked for lookups that read the network's input, and for companions, once for all
    thresholds: what a copy of the network loses shows only there. Other trials are read from the tables,
    which is accurate enough for choosing. Certificates and expectations never use the tables.
    """

    def __init__(self, library: Library, split: int, answers: EngineAnswers) -> None:
        from gati.caches import is_companion
        from gati.model.entry import INPUT_KIND

        super().__init__(library, split)
        self._split = split
        self.answers = answers
        first = {block.index for block in library.manifest.blocks if block.kind == INPUT_KIND}
        self._asked_for = {
            each.trial_id
            for each in library.trials
            if each.block_index in first or is_companion(each.variant)
        }

    def trial(self, trial_id: TrialId) -> TrialOutcomes:
        """As `SplitOutcomes.trial`."""
        if trial_id in self._asked_for and trial_id not in self._trials:
            self._trials[trial_id] = self.answers.lookups(trial_id, self.inputs)
        return super().trial(trial_id)

    def tabled(self) -> SplitOutcomes:
        """As `SplitOutcomes.tabled`."""
        return SplitOutcomes(self.library, self._split)

    @property
    def coarse(self) -> bool:
        """As `SplitOutcomes.coarse`."""
        return True

    @property
    def _lost_alone(self) -> NDArray[np.bool_]:
        lost: NDArray[np.bool_] = self.answers(())[1][self.inputs] != self.base_class
        return lost

    def announce(self, path: Sequence[Sequence[Candidate]]) -> None:
        """As `SplitOutcomes.announce`."""
        self.answers.announce(path)

    def expect(self, path: Sequence[Sequence[Candidate]]) -> None:
        """As `SplitOutcomes.expect`."""
        self.answers.ask(path)

    def replay(self, problem: Problem, chosen: Sequence[Candidate]) -> Replay:
        """Send every input of the split through the engine with the exits `chosen` (forward order)."""
        left_at, answer = self.answers(chosen)
        return summarise(
            [cost_of(problem, candidate) for candidate in chosen],
            left_at[self.inputs],
            answer[self.inputs],
            self.base_class,
            problem.base_ms,
        )


def outcomes_of(library: Library, split: int) -> SplitOutcomes:
    """Return the outcomes of one split on the backend of the library's latencies."""
    answers = library.answers if isinstance(library, CostedLibrary) else None
    if answers is None:
        return SplitOutcomes(library, split)
    return EngineOutcomes(library, split, answers.of_split(split))


def cost_of(problem: Problem, candidate: Candidate) -> ExitCost:
    """Return the costs of an exit at this candidate."""
    return ExitCost(problem.reach_ms[candidate.block_index], candidate.lookup_ms, candidate.penalty_ms)
