"""A composition: the exits that `gati compose` chose for the engine, with their expected figures.

A composition is one JSON file. It is strict JSON (no NaN, no infinity), so any language can read it,
and it carries a format number, so that a newer file is refused instead of misread.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gati.composition.fields import (
    Fields,
    flag,
    integer,
    items,
    mapping,
    number,
    optional_integer,
    optional_mapping,
    optional_number,
    text,
)
from gati.composition.headroom import Headroom, read_headroom
from gati.documents import DocumentKind
from gati.errors import CompositionError
from gati.files import atomic_write_text
from gati.types import Placement, TrialId
from gati.variants import as_called_now

__all__ = ["FORMAT", "Composition", "Exit", "Expected", "ExpectedFrom", "Objective"]

FORMAT = 2  # up to 1, variants were called as `as_called_now` knows
_DOCUMENT = DocumentKind(FORMAT, CompositionError, "compose again")
REDUCED = ("-bf16", "-int8")  # how backends are called on which the network itself loses some answers
COARSE_LOOKUPS = "-int8-lookups"  # and those on which lookups alone differ from the tables
_ROUNDING = 1e-9

Objective = Literal["relaxed", "full", "exact"]
ExpectedFrom = Literal["replay", "table"]


@dataclass(frozen=True)
class Exit:
    """One chosen learned cache. A lookup is a hit when its score >= `threshold`.

    `expected_hit_rate` is the share of *all* requests that leave here, those that left earlier counted out;
    `expected_agreement` the share of these that get the base model's class; `exit_ms` the latency of a
    request that leaves here, all earlier lookups included; `lookup_ms` the paper's T_ij of this placement.
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


@dataclass(frozen=True)
class Expected:
    """What the whole composition should do, on inputs like those of the select split."""

    mean_latency_ms: float
    base_latency_ms: float
    gain: float  # base_latency_ms / mean_latency_ms
    hit_rate: float
    agreement: float  # over all requests, those answered by the base model included
    memory_bytes: int


@dataclass(frozen=True)
class Composition:
    """The exits of a cache library that serve together, in forward order.

    `exits` may be empty: then every request is answered by the base model and `note` says why.
    `gap` is the relative distance to the best provable objective value, None where nothing is proven.
    `expected_from` says whether `expected` was replayed input by input or estimated from the table.
    `per_class` says that the target is promised in every class, as the base model answers.
    `headroom` says what perfect exits would gain; None without exits, and where an older Gati composed.
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
    certificate: dict[str, Any] | None
    checkpoint_sha256: str
    created: str
    note: str = ""
    expected_from: ExpectedFrom = "table"
    per_class: bool = False
    headroom: Headroom | None = None

    @property
    def certified(self) -> bool:
        """Whether its certificate proves what it promises.

        That is `accuracy_target` with `confidence`, in every class if it is `per_class`. False without exits
        that could be certified, without a confidence, and where the latest certificate did not pass.
        """
        if self.certificate is None or self.confidence is None:
            return False
        proven = self.proves(self.accuracy_target, self.confidence)
        return proven and bool(not self.per_class or self.certificate.get("by_class"))

    def proves(self, accuracy: float, confidence: float) -> bool:
        """Whether its certificate passed for agreement of at least `accuracy`, at least that surely."""
        found = self.certificate
        if found is None or not found.get("certified"):
            return False
        enough = found["accuracy"] >= accuracy - _ROUNDING
        return bool(enough and found["confidence"] >= confidence - _ROUNDING)

    @property
    def warning(self) -> str:
        """One line that says that nothing proves what it promises, and why; "" where it is proven.

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
        if not self.certificate.get("certified"):
            sentence = self.certificate.get("sentence", "its certificate did not pass")
            return f"it serves all the same: {sentence}"
        return "its certificate is for less"

    def to_json(self) -> str:
        """Return the composition as strict JSON text."""
        return _DOCUMENT.text_of(asdict(self))

    @classmethod
    def from_json(cls, document: str, *, where: str = "composition") -> Composition:
        """Read what `to_json` wrote; `where` names the source in messages.

        Raises CompositionError for text that is not a composition, or is one of a newer format.
        """
        values = _DOCUMENT.parse(document, where)
        return _composition(Fields(values, where), values["format"])

    def save(self, path: str | Path) -> None:
        """Write the composition to `path` atomically, creating its folder.

        Raises StorageError when the place is full or not writable.
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
            known = f"there is: {', '.join(others)}" if others else "there is none yet; run gati compose"
            raise CompositionError(f"no composition {source.stem!r} at {source}: {known}") from None
        except (OSError, UnicodeDecodeError) as problem:
            raise CompositionError(f"{source}: cannot be read as a composition ({problem})") from problem
        return cls.from_json(document, where=str(source))


def _placement(value: object) -> Placement:
    """'inline' or 'overlapped'."""
    if value not in ("inline", "overlapped"):
        raise TypeError
    return value


def _objective(value: object) -> Objective:
    """'relaxed', 'full' or 'exact'."""
    if value not in ("relaxed", "full", "exact"):
        raise TypeError
    return value


def _expected_from(value: object) -> ExpectedFrom:
    """'replay' or 'table'."""
    if value not in ("replay", "table"):
        raise TypeError
    return value


def _exit(fields: Fields, version: int) -> Exit:
    return Exit(
        trial_id=TrialId(fields.take("trial_id", text)),
        block=fields.take("block", text),
        block_index=fields.take("block_index", integer),
        variant=as_called_now(fields.take("variant", text), version),
        selector=fields.take("selector", text),
        threshold=fields.take("threshold", number),
        placement=fields.take("placement", _placement),
        expected_hit_rate=fields.take("expected_hit_rate", number),
        expected_agreement=fields.take("expected_agreement", number),
        lookup_ms=fields.take("lookup_ms", number),
        memory_bytes=fields.take("memory_bytes", integer),
        exit_ms=fields.take("exit_ms", number),
    )


def _expected(fields: Fields) -> Expected:
    return Expected(
        mean_latency_ms=fields.take("mean_latency_ms", number),
        base_latency_ms=fields.take("base_latency_ms", number),
        gain=fields.take("gain", number),
        hit_rate=fields.take("hit_rate", number),
        agreement=fields.take("agreement", number),
        memory_bytes=fields.take("memory_bytes", integer),
    )


def _composition(fields: Fields, version: int) -> Composition:
    where = fields.where
    certificate = fields.take("certificate", optional_mapping)
    exits = [
        _exit(Fields(_object_at(value, f"{where}: exits[{i}]"), f"{where}: exits[{i}]"), version)
        for i, value in enumerate(fields.take("exits", items))
    ]
    blocks = [exit_.block_index for exit_ in exits]
    if blocks != sorted(set(blocks)):
        raise CompositionError(
            f"{where}: exits are at blocks {blocks}, expected forward order, one a block; compose again"
        )
    return Composition(
        name=fields.take("name", text),
        objective=fields.take("objective", _objective),
        solver=fields.take("solver", text),
        gap=fields.take("gap", optional_number),
        alpha=fields.take("alpha", optional_number),
        accuracy_target=fields.take("accuracy_target", number),
        confidence=fields.take("confidence", optional_number),
        memory_limit_bytes=fields.take("memory_limit_bytes", optional_integer),
        backend=fields.take("backend", text),
        placement=fields.take("placement", _placement),
        exits=tuple(exits),
        expected=_expected(Fields(fields.take("expected", mapping), f"{where}: expected")),
        certificate=certificate,
        checkpoint_sha256=fields.take("checkpoint_sha256", text),
        created=fields.take("created", text),
        note=fields.take("note", text),
        expected_from=fields.take("expected_from", _expected_from),
        # not in files of earlier versions, whose certificate tells
        per_class=fields.take("per_class", flag)
        if "per_class" in fields.values
        else bool(certificate and certificate.get("by_class")),
        headroom=read_headroom(fields.values.get("headroom"), where),
    )


def _object_at(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise CompositionError(f"{where}: expected an object, got {value!r}; compose again")
    return value
