"""A version with the watch that is kept of it: which of its settings may answer, and what they would cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from gati.composition.composition import Composition
from gati.guard.watch import Watch

__all__ = ["Post", "cost_ms"]

Version = TypeVar("Version")

_FASTER = 0.97  # of the time that those who serve take: what a version on trial must stay below


class Post(Generic[Version]):
    """A version, its watch, and its settings that are `open`, by their level.

    `settings` are the ways to deploy it, from strict to loose; empty where the version is the only one.
    """

    def __init__(self, version: Version, watch: Watch, settings: Sequence[Composition] = ()) -> None:
        self.version = version
        self.watch = watch
        self.settings = tuple(settings)
        self.open: dict[int, Version] = {} if settings else {1: version}
        self.opening = False
        self.compared = 0  # requests of which it is known what each setting, and who serves, would take
        self._settings_ms = [0.0] * len(self.settings)
        self._serving_ms = 0.0

    @property
    def level(self) -> int:
        """The loosest setting that is proven and open; 0 where there is none."""
        return max((level for level in self.open if level <= self.watch.level), default=0)

    @property
    def may_hit(self) -> bool:
        """Whether its caches may answer."""
        return self.level > 0

    @property
    def deployed(self) -> Version:
        """The version at the setting that may answer; as it was published where none may."""
        return self.open.get(self.level, self.version)

    @property
    def hopeless(self) -> bool:
        """Whether its proof comes to nothing, and nothing of it is proven."""
        proof = self.watch.proof
        return self.watch.level == 0 and proof is not None and proof.hopeless

    def compare(self, exits: Sequence[str], serving_ms: float) -> None:
        """Take in where each setting would leave, and how long the version that serves takes."""
        self.compared += 1
        self._serving_ms += serving_ms
        for at, (setting, exit) in enumerate(zip(self.settings, exits, strict=True)):
            self._settings_ms[at] += cost_ms(setting, exit)

    @property
    def faster(self) -> bool:
        """Whether the setting that is proven takes less time than what serves, on the same requests."""
        if not self.compared:
            return True
        return self._settings_ms[self.level - 1] < _FASTER * self._serving_ms


def cost_ms(composition: Composition, exit: str) -> float:
    """How long a request takes that leaves there, by the composition's own figures."""
    lookups_ms = 0.0
    for leaving in composition.exits:
        if leaving.block == exit:
            return leaving.exit_ms
        lookups_ms += leaving.lookup_ms
    return composition.expected.base_latency_ms + lookups_ms
