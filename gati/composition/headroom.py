"""The gain of a composition if one thing about it were perfect: this shows the next bottleneck.

Of every exit, and of all together. Thresholds, and all that is not named, stay as they were chosen:

* free: its lookup takes no time, neither of those who leave there nor of those who go on;
* knowing: its score tells whether its answer is the base model's, so that inputs leave where it is, and only
  there (the best that a selector could do for this predictor);
* right: its answer always is, so that all that reach it leave there (the best that a predictor could do).

If `free` gains most, the lookup is too expensive; if `knowing` does, improve the selector; if only `right`
does, improve the predictor. Knowing at every exit is the oracle of this composition.
"""

from __future__ import annotations

from dataclasses import dataclass

from gati.types import TrialId


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """What the whole composition would come to."""

    mean_latency_ms: float
    gain: float  # over the base model
    agreement: float  # over all requests


@dataclass(frozen=True)
class ExitHeadroom:
    """What the composition would come to if this one exit were free, knowing or right."""

    trial_id: TrialId
    block: str
    free: Prospect
    knowing: Prospect
    right: Prospect


@dataclass(frozen=True)
class Headroom:
    """What the composition would come to with a perfect exit, or with all of them perfect.

    `inputs` is how many inputs of the select split were replayed; 0 where the trials table estimated instead.
    `chosen` is the composition as it is, computed in the same way: on an engine of reduced precision it
    differs from what is expected, because the answers that the engine loses by itself are left out.
    """

    inputs: int
    chosen: Prospect
    exits: tuple[ExitHeadroom, ...]
    free: Prospect  # free lookups everywhere
    oracle: Prospect  # knowing everywhere, lookups paid for
    free_oracle: Prospect  # both

    def of(self, trial_id: TrialId) -> ExitHeadroom:
        """Return the headroom of the exit with that trial, which must be there."""
        return next(each for each in self.exits if each.trial_id == trial_id)
