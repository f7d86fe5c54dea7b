"""The certificate: agreement with the base model of at least A, stated with confidence 1 - delta.

Settings are ordered from the strictest to the loosest before the certify split is looked at. From the
strictest on, a setting with k disagreements among n inputs passes if P(Bin(n, 1 - A) <= k) <= delta; the walk
stops at the first that does not, and the last that passed is deployed (fixed-sequence testing; Angelopoulos,
Bates, Candes, Jordan, Lei: Learn then Test, 2021). To deploy a setting whose true agreement is below A, the
walk must have passed the first such setting of the sequence, which has probability at most delta. So no
correction for the number of settings is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import beta, binom

from gati.errors import CompositionError

__all__ = ["Certificate", "Tested", "agreement_lower_bound", "certify", "p_value", "required_inputs"]


@dataclass(frozen=True)
class Tested:
    """One setting that the walk came to."""

    losses: int  # inputs that left early with another class than the base model's
    inputs: int
    p_value: float
    passed: bool


@dataclass(frozen=True)
class Certificate:
    """What the walk found. `deployed` is the position of the last setting that passed, None if none did."""

    accuracy: float
    delta: float
    deployed: int | None
    tested: tuple[Tested, ...]  # strictest first, up to the first that did not pass
    settings: int  # how many there were to walk through

    @property
    def inputs(self) -> int:
        """How many certify inputs were counted."""
        return self.tested[0].inputs if self.tested else 0

    @property
    def losses(self) -> int:
        """Disagreements of the deployed setting; of the strictest where none is deployed."""
        return self.tested[self.deployed or 0].losses if self.tested else 0

    def sentence(self) -> str:
        """Return the certificate as one plain sentence."""
        confidence = f"{100.0 * (1.0 - self.delta):g} %"
        target = f"{100.0 * self.accuracy:g} %"
        if self.deployed is not None:
            return (
                f"With {confidence} confidence at least {target} of answers are the base model's: "
                f"{self.losses} of {self.inputs} inputs not used for choosing were answered differently."
            )
        needed = required_inputs(self.accuracy, self.delta)
        if self.inputs < needed:
            return (
                f"Agreement of {target} cannot be certified with {confidence} confidence "
                f"on {self.inputs} inputs: it takes at least {needed} even without any disagreement."
            )
        return (
            f"Agreement of {target} is not certified with {confidence} confidence: already the strictest "
            f"setting answered {self.losses} of {self.inputs} inputs differently."
        )

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as strict JSON values."""
        return {
            "accuracy": self.accuracy,
            "confidence": 1.0 - self.delta,
            "delta": self.delta,
            "alpha": 1.0 - self.accuracy,  # the tolerated rate of disagreement
            "certified": self.deployed is not None,
            "deployed": self.deployed,
            "n": self.inputs,
            "losses": self.losses,
            "agreement_lower_bound": agreement_lower_bound(self.losses, self.inputs, self.delta),
            "required_inputs": required_inputs(self.accuracy, self.delta),
            "settings": self.settings,
            "path": [
                {"losses": test.losses, "n": test.inputs, "p_value": test.p_value, "passed": test.passed}
                for test in self.tested
            ],
            "sentence": self.sentence(),
        }


def certify(path: Sequence[tuple[int, int]], accuracy: float, delta: float) -> Certificate:
    """Walk through `path`, (losses, inputs) of each setting, strictest first, fixed before counting.

    Raises CompositionError for a target or delta outside (0, 1), or counts that cannot be.
    """
    _check_levels(accuracy, delta)
    tested: list[Tested] = []
    deployed: int | None = None
    for position, (losses, inputs) in enumerate(path):
        if not 0 <= losses <= inputs:
            raise CompositionError(f"{losses} losses among {inputs} inputs: there cannot be; count again")
        probability = p_value(losses, inputs, accuracy)
        passed = probability <= delta
        tested.append(Tested(losses, inputs, probability, passed))
        if not passed:
            break
        deployed = position
    return Certificate(accuracy, delta, deployed, tuple(tested), len(path))


def p_value(losses: int, inputs: int, accuracy: float) -> float:
    """Return P(Bin(inputs, 1 - accuracy) <= losses): how likely so few losses are below the target."""
    return float(binom.cdf(losses, inputs, 1.0 - accuracy))


def required_inputs(accuracy: float, delta: float, losses: int = 0) -> int:
    """Return the fewest inputs with which `losses` disagreements certify `accuracy`; 299 for 0.99 and 0.05.

    Raises CompositionError for a target or delta outside (0, 1).
    """
    _check_levels(accuracy, delta)
    low, high = losses, max(losses + 1, math.ceil(math.log(delta) / math.log(accuracy)))
    while p_value(losses, high, accuracy) > delta:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if p_value(losses, middle, accuracy) <= delta else (middle, high)
    return high


def agreement_lower_bound(losses: int, inputs: int, delta: float) -> float:
    """Return the exact one-sided lower confidence limit (Clopper, Pearson) of agreement; 0 without inputs."""
    if losses >= inputs:
        return 0.0
    return float(beta.ppf(delta, inputs - losses, losses + 1))


def _check_levels(accuracy: float, delta: float) -> None:
    for name, value in (("accuracy target", accuracy), ("delta", delta)):
        if not 0.0 < value < 1.0:
            raise CompositionError(f"{name} is {value!r}, must lie strictly between 0 and 1")
