"""Whether training taught caches more than the network's most frequent answer."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gati.exploration.library import SELECT
from gati.types import Trial
from gati.units import percent

_STANDARD_ERRORS = 3.0  # what knows nothing agrees on more than this only once in a thousand trials
_COARSE = 0.1  # with a larger one, too few inputs tell anything
_USEFUL = 0.05  # hit rate at 97 % agreement: where one class is that frequent, its name is an answer


class Usual(NamedTuple):
    """The network's most frequent answer on the select split."""

    share: float  # of the inputs
    inputs: int

    def is_all(self, trial: Trial) -> bool:
        """Whether a trained cache has learned nothing: it agrees not clearly more often than this answer.

        False if there are too few inputs to tell.
        """
        if trial.status != "trained" or not trial.images_seen or trial.agreement is None:
            return False
        chance = _STANDARD_ERRORS * sqrt(self.share * (1 - self.share) / self.inputs)
        useful = (trial.hit_rate_at_97 or 0.0) >= _USEFUL
        return chance <= _COARSE and not useful and trial.agreement <= self.share + chance


def usual_answer(base_class: npt.NDArray[np.int64], split: npt.NDArray[np.uint8]) -> Usual:
    """Find it among the held-out inputs of the select split, from their classes [n] and `split` [n]."""
    select = base_class[split == SELECT]
    return Usual(float(np.bincount(select).max() / len(select)), len(select))


def told_if_nothing(trials: Iterable[Trial], usual: Usual, train_inputs: int) -> str:
    """What to tell the user if training taught no cache anything, and otherwise an empty string."""
    trained = [trial for trial in trials if trial.status == "trained" and trial.images_seen]
    if not trained or not all(map(usual.is_all, trained)):
        return ""
    passes = max(trial.images_seen for trial in trained) / train_inputs
    return (
        f"training taught the caches nothing: after {passes:.3g} passes over the training inputs none agrees "
        "with the network clearly more often than its most frequent answer does "
        f"({percent(usual.share, 0)}). If these passes are few, give it more time; otherwise check that "
        "--train-data is like --data, and if it is, report this as a defect"
    )
