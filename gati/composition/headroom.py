"""The gain of a composition if one part of it were perfect, which shows the next bottleneck.

It is computed for every exit, and for all together. Everything else, such as thresholds, stays unchanged:

* free: the lookup takes no time, neither for hits nor for misses;
* knowing: the selector is perfect, so that an input leaves if and only if the cache's answer is the base
  model's (the best that a selector could do for this predictor);
* right: every answer is the base model's, so that all inputs that reach the exit leave there (the best that a
  predictor could do).

If `free` gains most, the lookup is too expensive; if `knowing` does, improve the selector; if only `right`
does, improve the predictor. `knowing` at every exit is the oracle of this composition.
"""

from __future__ import annotations

from dataclasses import dataclass

from gati.types import TrialId


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """The figures of the whole composition under an assumption."""

    mean_latency_ms: float
    gain: float  # over the base model
    agreement: float  # over all requests


@dataclass(frozen=True)
class ExitHeadroom:
    """The figures of the composition if this exit were free, knowing or right."""

    trial_id: TrialId
    block: str
    free: Prospect
    knowing: Prospect
    right: Prospect


@dataclass(frozen=True)
class Headroom:
    """The figures of the composition with one perfect exit, or with all of them perfect.

    `inputs` is the number of replayed inputs of the select split; 0 if estimated from the trials table.
    `chosen` is the actual composition, computed in the same way: on an engine of reduced precision it differs
    from the expected figures, because the answers that the engine changes by itself are left out.
    """

    inputs: int
    chosen: Prospect
    exits: tuple[ExitHeadroom, ...]
    free: Prospect  # free lookups everywhere
    oracle: Prospect  # knowing everywhere, lookups paid for
    free_oracle: Prospect  # both
