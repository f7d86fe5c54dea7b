"""The certificate: agreement with the base model of at least A, stated with confidence 1 - delta.

Settings are ordered from the strictest to the loosest before the certify split is looked at. From the
strictest on, a setting with k disagreements among n inputs passes if P(Bin(n, 1 - A) <= k) <= delta; the walk
stops at the first that does not, and the last that passed is deployed (fixed-sequence testing; Angelopoulos,
Bates, Candes, Jordan, Lei: Learn then Test, 2021). To deploy a setting whose true agreement is below A, the
walk must have passed the first such setting of the sequence, which has probability at most delta. So no
correction for the number of settings is needed.

Class by class the same walk is taken, and a setting passes if each class passes on its own inputs (classes as
the base model answers). That "some class is below A" is rejected only if the test of every class rejects, the
bad one's among them, which happens with probability at most delta: an intersection-union test (Berger 1982).
So the number of classes needs no correction either; what it needs is enough inputs of every class.

All of this assumes that the inputs were drawn independently of each other from what will be served. Frames of
one video, or crops of one picture, were not: a hundred of them may prove no more than one. Exact copies are
found and counted with care (`gati.composition.copies`); near ones cannot be.

A command that walks several paths on the same inputs, one an engine, takes each at a `level` of its own; the
levels add up to at most delta, and are fixed before these inputs are looked at (`gati.composition.sharing`).

What a walk through several settings proves is the target and no more: the exact lower limit (Clopper,
Pearson) of the setting it ends at would not hold, as the walk ended there because of these counts. Where one
setting was fixed beforehand it holds; of several classes the least of their limits, by the argument above.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaincinv  # scipy.stats takes a second to import

from gati.errors import CompositionError

__all__ = [
    "Certificate",
    "Counts",
    "Tested",
    "agreement_lower_bound",
    "certify",
    "certify_every_class",
    "check_levels",
    "count_by_class",
    "p_value",
    "rate_upper_bound",
    "required_inputs",
]

Counts = tuple[int, int]  # (losses, inputs)


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
    by_class: tuple[Counts, ...] = ()  # where each class was tested: of the setting that `losses` is of
    class_names: tuple[str, ...] = ()
    share: float = 1.0  # of delta: this walk's, where a command or several attempts make more than one

    @property
    def level(self) -> float:
        """The probability with which this walk alone errs at most."""
        return self.share * self.delta

    @property
    def proven_agreement(self) -> float | None:
        """The agreement that the counts prove; None where they prove none, see above."""
        if self.settings == 1 and self.tested:
            parts = self.by_class or ((self.losses, self.inputs),)
            return min(agreement_lower_bound(losses, inputs, self.level) for losses, inputs in parts)
        return None if self.deployed is None else self.accuracy

    @property
    def inputs(self) -> int:
        """How many certify inputs were counted for the setting that `losses` is of."""
        return self.tested[self.deployed or 0].inputs if self.tested else 0

    @property
    def losses(self) -> int:
        """Disagreements of the deployed setting; of the strictest where none is deployed."""
        return self.tested[self.deployed or 0].losses if self.tested else 0

    def sentence(self) -> str:
        """Return the certificate as one plain sentence."""
        confidence = f"{100.0 * (1.0 - self.delta):g} %"
        target = f"{100.0 * self.accuracy:g} %"
        if self.by_class:
            return self._sentence_by_class(target, confidence)
        if self.deployed is not None:
            return (
                f"With {confidence} confidence at least {target} of answers are the base model's: "
                f"{self.losses} of {self.inputs} inputs not used for choosing were answered differently."
            )
        needed = required_inputs(self.accuracy, self.level)
        if self.inputs < needed:
            return (
                f"Agreement of {target} cannot be certified with {confidence} confidence "
                f"on {self.inputs} inputs: it takes at least {needed} even without any disagreement."
            )
        if self.settings == 1:
            bound = agreement_lower_bound(self.losses, self.inputs, self.level)
            return (
                f"Agreement of {target} is not certified with {confidence} confidence: {self.losses} of "
                f"{self.inputs} inputs were answered differently, which certifies {100.0 * bound:.2f} %."
            )
        return (
            f"Agreement of {target} is not certified with {confidence} confidence: already the strictest "
            f"setting answered {self.losses} of {self.inputs} inputs differently."
        )

    def _sentence_by_class(self, target: str, confidence: str) -> str:
        worst = max(range(len(self.by_class)), key=lambda at: p_value(*self.by_class[at], self.accuracy))
        losses, inputs = self.by_class[worst]
        name = f"class '{self._class_name(worst)}'"
        if self.deployed is not None:
            return (
                f"With {confidence} confidence at least {target} of answers are the base model's in each of "
                f"{len(self.by_class)} classes: {self.losses} of {self.inputs} inputs not used for choosing "
                f"were answered differently, of {name} {losses} of {inputs}."
            )
        needed = required_inputs(self.accuracy, self.level)
        if inputs < needed:
            return (
                f"Agreement of {target} cannot be certified with {confidence} confidence in every class: "
                f"{name} has {inputs} inputs, it takes at least {needed} even without any disagreement."
            )
        return (
            f"Agreement of {target} is not certified with {confidence} confidence in every class: already "
            f"the strictest setting answered {losses} of {inputs} inputs of {name} differently."
        )

    def _class_name(self, index: int) -> str:
        return self.class_names[index] if self.class_names else str(index)

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as strict JSON values."""
        return {
            "accuracy": self.accuracy,
            "confidence": 1.0 - self.delta,
            "delta": self.delta,
            "level": self.level,  # what p-values were compared with
            "alpha": 1.0 - self.accuracy,  # the tolerated rate of disagreement
            "certified": self.deployed is not None,
            "deployed": self.deployed,
            "n": self.inputs,
            "losses": self.losses,
            "agreement_lower_bound": self.proven_agreement,
            "required_inputs": required_inputs(self.accuracy, self.level),
            "settings": self.settings,
            "path": [
                {"losses": test.losses, "n": test.inputs, "p_value": test.p_value, "passed": test.passed}
                for test in self.tested
            ],
            "by_class": [
                {"class": self._class_name(at), "losses": losses, "n": inputs}
                for at, (losses, inputs) in enumerate(self.by_class)
            ]
            or None,
            "sentence": self.sentence(),
        }


def certify(
    path: Iterable[Counts], accuracy: float, delta: float, *, share: float = 1.0, settings: int | None = None
) -> Certificate:
    """Walk through `path`, (losses, inputs) of each setting, strictest first, fixed before counting.

    It is counted no further than the walk goes; `settings` is how many there are, if `path` does not tell.
    `share` of `delta` is what this walk may err with. Raises CompositionError for a target, delta or share
    outside (0, 1), or counts that cannot be.
    """
    return _walk(([counts] for counts in path), accuracy, delta, share, _length(path, settings))[0]


def certify_every_class(
    path: Iterable[Sequence[Counts]],
    accuracy: float,
    delta: float,
    class_names: Sequence[str] = (),
    *,
    share: float = 1.0,
    settings: int | None = None,
) -> Certificate:
    """Walk through `path`, (losses, inputs) of each class of each setting; each class must reach `accuracy`.

    As `certify` otherwise.
    """
    certificate, counted = _walk(path, accuracy, delta, share, _length(path, settings))
    by_class = tuple(counted[certificate.deployed or 0]) if counted else ()
    return replace(certificate, by_class=by_class, class_names=tuple(class_names))


def _length(path: Iterable[object], settings: int | None) -> int:
    if settings is not None:
        return settings
    if not isinstance(path, Sized):
        raise TypeError("give settings, how many there are, with a path that has no length")
    return len(path)


def _walk(
    path: Iterable[Sequence[Counts]], accuracy: float, delta: float, share: float, settings: int
) -> tuple[Certificate, list[Sequence[Counts]]]:
    # a setting passes if each of its parts does
    check_levels(accuracy, delta)
    if not 0.0 < share <= 1.0:
        raise CompositionError(f"share of delta is {share!r}, must be above 0 and at most 1")
    tested: list[Tested] = []
    counted: list[Sequence[Counts]] = []
    deployed: int | None = None
    for position, parts in enumerate(path):
        for lost, count in parts:
            if not 0 <= lost <= count:
                raise CompositionError(f"{lost} losses among {count} inputs: there cannot be; count again")
        probability = max(p_value(*part, accuracy) for part in parts)
        passed = probability <= share * delta
        losses, inputs = (sum(column) for column in zip(*parts, strict=True))
        tested.append(Tested(losses, inputs, probability, passed))
        counted.append(parts)
        if not passed:
            break
        deployed = position
    return Certificate(accuracy, delta, deployed, tuple(tested), settings, share=share), counted


def count_by_class(
    answer: NDArray[np.int64], base_class: NDArray[np.int64], classes: int
) -> tuple[Counts, ...]:
    """Return (losses, inputs) of each class of the base model's, from both answers [n] to all inputs."""
    inputs = np.bincount(base_class, minlength=classes)
    losses = np.bincount(base_class[answer != base_class], minlength=classes)
    return tuple((int(lost), int(count)) for lost, count in zip(losses, inputs, strict=True))


def p_value(losses: int, inputs: int, accuracy: float) -> float:
    """Return P(Bin(inputs, 1 - accuracy) <= losses): how likely so few losses are below the target."""
    return 1.0 if losses >= inputs else float(betainc(inputs - losses, losses + 1, accuracy))


def required_inputs(accuracy: float, delta: float, losses: int = 0) -> int:
    """Return the fewest inputs with which `losses` disagreements certify `accuracy`; 299 for 0.99 and 0.05.

    Raises CompositionError for a target or delta outside (0, 1).
    """
    check_levels(accuracy, delta)
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
    return float(betaincinv(inputs - losses, losses + 1, delta))


def rate_upper_bound(losses: int, inputs: int, delta: float) -> float:
    """Return the exact one-sided upper confidence limit (Clopper, Pearson) of a rate; 1 without inputs."""
    return 1.0 - agreement_lower_bound(losses, inputs, delta)


def check_levels(accuracy: float, delta: float) -> None:
    """Raise CompositionError for a target or delta outside (0, 1)."""
    for name, value in (("accuracy target", accuracy), ("delta", delta)):
        if not 0.0 < value < 1.0:
            raise CompositionError(f"{name} is {value!r}, must lie strictly between 0 and 1")
