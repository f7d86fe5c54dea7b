"""The active version of a model, and earlier ones: an append-only history.

Each entry holds the whole stack of versions to roll back to, the active one last. Names sort in the order of
writing; of two entries written at once with the same number, the alphabetically later one wins, and the
writer of the other one tries again.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gati.documents import DocumentKind, values_of
from gati.errors import RepositoryError
from gati.versions.places import Place

Action = Literal["activate", "rollback"]

_DEEPEST = 32  # versions that can be rolled back, one after the other
_KIND = DocumentKind(1, RepositoryError, "activate a version", unnumbered=True, compact=True)
_ENTRY = re.compile(r"(\d{12})-[0-9a-f]{32}\.json")


@dataclass(frozen=True, kw_only=True)
class Activation:
    """One entry of a model's history; `time_s` in seconds since 1970.

    `made_for` is whom the version serves, of several that share the model; empty if it serves all.
    """

    action: Action
    time_s: float
    stack: tuple[int, ...]  # versions to go back to, the active one last; never empty
    made_for: str = ""

    @property
    def version(self) -> int:
        """The active version."""
        return self.stack[-1]


class History:
    """The activations of all models of a repository."""

    def __init__(self, place: Place, clock: Callable[[], float]) -> None:
        self._place = place
        self._clock = clock

    def token(self, model: str) -> str:
        """The name of the last entry, empty if there is none."""
        return (self._names(model) or [""])[-1]

    def active(self, model: str) -> int | None:
        """The active version."""
        return (self.stack(model) or (None,))[-1]

    def entries(self, model: str) -> list[Activation]:
        """All entries, oldest first."""
        found = (self._read(model, name) for name in self._names(model))
        return [entry for entry in found if entry is not None]

    def stack(self, model: str) -> tuple[int, ...]:
        """The active version, last, after those active before."""
        for name in reversed(self._names(model)):
            if (entry := self._read(model, name)) is not None:
                return entry.stack
        return ()

    def actives(self, model: str) -> dict[str, int]:
        """The version activated last for each `made_for`, the latest one first."""
        found: dict[str, int] = {}
        for entry in reversed(self.entries(model)):
            found.setdefault(entry.made_for, entry.version)
        return found

    def append(self, model: str, number: int, action: Action, made_for: str = "") -> str:
        """Write that `number` is active now; returns the entry's path."""
        stack, names = self.stack(model), self._names(model)
        if action == "activate":
            stack = (*stack, number)[-_DEEPEST:]
        else:
            below = stack[:-1]
            stack = below[: len(below) - below[::-1].index(number)] if number in below else (number,)
        last = int(names[-1].split("-")[0]) if names else 0
        path = f"{model}/activations/{last + 1:012d}-{uuid.uuid4().hex}.json"
        entry = Activation(action=action, time_s=self._clock(), stack=stack, made_for=made_for)
        self._place.put(path, _KIND.text_of(values_of(entry)).encode())
        return path

    def is_overtaken(self, model: str, path: str) -> bool:
        """Whether another entry written at the same time wins."""
        mine, last = path.rsplit("/", 1)[1], self.token(model)
        return last != mine and last.split("-")[0] == mine.split("-")[0]

    def shorten(self, model: str, most: int) -> None:
        """Delete all but the newest `most` entries."""
        for name in self._names(model)[:-most]:
            self._place.remove(f"{model}/activations/{name}")

    def _names(self, model: str) -> list[str]:
        return [name for name in self._place.children(f"{model}/activations") if _ENTRY.fullmatch(name)]

    def _read(self, model: str, name: str) -> Activation | None:
        """One entry; None if it was cut short or is gone."""
        path = f"{model}/activations/{name}"
        text = (self._place.read(path) or b"").decode(errors="replace")
        try:
            entry = _KIND.record(Activation, _KIND.parse(text, path), path)
        except RepositoryError:
            return None
        return entry if entry.stack else None
