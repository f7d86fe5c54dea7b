"""Random choice of the requests to audit or sample, made before their answers are known.

Every request is audited with the same probability, so audits are an unbiased sample of requests, and clients
cannot know which requests are audited. Three independent random streams draw audits, samples and trials. Live
streams use the operating system's entropy; a replay passes a seed.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from gati.errors import AdaptError


class Drawn(NamedTuple):
    """The draws for a request.

    `audit`: its answer is compared with the reference. `sample`: its input is kept to train on. `trial`: it
    may be looked up by caches that do not answer, where no early answer is given.
    """

    audit: bool
    sample: bool
    trial: bool
    chance: float = 1.0  # from 0 to 1: anything else is drawn if this is below its share


NOTHING = Drawn(audit=False, sample=False, trial=False)


class Draws:
    """Draws audits at a constant rate: a share `audits` of requests for their own sake.

    `samples` is the share of requests sampled; each sample is also an audit, as its reference answer is
    computed anyway. `trials` is the share looked up by caches that do not answer. `seed` None takes the
    operating system's entropy. Raises AdaptError for shares outside 0 to 1.
    """

    def __init__(
        self, audits: float, samples: float = 0.0, trials: float = 0.0, *, seed: int | None = None
    ) -> None:
        for name, share in (("audit budget", audits), ("sampling", samples), ("trials", trials)):
            if not 0.0 <= share <= 1.0:
                raise AdaptError(f"the {name} is {share!r}, must be from 0 to 1, for example 0.05")
        self._audits, self._samples, self._trials = audits, samples, trials
        self._chances: tuple[random.Random, ...] = tuple(
            random.SystemRandom() if seed is None else random.Random(f"{seed} {what}")
            for what in ("audits", "samples", "trials")
        )

    def draw(self, more_samples: float = 0.0) -> Drawn:
        """Decide about the next request; with `more_samples` above `samples`, that share is sampled.

        What is sampled beyond `samples` is not audited, so that the rate of audits stays constant.
        """
        audit, sample, trial = (chance.random() for chance in self._chances)
        audited = audit < self._audits or sample < self._samples
        return Drawn(
            audit=audited,
            sample=sample < max(self._samples, more_samples),
            trial=audited or trial < self._trials,
            chance=trial,
        )
