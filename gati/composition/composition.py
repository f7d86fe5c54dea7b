"""A composition: the exits that `gati compose` chose for the engine, with their expected figures.

A composition is one JSON file. It is strict JSON (no NaN, no infinity), so any language can read it,
and it carries a format number, so that a newer file is refused instead of misread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gati.composition.certificate import Certificate
from gati.composition.headroom import Headroom
from gati.documents import DocumentKind, values_of
from gati.errors import CompositionError
from gati.files import atomic_write_text
from gati.types import Conditions, Placement, TrialId
from gati.variants import as_called_now

if TYPE_CHECKING:
    from gati.exploration.library import Library

FORMAT = 2  # in format 1, variants had older names; see `as_called_now`
_DOCUMENT = DocumentKind(FORMAT, CompositionError, "run gati compose again")
REDUCED = ("-bf16", "-int8")  # suffixes of backends on which the network itself changes some answers
COARSE_LOOKUPS = "-int8-lookups"  # suffix of backends on which only lookups differ from the tables
_ROUNDING = 1e-9

Objective = Literal["relaxed", "full", "exact"]
ExpectedFrom = Literal["replay", "table"]


@dataclass(frozen=True)
class Exit:
    """One chosen learned cache. A lookup is a hit when its score >= `threshold`.

    `expected_hit_rate` is the share of *all* requests that leave here, without those that left earlier.
    `expected_agreement` is the share of these that get the base model's class. `exit_ms` is the latency of a
    request that leaves here, including earlier lookups. `lookup_ms` is the paper's T_ij for this placement,
    `penalty_ms` what it adds to a request that goes on. `cache_sha256` is of the file of the cache that the
    certificate counted. The last two are None in files of older versions.
    """

    trial_id: TrialId
    block: str
    block_index: int
    variant: str
    selector: str
    threshold: float
    placement: Placement
    expected_hit_rate: float
    expected_agreement: float
    lookup_ms: float
    memory_bytes: int
    exit_ms: float
    cache_sha256: str | None = None
    penalty_ms: float | None = None


@dataclass(frozen=True)
class Expected:
    """The expected figures of the whole composition, on inputs like those of the select split."""

    mean_latency_ms: float
    base_latency_ms: float
    gain: float  # base_latency_ms / mean_latency_ms
    hit_rate: float
    agreement: float  # over all requests, those answered by the base model included
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Composition:
    """The exits of a cache library that serve together, in forward order.

    `exits` may be empty: then the base model answers every request, and `note` says why. `gap` is the
    relative distance to the best provable objective value, None if nothing is proven. `expected_from` says
    whether `expected` was replayed input by input or estimated from the table. `per_class` says that the
    target holds in every class, by the base model's answers. `headroom` is the gain of perfect exits; None
    without exits, and in files of older versions. `measured_on` is where the latencies that it was chosen by
    were measured; None in files of older versions. `lookup_cores` is how many cores are reserved for lookups
    that are overlapped. If the engine's own answers were counted, as in reduced
    precision, `graph_sha256` is of the network that gave them; None otherwise, and in older files.
    """

    name: str
    objective: Objective
    solver: str
    gap: float | None
    alpha: float | None
    accuracy_target: float
    confidence: float | None
    memory_limit_bytes: int | None
    backend: str
    placement: Placement
    exits: tuple[Exit, ...]
    expected: Expected
    certificate: Certificate | None
    checkpoint_sha256: str
    created: str
    note: str = ""
    expected_from: ExpectedFrom = "table"
    per_class: bool = False
    headroom: Headroom | None = None
    measured_on: Conditions | None = None
    graph_sha256: str | None = None
    lookup_cores: int = 1

    @property
    def certified(self) -> bool:
        """Whether its certificate proves `accuracy_target` with `confidence`, in every class if `per_class`.

        False without a confidence, without a certificate, and if the latest certificate did not pass.
        """
        if self.certificate is None or self.confidence is None:
            return False
        proven = self.proves(self.accuracy_target, self.confidence)
        return proven and bool(not self.per_class or self.certificate.by_class)

    def proves(self, accuracy: float, confidence: float) -> bool:
        """Whether its certificate passed for at least this agreement and confidence."""
        found = self.certificate
        if found is None or not found.certified:
            return False
        return found.accuracy >= accuracy - _ROUNDING and found.confidence >= confidence - _ROUNDING

    def certified_by(self, certificate: Certificate) -> Composition:
        """Return a copy with another certificate, which also replaces the old one quoted in the note."""
        before, note = self.certificate, self.note
        if before is not None:
            note = note.replace(before.sentence(), certificate.sentence())
        return replace(self, certificate=certificate, note=note)

    @property
    def warning(self) -> str:
        """One line that says that its agreement is not proven, and why; "" if it is.

        Without exits, in float32, every answer is the base model's, and there is nothing to prove.
        """
        if self.certified or (not self.exits and not self.backend.endswith(REDUCED)):
            return ""
        each = " in every class" if self.per_class else ""
        return (
            f"NOT CERTIFIED: nothing proves that at least {100.0 * self.accuracy_target:g} % of answers of "
            f"composition '{self.name}' are the base model's{each}; {self._why_not()}"
        )

    def _why_not(self) -> str:
        if self.confidence is None:
            return "it was composed without a confidence"
        if self.certificate is None:
            return "there were no inputs to certify it on"
        if not self.certificate.certified:
            return self.certificate.sentence()
        return "its certificate proves less"

    def to_json(self) -> str:
        """Return the composition as strict JSON text."""
        certificate = None if self.certificate is None else self.certificate.to_json()
        return _DOCUMENT.text_of({**values_of(replace(self, certificate=None)), "certificate": certificate})

    @classmethod
    def from_json(cls, document: str, *, where: str = "composition") -> Composition:
        """Read what `to_json` wrote; `where` names the source in messages.

        Raises CompositionError for text that is not a composition, or is one of a newer format.
        """
        return _composition(_DOCUMENT.parse(document, where), where)

    def save(self, path: str | Path) -> None:
        """Write the composition to `path` atomically, creating its folder.

        Raises StorageError if the disk is full or not writable.
        """
        atomic_write_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Composition:
        """Read a composition file.

        Raises CompositionError when it is missing, damaged or of a newer format.
        """
        source = Path(path)
        try:
            document = source.read_text(encoding="utf-8")
        except FileNotFoundError:
            others = sorted(other.stem for other in source.parent.glob("*.json"))
            known = f"there are: {', '.join(others)}" if others else "there is none yet; run gati compose"
            raise CompositionError(f"no composition {source.stem!r} at {source}: {known}") from None
        except (OSError, UnicodeDecodeError) as problem:
            raise CompositionError(f"{source}: cannot be read as a composition ({problem})") from problem
        return cls.from_json(document, where=str(source))

    @classmethod
    def of(cls, library: Library, name: str) -> Composition:
        """Read the composition that a library has under `name`, which its file may be a copy of another's.

        Raises as `load`.
        """
        return replace(cls.load(library.composition_path(name)), name=name)


def _composition(values: dict[str, Any], where: str) -> Composition:
    certificate = values.get("certificate")
    if certificate is not None:
        certificate = Certificate.from_json(certificate, _DOCUMENT, f"{where}: certificate")
    if "per_class" not in values:  # files of earlier versions have it only in the certificate
        values["per_class"] = certificate is not None and bool(certificate.by_class)
    found = _DOCUMENT.record(Composition, values, where, certificate=certificate)
    if found.lookup_cores < 1:
        raise CompositionError(
            f"{where}: lookup_cores is {found.lookup_cores}, expected at least 1; run gati compose again"
        )
    blocks = [leaving.block_index for leaving in found.exits]
    if blocks != sorted(set(blocks)):
        raise CompositionError(
            f"{where}: exits are at blocks {blocks}, expected forward order, one per block; "
            "run gati compose again"
        )
    names = (as_called_now(leaving.variant, values["format"]) for leaving in found.exits)
    exits = (replace(each, variant=name) for each, name in zip(found.exits, names, strict=True))
    return replace(found, exits=tuple(exits))
