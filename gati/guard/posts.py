"""A version with its watch: which of its settings may answer, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from gati.composition.composition import Composition
from gati.guard.watch import Watch

Version = TypeVar("Version")

_FASTER = 0.97  # a version on trial must take less than this share of the serving version's time


class Post(Generic[Version]):
    """A version, its watch, and its `open` settings by level.

    `settings` are the ways to deploy the version, from strict to loose; empty if it has only one. `nested`:
    it is a composition of the library, and whatever a setting answers early, all looser ones answer alike.
    The loosest is the version itself, and open.
    """

    def __init__(
        self,
        version: Version,
        watch: Watch,
        settings: Sequence[Composition] = (),
        *,
        nested: bool = False,
    ) -> None:
        self.version = version
        self.watch = watch
        self.settings = tuple(settings)
        self.nested = nested
        self.open: dict[int, Version] = {}
        if nested or not settings:
            self.open[max(1, len(settings))] = version
        self.opening = False
        self.compare_anew()

    @property
    def level(self) -> int:
        """The loosest setting that is proven and open; 0 if there is none."""
        proven = self.watch.level
        if proven in self.open:  # the common case; called several times per request
            return proven
        return max((level for level in self.open if level <= proven), default=0)

    @property
    def may_hit(self) -> bool:
        """Whether its caches may answer."""
        return self.level > 0

    @property
    def deployed(self) -> Version:
        """The version at the setting that may answer, or as it was published if none may."""
        return self.open.get(self.level, self.version)

    def shows_all(self, level: int, *, agreed: bool) -> bool:
        """Whether an answer of the setting of that level shows what all other settings would have done.

        If settings are nested and the loosest one agrees, all of them do: a stricter one either answers in
        the same way or leaves the request to the base model.
        """
        return not self.settings or (self.nested and agreed and level == len(self.settings))

    @property
    def hopeless(self) -> bool:
        """Whether no setting is proven and the proof has failed."""
        proof = self.watch.proof
        return self.watch.level == 0 and proof is not None and proof.hopeless

    def compare_anew(self) -> None:
        """Forget the times compared so far."""
        self.compared = 0  # requests for which the times of all settings and of the serving version are known
        self._settings_ms = [0.0] * len(self.settings)
        self._serving_ms = 0.0

    def compare(self, exits: Sequence[str], serving_ms: float) -> None:
        """Record the exit of each setting and the time of the serving version for one request."""
        self.compared += 1
        self._serving_ms += serving_ms
        for at, (setting, exit) in enumerate(zip(self.settings, exits, strict=True)):
            self._settings_ms[at] += cost_ms(setting, exit)

    @property
    def faster(self) -> bool:
        """Whether the proven setting takes less time than the serving version, on the same requests."""
        if not self.compared:
            return True
        return self._settings_ms[self.level - 1] < _FASTER * self._serving_ms


def cost_ms(composition: Composition, exit: str) -> float:
    """The latency of a request that leaves at that exit, as measured in the composition."""
    lookups_ms = 0.0
    for leaving in composition.exits:
        if leaving.block == exit:
            return leaving.exit_ms
        lookups_ms += leaving.lookup_ms
    return composition.expected.base_latency_ms + lookups_ms
