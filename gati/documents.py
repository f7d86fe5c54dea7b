"""Documents that Gati writes and reads again: strict JSON with a format number.

A document is an object with a number `format`. One of a newer format is refused instead of misread, one that
is damaged is named with its file, and with what brings it back. `DocumentKind.record` makes a dataclass of
an object in it: each field is read as its annotation says.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from gati.errors import GatiError
from gati.files import atomic_write_text

Record = TypeVar("Record")

_DAMAGE = (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError)


def key(name: str) -> dict[str, str]:
    """Metadata of a dataclass field that is called `name` in documents: `field(metadata=key("n"))`."""
    return {"key": name}


def values_of(record: Any) -> Any:
    """What `DocumentKind.record` reads again: dataclasses as objects, tuples as lists, the rest as it is."""
    if dataclasses.is_dataclass(record):
        every = dataclasses.fields(record)
        return {each.metadata.get("key", each.name): values_of(getattr(record, each.name)) for each in every}
    if isinstance(record, tuple | list):
        return [values_of(each) for each in record]
    return {name: values_of(each) for name, each in record.items()} if isinstance(record, dict) else record


@dataclass(frozen=True)
class DocumentKind:
    """A kind of document: the `format` written now, the error its readers raise, what to do when damaged.

    `unnumbered` documents may lack their number: they were first written without. `compact` ones have no
    line breaks, for those that are written often.
    """

    format: int
    error: type[GatiError]
    cure: str
    unnumbered: bool = False
    compact: bool = False

    def text_of(self, values: Mapping[str, Any]) -> str:
        """The document with these values. Raises ValueError for NaN and infinity, which JSON lacks."""
        indent = None if self.compact else 1
        return json.dumps({"format": self.format, **values}, indent=indent, allow_nan=False) + "\n"

    def write(self, path: Path, values: Mapping[str, Any]) -> None:
        """Write the document, atomically. Raises `StorageError` when the place is full or not writable."""
        atomic_write_text(path, self.text_of(values))

    def parse(self, text: str, where: str) -> dict[str, Any]:
        """The values of a document, `format` among them; `where` names it in messages.

        Raises `error` for text that is not such a document, and for one of a newer format.
        """
        with self.reading(where):
            document = json.loads(text, parse_constant=_refuse_constant)
            if not isinstance(document, dict):
                raise TypeError(f"expected an object, found {type(document).__name__}")
            found = document.get("format", 1) if self.unnumbered else document["format"]
            if isinstance(found, bool) or not isinstance(found, int):
                raise TypeError(f"format is {found!r}, expected a whole number")
        if found > self.format:
            raise self.error(
                f"{where} has format {found}, this Gati reads up to {self.format}: it was written by a newer "
                "one; upgrade gati"
            )
        return document

    def read(self, path: Path) -> dict[str, Any]:
        """As `parse`, from a file; `error`, too, where it cannot be read."""
        with self.reading(str(path)):
            text = path.read_text(encoding="utf-8")
        return self.parse(text, str(path))

    @contextmanager
    def reading(self, where: str) -> Iterator[None]:
        """Values are taken out inside: one that is missing or of another type raises `error`."""
        try:
            yield
        except _DAMAGE as problem:
            reason = f"no {problem}" if isinstance(problem, KeyError) else str(problem)
            raise self.error(f"{where} is damaged ({reason}): {self.cure}") from problem

    def record(self, of: type[Record], values: object, where: str, **made: Any) -> Record:
        """A dataclass `of` from an object in a document; the fields in `made` are taken as given.

        A missing field takes its default. Other entries of the object are ignored. Raises `error` for a field
        that is missing or of another type than its annotation, named with `where`.
        """
        if not isinstance(values, dict):
            raise self.error(f"{where}: expected an object, got {values!r}; {self.cure}")
        found = dict(made)
        hints = get_type_hints(of)
        for field in dataclasses.fields(of):  # type: ignore[arg-type]  # only dataclasses are records
            name = field.metadata.get("key", field.name)
            if field.name in made:
                continue
            if name in values:
                found[field.name] = self._field(hints[field.name], values[name], where, name)
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise self.error(f"{where}: has no field {name!r}; {self.cure}")
        return of(**found)

    def _field(self, wanted: Any, value: object, where: str, name: str) -> Any:
        try:
            return self._value(wanted, value, f"{where}: {name}")
        except (TypeError, OverflowError):  # a whole number may be too large for a float
            raise self.error(
                f"{where}: field {name!r} is {value!r}, expected {_described(wanted)}; {self.cure}"
            ) from None

    def _value(self, wanted: Any, value: object, where: str) -> Any:
        """The value as its annotation wants it. Raises TypeError for another, `error` inside of records."""
        parts = get_args(wanted)
        if isinstance(wanted, NewType):
            return self._value(wanted.__supertype__, value, where)
        if get_origin(wanted) in (Union, UnionType):  # with None, the only unions in documents
            (other,) = (part for part in parts if part is not NoneType)
            return None if value is None else self._value(other, value, where)
        if isinstance(wanted, type) and dataclasses.is_dataclass(wanted) and isinstance(value, dict):
            return self.record(wanted, value, where)
        if get_origin(wanted) is tuple and isinstance(value, list):
            return tuple(self._value(parts[0], each, f"{where}[{at}]") for at, each in enumerate(value))
        if get_origin(wanted) in (dict, Mapping) and isinstance(value, dict):
            return {name: self._value(parts[1], each, f"{where}: {name}") for name, each in value.items()}
        if get_origin(wanted) is Literal and value in parts:
            return value
        if wanted is float and isinstance(value, int | float) and not isinstance(value, bool):
            if math.isfinite(value):
                return float(value)
        elif wanted is Any or type(value) is wanted:
            return value
        raise TypeError


_PLAIN = {float: "a finite number", int: "a whole number", bool: "true or false", str: "a string"}


def _described(wanted: Any) -> str:
    """What an annotation accepts, in words."""
    parts = get_args(wanted)
    if isinstance(wanted, NewType):
        return _described(wanted.__supertype__)
    if get_origin(wanted) in (Union, UnionType):
        return f"{' or '.join(_described(part) for part in parts if part is not NoneType)} or null"
    if get_origin(wanted) is Literal:
        return " or ".join(map(repr, parts))
    if get_origin(wanted) is tuple:
        return f"a list, each {_described(parts[0])}"
    return _PLAIN.get(wanted, "an object")


def _refuse_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
