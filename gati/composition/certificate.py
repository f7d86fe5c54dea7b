"""The certificate: agreement with the base model of at least A, stated with confidence 1 - delta.

`gati.composition.walk` explains how it is obtained and what it assumes. A composition file stores it with its
evidence: the counts of each setting, the engines that shared delta, how often the inputs were used, and the
loss of true accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gati.composition.accuracy import AccuracyDrop
from gati.composition.binomial import agreement_lower_bound, p_value, required_inputs
from gati.documents import DocumentKind, key, values_of
from gati.model.identity import CopyCounts
from gati.units import at_least

FRESH_DATA = "certify on fresh data with gati certify --data NEW"
COUNTED = " Copies, and inputs that were used before, are counted only where answers differ."


class LossCounts(NamedTuple):
    """The number of inputs that left early with another class than the base model's, and of all inputs."""

    losses: int
    inputs: int


@dataclass(frozen=True)
class Tested:
    """One setting that the walk tested."""

    losses: int
    inputs: int = field(metadata=key("n"))
    p_value: float
    passed: bool


@dataclass(frozen=True)
class NewInputs:
    """The counts of the same setting over inputs that trained and chose nothing, each once: a sample."""

    losses: int
    inputs: int = field(metadata=key("n"))

    @classmethod
    def of(cls, lost: NDArray[np.bool_], copies: CopyCounts) -> NewInputs | None:
        """Return the counts if these inputs are `lost` [n]; None if `copies` count each input once anyway."""
        new = copies.same > 0
        return None if copies.all_once else cls(int(lost[new].sum()), int(new.sum()))


@dataclass(frozen=True)
class ClassCounts:
    """The counts of one class, by the base model's answers."""

    name: str = field(metadata=key("class"))
    losses: int
    inputs: int = field(metadata=key("n"))


@dataclass(frozen=True, kw_only=True)
class WalkedOn:
    """The inputs of a walk: the engine, the seed of the split, and a digest of the settings in order.

    The figures are about the deployed setting on inputs that trained and chose nothing, each once; None
    without exits.
    """

    backend: str
    split_seed: int
    path_sha256: str
    mean_latency_ms: float | None = None
    gain: float | None = None
    hit_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class EngineWalk:
    """One of several engines that shared delta. `tested` is None if nothing was counted."""

    backend: str
    share_of_delta: float
    hoped_ms: float
    certified: bool
    reason: str = ""  # why it cannot promise the accuracy
    path_sha256: str | None = None
    tested: tuple[Tested, ...] | None = field(default=None, metadata=key("path"))


@dataclass(frozen=True)
class AttemptCount:
    """The number of this attempt on other data in its library, and of compositions that used that data."""

    number: int = field(metadata=key("attempt"))
    compositions: int = field(metadata=key("compositions_on_data"))


@dataclass(frozen=True)
class FurtherCount:
    """Further inputs counted with the certify split: their file, their number, and what was left out."""

    data: str
    inputs: int = field(metadata=key("n"))
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Recount:
    """What `gati certify` adds: the data, and a comparison with the earlier certificate."""

    data: str
    hit_rate: float
    comparison: str
    note: str = ""
    created: str = ""  # ISO 8601, in UTC; "" if it was not written into a composition


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The result of a walk. `deployed` is the position of the last setting that passed, None if none did.

    A walk fills in the counts; its callers add the rest.
    """

    accuracy: float
    delta: float
    deployed: int | None
    tested: tuple[Tested, ...] = field(metadata=key("path"))  # strictest first, up to the first failure
    settings: int  # length of the path
    by_class: tuple[ClassCounts, ...] = ()  # of the same setting as `losses`, if each class was tested
    # this walk's share of delta, if a command or several attempts make more than one
    share: float = field(default=1.0, metadata=key("share_of_delta"))
    walked_on: WalkedOn | None = None
    accuracy_drop: AccuracyDrop | None = None
    # if the counts are of copies, too, or of inputs that were used before: see `gati.composition.copies`
    new_inputs: NewInputs | None = None
    engines: tuple[EngineWalk, ...] = ()
    use: int | None = None  # number of this use of the library's certify split, from 1
    attempt: AttemptCount | None = None
    further: FurtherCount | None = None
    recount: Recount | None = None
    previous: Certificate | None = None  # the certificate that this one replaces, without its own `previous`

    @property
    def level(self) -> float:
        """An upper bound on the probability that this walk errs."""
        return self.share * self.delta

    @property
    def proven_agreement(self) -> float | None:
        """The agreement that the counts prove; None if they prove nothing."""
        if self.settings == 1 and self.tested:
            parts = self.by_class or (self.tested[0],)
            return min(agreement_lower_bound(part.losses, part.inputs, self.level) for part in parts)
        return None if self.deployed is None else self.accuracy

    @property
    def inputs(self) -> int:
        """The number of certify inputs counted for the same setting as `losses`."""
        return self.tested[self.deployed or 0].inputs if self.tested else 0

    @property
    def losses(self) -> int:
        """Disagreements of the deployed setting, or of the strictest if none is deployed."""
        return self.tested[self.deployed or 0].losses if self.tested else 0

    @property
    def confidence(self) -> float:
        """1 - delta."""
        return 1.0 - self.delta

    @property
    def certified(self) -> bool:
        """Whether any setting passed."""
        return self.deployed is not None

    def sentence(self) -> str:
        """Return the certificate as a plain sentence, with caveats if the inputs were used before."""
        sentence = self._verdict()
        if self.new_inputs is not None:
            sentence += COUNTED
        if self.attempt is not None:
            sentence += of_attempts(self.attempt.number, self.level, self.delta)
            sentence += of_users(self.attempt.compositions)
        return sentence + of_uses(self.use or 1)

    def _verdict(self) -> str:
        confidence = f"{100.0 * self.confidence:g} %"
        target = f"{100.0 * self.accuracy:g} %"
        if self.by_class:
            return self._sentence_by_class(target, confidence)
        if not self.tested:
            return "Without caches all answers are the base model's, so there was nothing to certify."
        if self.deployed is not None:
            return (
                f"With {confidence} confidence at least {target} of answers are the base model's: "
                f"{self.losses} of {self.inputs} {self._counted} were answered differently."
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
                f"{self.inputs} inputs were answered differently, which certifies {at_least(bound)} %."
            )
        return (
            f"Agreement of {target} is not certified with {confidence} confidence: already the strictest "
            f"setting answered {self.losses} of {self.inputs} inputs differently."
        )

    @property
    def _counted(self) -> str:
        return "inputs not used for choosing" if self.new_inputs is None else "counted inputs"

    def _sentence_by_class(self, target: str, confidence: str) -> str:
        worst = max(self.by_class, key=lambda each: p_value(each.losses, each.inputs, self.accuracy))
        losses, inputs = worst.losses, worst.inputs
        name = f"class '{worst.name}'"
        if self.deployed is not None:
            return (
                f"With {confidence} confidence at least {target} of answers are the base model's in each of "
                f"{len(self.by_class)} classes: {self.losses} of {self.inputs} {self._counted} were answered "
                f"differently, of {name} {losses} of {inputs}."
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

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as strict JSON values, with the figures that follow from the counts."""
        values: dict[str, Any] = {
            "accuracy": self.accuracy,
            "confidence": self.confidence,
            "delta": self.delta,
            "share_of_delta": self.share,
            "level": self.level,  # what p-values were compared with
            "alpha": 1.0 - self.accuracy,  # the tolerated rate of disagreement
            "certified": self.certified,
            "deployed": self.deployed,
            "n": self.inputs,
            "losses": self.losses,
            "agreement_lower_bound": self.proven_agreement,
            "required_inputs": required_inputs(self.accuracy, self.level),
            "settings": self.settings,
            "path": values_of(self.tested),
            "by_class": values_of(self.by_class) or None,
            "sentence": self.sentence(),
            "accuracy_drop": None if self.accuracy_drop is None else self.accuracy_drop.to_json(),
        }
        for part in (self.walked_on, self.attempt, self.recount):
            if part is not None:
                values |= {name: value for name, value in values_of(part).items() if value is not None}
        if self.new_inputs is not None:
            values["new_inputs"] = values_of(self.new_inputs)
        if self.engines:
            values["engines"] = values_of(self.engines)
        if self.use is not None:
            values["use"] = self.use
        if self.further is not None:
            values["further"] = values_of(self.further)
        if self.recount is not None:
            values["previous"] = None if self.previous is None else self.previous.to_json()
        return values

    @classmethod
    def from_json(cls, values: Any, kind: DocumentKind, where: str) -> Certificate:
        """Read what `to_json` wrote. Figures that follow from the counts are computed again.

        Raises the error of the document's `kind`, with `where` in its message, for an invalid certificate.
        """
        if not isinstance(values, dict):
            return kind.record(cls, values, where)
        previous = values.get("previous")
        found = kind.record(
            cls,
            {**values, "by_class": values.get("by_class") or []},
            where,
            walked_on=kind.record(WalkedOn, values, where) if "path_sha256" in values else None,
            attempt=kind.record(AttemptCount, values, where) if "attempt" in values else None,
            recount=kind.record(Recount, values, where) if "comparison" in values else None,
            previous=None if previous is None else cls.from_json(previous, kind, f"{where}: previous"),
        )
        with kind.reading(where):
            if not (0.0 < found.accuracy < 1.0 and 0.0 < found.delta < 1.0):
                raise ValueError(
                    f"accuracy is {found.accuracy} and delta {found.delta}, but both must lie in (0, 1)"
                )
            if found.deployed is not None and not 0 <= found.deployed < len(found.tested):
                raise ValueError(
                    f"deployed is {found.deployed}, but {len(found.tested)} settings were tested"
                )
            if "share_of_delta" not in values and "level" in values:  # as older versions wrote it
                found = replace(found, share=values["level"] / found.delta)
        return found


def of_uses(number: int) -> str:
    """Return the addition to a certificate's sentence if the certify split was used before."""
    if number <= 1:
        return ""
    return (
        f" This is the {ordinal(number)} use of the library's certify split, and the confidence covers each "
        f"use on its own: {FRESH_DATA}."
    )


def of_attempts(number: int, level: float, delta: float) -> str:
    """Return the addition to a certificate's sentence if it was not the library's first attempt."""
    if number == 1:
        return ""
    return (
        f" This is the {ordinal(number)} attempt in this library, which errs with probability at most "
        f"{100.0 * level:.2g} %: all with this confidence or more err together with probability at most "
        f"{100.0 * delta:g} %."
    )


def of_users(compositions: int) -> str:
    """Return the addition to a certificate's sentence if other compositions used the same data."""
    if compositions == 1:
        return ""
    return (
        f" This data has been used for {compositions} compositions: the confidence covers those that were "
        "chosen before it was looked at."
    )


def ordinal(number: int) -> str:
    """Return 1st, 2nd, 3rd, 4th and so on."""
    teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
