"""Documents that Gati writes and reads again: strict JSON with a format number.

A document is an object with a number `format`. One of a newer format is refused instead of misread, one that
is damaged is named with its file, and with what brings it back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gati.errors import GatiError
from gati.files import atomic_write_text

__all__ = ["DocumentKind"]


@dataclass(frozen=True)
class DocumentKind:
    """A kind of document: the `format` written now, the error its readers raise, what to do when damaged."""

    format: int
    error: type[GatiError]
    cure: str

    def text_of(self, values: Mapping[str, Any]) -> str:
        """The document with these values. Raises ValueError for NaN and infinity, which JSON lacks."""
        return json.dumps({"format": self.format, **values}, indent=1, allow_nan=False) + "\n"

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
            found = document["format"]
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
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            reason = f"no {problem}" if isinstance(problem, KeyError) else str(problem)
            raise self.error(f"{where} is damaged ({reason}): {self.cure}") from problem


def _refuse_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
