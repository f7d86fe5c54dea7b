"""What `gati compose` decides and the engine obeys: the chosen exits, with what is expected of them.

A composition is one JSON file. It is strict JSON (no NaN, no infinity), so any language can read it,
and it carries a format number, so that a newer file is refused instead of misread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from gati.errors import CompositionError
from gati.types import Placement, TrialId

__all__ = ["FORMAT", "Composition", "Exit", "Expected", "ExpectedFrom", "Objective"]

FORMAT = 1

Objective = Literal["relaxed", "full", "exact"]
ExpectedFrom = Literal["replay", "table"]
T = TypeVar("T")


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

    def to_json(self) -> str:
        """Return the composition as strict JSON text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "composition") -> Composition:
        """Read what `to_json` wrote; `where` names the source in messages.

        Raises CompositionError for text that is not a composition, or is one of a newer format.
        """
        fields = _Fields(_parse(text, where), where)
        version = fields.take("format", _integer)
        if version > FORMAT:
            raise CompositionError(
                f"{where}: composition format {version} is newer than this Gati reads (up to {FORMAT}); "
                "upgrade gati or compose again"
            )
        return _composition(fields)

    def save(self, path: str | Path) -> None:
        """Write the composition to `path` atomically, creating its folder.

        Raises StorageError when the place is full or not writable.
        """
        from gati.files import atomic_write_text

        target = Path(path)
        atomic_write_text(target, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Composition:
        """Read a composition file.

        Raises CompositionError when it is missing, damaged or of a newer format.
        """
        source = Path(path)
        try:
            text = source.read_text(encoding="utf-8")
        except FileNotFoundError:
            others = sorted(other.stem for other in source.parent.glob("*.json"))
            known = f"there is: {', '.join(others)}" if others else "there is none yet; run gati compose"
            raise CompositionError(f"no composition {source.stem!r} at {source}: {known}") from None
        except (OSError, UnicodeDecodeError) as problem:
            raise CompositionError(f"{source}: cannot be read as a composition ({problem})") from problem
        return cls.from_json(text, where=str(source))


class _Fields:
    """A JSON object whose values are taken out by name and checked on the way."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def take(self, name: str, kind: Callable[[object], T]) -> T:
        if name not in self.values:
            raise CompositionError(f"{self.where}: has no field {name!r}; compose again")
        value = self.values[name]
        try:
            return kind(value)
        except (TypeError, ValueError):
            wanted = (kind.__doc__ or kind.__name__).rstrip(".")
            raise CompositionError(
                f"{self.where}: field {name!r} is {value!r}, expected {wanted}; compose again"
            ) from None


def _parse(text: str, where: str) -> Mapping[str, object]:
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as problem:
        raise CompositionError(f"{where}: not valid JSON ({problem}); compose again") from None
    if not isinstance(document, dict):
        raise CompositionError(f"{where}: expected a JSON object, got {type(document).__name__}")
    return cast("dict[str, object]", document)


def _refuse_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


def _number(value: object) -> float:
    """a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _integer(value: object) -> int:
    """a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def _text(value: object) -> str:
    """a string."""
    if not isinstance(value, str):
        raise TypeError
    return value


def _optional_number(value: object) -> float | None:
    """a finite number or null."""
    return None if value is None else _number(value)


def _optional_integer(value: object) -> int | None:
    """a whole number or null."""
    return None if value is None else _integer(value)


def _optional_object(value: object) -> dict[str, Any] | None:
    """an object or null."""
    if value is not None and not isinstance(value, dict):
        raise TypeError
    return value


def _object(value: object) -> dict[str, object]:
    """an object."""
    if not isinstance(value, dict):
        raise TypeError
    return value


def _list(value: object) -> list[object]:
    """a list."""
    if not isinstance(value, list):
        raise TypeError
    return value


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


def _exit(fields: _Fields) -> Exit:
    return Exit(
        trial_id=TrialId(fields.take("trial_id", _text)),
        block=fields.take("block", _text),
        block_index=fields.take("block_index", _integer),
        variant=fields.take("variant", _text),
        selector=fields.take("selector", _text),
        threshold=fields.take("threshold", _number),
        placement=fields.take("placement", _placement),
        expected_hit_rate=fields.take("expected_hit_rate", _number),
        expected_agreement=fields.take("expected_agreement", _number),
        lookup_ms=fields.take("lookup_ms", _number),
        memory_bytes=fields.take("memory_bytes", _integer),
        exit_ms=fields.take("exit_ms", _number),
    )


def _expected(fields: _Fields) -> Expected:
    return Expected(
        mean_latency_ms=fields.take("mean_latency_ms", _number),
        base_latency_ms=fields.take("base_latency_ms", _number),
        gain=fields.take("gain", _number),
        hit_rate=fields.take("hit_rate", _number),
        agreement=fields.take("agreement", _number),
        memory_bytes=fields.take("memory_bytes", _integer),
    )


def _composition(fields: _Fields) -> Composition:
    where = fields.where
    exits = [
        _exit(_Fields(_object_at(value, f"{where}: exits[{i}]"), f"{where}: exits[{i}]"))
        for i, value in enumerate(fields.take("exits", _list))
    ]
    blocks = [exit_.block_index for exit_ in exits]
    if blocks != sorted(set(blocks)):
        raise CompositionError(
            f"{where}: exits are at blocks {blocks}, expected forward order, one a block; compose again"
        )
    return Composition(
        name=fields.take("name", _text),
        objective=fields.take("objective", _objective),
        solver=fields.take("solver", _text),
        gap=fields.take("gap", _optional_number),
        alpha=fields.take("alpha", _optional_number),
        accuracy_target=fields.take("accuracy_target", _number),
        confidence=fields.take("confidence", _optional_number),
        memory_limit_bytes=fields.take("memory_limit_bytes", _optional_integer),
        backend=fields.take("backend", _text),
        placement=fields.take("placement", _placement),
        exits=tuple(exits),
        expected=_expected(_Fields(fields.take("expected", _object), f"{where}: expected")),
        certificate=fields.take("certificate", _optional_object),
        checkpoint_sha256=fields.take("checkpoint_sha256", _text),
        created=fields.take("created", _text),
        note=fields.take("note", _text),
        expected_from=fields.take("expected_from", _expected_from),
    )


def _object_at(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise CompositionError(f"{where}: expected an object, got {value!r}; compose again")
    return value
