"""When to renew caches, according to samples of the version that answered.

A published version does not answer immediately: the inference service proves it first. Samples name the
version that answered. Until they name the new one, their hits and losses are those of the old one, which
has already been replaced. All other decisions are those of streams (`gati.adaptation.triggers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gati.adaptation.triggers import SETTLED, Signs, due, too_few
from gati.composition.binomial import p_value
from gati.samples.record import Record
from gati.samples.store import Outcome

_SURE = 0.001  # alarm if so many disagreements are less likely than this while the promise holds
_LEAST_WAIT_S = 60.0


@dataclass
class Latest:
    """The latest published version: its name in samples, when it was published (seconds since 1970), and
    whether it answers.
    """

    name: str
    promised: float
    since_s: float
    seen: bool = False


class Judged(NamedTuple):
    """`reason` to renew, or None; why a due renewal is `skipped`, or ""; the latest version's `hit_rate`."""

    reason: str | None
    skipped: str
    hit_rate: float


@dataclass(frozen=True)
class Rules:
    """Renew after an alarm, at a hit rate below `falls_to` times the promised one, and every `interval_s`.

    A published version has `patience` intervals to be proven. An alarm or a low hit rate also waits for
    `least / 4` samples that the last attempt did not have, or until none is left that it had. Training needs
    at least `least` samples; the window keeps at most `kept`.
    """

    accuracy: float
    interval_s: float
    falls_to: float
    least: int
    kept: int
    patience: float = 3.0

    def due(
        self,
        records: Sequence[Record | Outcome],
        latest: Latest,
        tried_s: float,
        now_s: float,
        began_s: float | None = None,
    ) -> Judged:
        """Judge the samples. Sets `latest.seen` if the version has answered.

        Times are seconds since 1970: `tried_s` is when the last attempt ended or was skipped, `began_s` when
        the last one that was not skipped began.
        """
        since = [record for record in records if record.time_s >= latest.since_s]
        own = [record for record in since if record.source in (latest.name, "")]
        latest.seen |= bool(own)
        early = [record for record in own if record.exit is not None]
        hit_rate = len(early) / len(own) if own else latest.promised
        if not latest.seen and now_s < self.proven_by_s(latest):
            return Judged(None, "", hit_rate)
        about = own if latest.seen else since
        waited = now_s - tried_s >= min(self.interval_s, _LEAST_WAIT_S)
        if began_s is not None:  # the same samples would train the same caches again, once a minute
            fresh = sum(record.time_s >= began_s for record in records)
            waited &= fresh >= min(self.least // 4, len(records))
        wrong = sum(record.agreed is False for record in about)
        sure = bool(wrong) and p_value(len(about) - wrong, len(about), 1.0 - self.accuracy) <= _SURE
        low = hit_rate < self.falls_to * latest.promised and len(own) >= SETTLED
        found = due(
            Signs(
                len(records),
                len(since),
                now_s - tried_s,
                alarmed=waited and sure,
                fewer_hits=waited and low,
                known_scenes=True,  # known versions are tried first; too few samples are reported later
            ),
            interval_s=self.interval_s,
            least=self.least,
            kept=self.kept,
        )
        return Judged(*found, hit_rate)

    def proven_by_s(self, latest: Latest) -> float:
        """Until when a published version has time to be proven, in seconds since 1970."""
        return latest.since_s + self.patience * self.interval_s

    def too_few(self, count: int) -> str:
        """Return why this number of samples is insufficient."""
        return too_few(count, self.least, self.kept)
