"""When to renew caches, by the samples of the version that answered them.

A published version does not answer immediately: the inference service proves it first. Samples name the
version that answered; until they name the new one, their hits and losses are those of the old one, which has
been replaced already. What follows is decided as for a stream (`gati.adaptation.triggers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gati.adaptation.triggers import SETTLED, Signs, due, too_few
from gati.composition.binomial import p_value
from gati.samples.record import Record

_SURE = 0.001  # chance of as many disagreements where the promise is kept
_LEAST_WAIT_S = 60.0


@dataclass
class Latest:
    """The version published last: its name in samples, when (seconds since 1970), and if it answers."""

    name: str
    promised: float
    since_s: float
    seen: bool = False


class Judged(NamedTuple):
    """Why to renew now, or why not although it is time; `hit_rate` of the latest version."""

    reason: str | None
    skipped: str
    hit_rate: float


@dataclass(frozen=True)
class Rules:
    """Renew on alarm, when the hit rate falls to `falls_to` of the promised, and every `interval_s`.

    A version that is on trial gets `patience` intervals to be proven. `least` samples are needed to train on;
    `kept` are at most in the window.
    """

    accuracy: float
    interval_s: float
    falls_to: float
    least: int
    kept: int
    patience: float = 3.0

    def due(self, records: Sequence[Record], latest: Latest, tried_s: float, now_s: float) -> Judged:
        """Judge the samples; notes in `latest` whether it has answered."""
        since = [record for record in records if record.time_s >= latest.since_s]
        own = [record for record in since if record.source in (latest.name, "")]
        latest.seen |= bool(own)
        early = [record for record in own if record.exit is not None]
        hit_rate = len(early) / len(own) if own else latest.promised
        if not latest.seen and now_s - latest.since_s < self.patience * self.interval_s:
            return Judged(None, "", hit_rate)
        about = own if latest.seen else since
        waited = now_s - tried_s >= min(self.interval_s, _LEAST_WAIT_S)
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

    def too_few(self, count: int) -> str:
        """Why this number of samples is not enough."""
        return too_few(count, self.least, self.kept)
