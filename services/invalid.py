"""The first value that pydantic finds invalid in a document, for errors of one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class InvalidValue(NamedTuple):
    """What is wrong, and `place`: the keys and indices that lead there, none if it is the whole document."""

    place: tuple[int | str, ...]
    kind: str  # pydantic's name
    message: str

    @property
    def where(self) -> str:
        """The place, such as `models.cars.replicas`."""
        return ".".join(map(str, self.place))

    @property
    def reason(self) -> str:
        """The message, to stand after a colon."""
        return self.message[:1].lower() + self.message[1:]


def first_invalid(errors: Sequence[Mapping[str, Any]]) -> InvalidValue:
    """The first of the errors that `ValidationError.errors` lists."""
    first = errors[0]
    return InvalidValue(tuple(first["loc"]), first["type"], first["msg"].removeprefix("Value error, "))
