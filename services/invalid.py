"""What pydantic finds invalid in a document, in errors of one line, and checks that say what is wanted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator

from gati.types import NAME_RULE, is_name


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


def matching(pattern: str, wanted: str) -> AfterValidator:
    """A check that a text matches `pattern` as a whole; the message says in words what is `wanted`."""
    expression = re.compile(pattern)

    def check(text: str) -> str:
        if expression.fullmatch(text) is None:
            raise ValueError(f"give {wanted}")
        return text

    return AfterValidator(check)


def _checked_name(text: str) -> str:
    if not is_name(text):
        raise ValueError(f"a name has {NAME_RULE}")  # not quoted: it may be a key in the wrong place
    return text


Name = Annotated[str, AfterValidator(_checked_name)]


def checked_key(text: str) -> str:
    """An API key without white space around it. Raises `ValueError` if no HTTP header can carry it."""
    key = text.strip()  # files of secrets usually end with a newline, which no header can carry
    if not (key and key.isascii() and key.isprintable()):
        raise ValueError("a key has printable ASCII characters, as HTTP headers do")
    return key


ApiKey = Annotated[str, AfterValidator(checked_key)]


def no_such_setting(given: str, known: Iterable[str]) -> str:
    """The reason for an unknown name of a setting, with the nearest of those that are known."""
    near = get_close_matches(given, known, 1)
    return "there is no such setting" + "".join(f"; did you mean '{each}'?" for each in near)


def first_invalid(errors: Sequence[Mapping[str, Any]]) -> InvalidValue:
    """The first of the errors that `ValidationError.errors` lists."""
    first = errors[0]
    return InvalidValue(tuple(first["loc"]), first["type"], first["msg"].removeprefix("Value error, "))
