"""The held-out outcomes of a cache library, cut to one split and ready to be replayed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gati.compose.problem import Candidate, Problem
from gati.compose.replay import Replay, ReplayExit, replay
from gati.explore.library import Library, TrialOutcomes
from gati.types import TrialId

__all__ = ["SplitOutcomes"]


class SplitOutcomes:
    """What the base model and each trial answered on the inputs of one split; trials are read when asked."""

    def __init__(self, library: Library, split: int) -> None:
        base = library.base_outcomes()
        self.library = library
        self.inputs: NDArray[np.int64] = np.flatnonzero(base.split == split)
        self.base_class = base.base_class[self.inputs]
        self.label = None if base.label is None else base.label[self.inputs]
        self._trials: dict[TrialId, TrialOutcomes] = {}

    def __len__(self) -> int:
        return len(self.inputs)

    def trial(self, trial_id: TrialId) -> TrialOutcomes:
        """Return score and predicted class of one trial on the inputs of this split, [n] each.

        Raises LibraryError when the library has no outcomes of it.
        """
        if trial_id not in self._trials:
            whole = self.library.outcomes(trial_id)
            self._trials[trial_id] = TrialOutcomes(whole.score[self.inputs], whole.predicted[self.inputs])
        return self._trials[trial_id]

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
                    problem.reach_ms[candidate.block_index],
                    candidate.lookup_ms,
                    candidate.penalty_ms,
                )
            )
        return replay(exits, self.base_class, problem.base_ms)
