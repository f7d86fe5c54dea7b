"""By which setting memory left the requests that the evidence of a watch is of.

Memory answers the easy requests, and its looser settings leave fewer and harder ones. So evidence of the
requests that one of its settings leaves counts next to that one, and to stricter ones, but not next to looser
ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gati.guard.withdrawals import int_or_none

_STRICTEST = 1  # setting of memory


class LeftRequests:
    """For each of a watch's settings, the strictest setting of memory that left requests of its evidence.

    `now` is the setting that leaves requests now; None if this run was not told any. Where it is not known
    what left them, as an earlier Gati did not write it, the strictest did.
    """

    def __init__(self, settings: int) -> None:
        self.now: int | None = None
        self._by: list[int | None] = [None] * settings

    def count(self, under_way: range) -> None:
        """Count a request for the proofs `under_way`.

        Evidence of easier ones was withdrawn when `now` became looser, so `now` is the strictest of theirs.
        """
        for at in under_way:
            self._by[at] = self.now

    def are_easier(self, at: int, memory_level: int) -> bool:
        """Whether there are easier ones among those of the setting at that index than memory leaves then."""
        return (self._by[at] or _STRICTEST) < memory_level

    def take(self, theirs: LeftRequests, first: int) -> None:
        """Take what another process has counted, of the settings from `first` on."""
        self._by[first:] = theirs._by[first:]
        self.now = None  # whoever tells it next judges what was counted there

    def to_json(self, evidence: Collection[int]) -> dict[str, Any]:
        """What is known of the settings at these indices, as JSON values; empty if nothing is.

        `memory_level` is for earlier versions of Gati, which believe it of all settings.
        """
        levels = [by if at in evidence else None for at, by in enumerate(self._by)]
        if self.now is None and not any(levels):
            return {}
        strictest = min((levels[at] or _STRICTEST for at in evidence), default=self.now)
        return {"memory_level": strictest, "memory_levels": levels}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], settings: int) -> LeftRequests:
        """Restore what `to_json` wrote. Raises TypeError or ValueError for what it did not write."""
        levels = document.get("memory_levels", [document.get("memory_level")] * settings)
        if len(levels) != settings:
            raise ValueError(f"{len(levels)} settings of memory do not fit {settings} settings")
        left = cls(settings)
        left._by = [int_or_none(each) for each in levels]
        return left
