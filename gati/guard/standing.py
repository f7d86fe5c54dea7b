"""The state and evidence of the versions of one model, kept over restarts: a stopped version stays stopped.

    standing = Standing(0.05, path=state / "standing.json")
    watch = standing.watch(identity_of(composition), 0.97, proven=is_proven(composition, 0.97, 0.95))

The file holds the state and evidence of every watch and the delta spent so far; other components may store
parts of their own in it (`keep`). It is written before a change of state, or another proof, takes effect, and
whoever causes it waits for the disk. Otherwise it is written at most once per second: a kill loses at most a
second of evidence, whatever the audits showed.

Good evidence ages: what was proven on requests of more than a week ago has to be proven again. It also counts
only where it was collected, if `origin` names the source of the requests. Bad evidence counts everywhere and
does not age: stops and spent delta stay. Where the file was damaged, it is not known what was stopped, so
versions that it does not name are on probation from then on, unless they were made later.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from gati.composition.composition import REDUCED, Composition
from gati.errors import AdaptError
from gati.guard.proof import AT_ONCE, Duration, Spending
from gati.guard.standing_file import CLOCK_ERROR_S, DeltaShares, Saved, Snapshot, SnapshotFile, read_saved
from gati.guard.watch import Event, OnEvent, Watch

Heed = Callable[[Any, Any], None]
_log = logging.getLogger(__name__)

_SAVED_EVERY_S = 1.0
_MOST_VERSIONS = 100  # without a certificate: forgotten, they are on probation
_WEEK_S = 7 * 86_400.0
_DAMAGED = KeyError, TypeError, ValueError, OverflowError, AttributeError, AdaptError


def identity_of(composition: Composition) -> str:
    """Identifies caches: a digest of the exits, the backend, and the creation time."""
    exits = [
        (leaving.trial_id, leaving.block, leaving.variant, leaving.threshold, leaving.placement)
        for leaving in composition.exits
    ]
    named = (composition.name, composition.created, composition.checkpoint_sha256, composition.backend)
    return hashlib.sha256(json.dumps([*named, exits]).encode()).hexdigest()[:24]


def of_rest(identity: str) -> str:
    """Identifies the same caches on the requests that memory leaves."""
    return f"{identity}-after-memory"


def created_s(composition: Composition) -> float | None:
    """When its caches were chosen, in seconds since 1970; None if it does not say so."""
    try:
        return datetime.fromisoformat(composition.created).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def is_reference(composition: Composition) -> bool:
    """Whether there is nothing to prove: no caches, and a network as precise as the reference."""
    return not composition.exits and not composition.backend.endswith(REDUCED)


def is_proven(composition: Composition, accuracy: float, confidence: float) -> bool:
    """Whether a certificate covers agreement of `accuracy` at `confidence`, or there is nothing to prove."""
    return is_reference(composition) or composition.proves(accuracy, confidence)


class Standing:
    """The watches of one model's versions, and the delta that all their proofs share.

    `clock` times writing, `now` gives seconds since 1970: without any audit, proofs are believed for a
    week, and only for requests of the same `origin`, a name that is written to the file. `delta`
    bounds the chance that any proof of this model errs, over its whole life: each proof takes a share
    (`gati.guard.proof.Spending`), and `lasts` at least so long. `path` None keeps nothing. Not thread-safe,
    except `write`.
    """

    def __init__(
        self,
        delta: float,
        path: Path | None = None,
        *,
        audits_to_false_alarm: float = 10_000.0,
        lasts: Duration = AT_ONCE,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        origin: str = "",
    ) -> None:
        self._now = now
        self.origin = origin
        self.elsewhere = False  # something is not believed because it was proven for another origin
        self._audits_to_false_alarm, self._lasts = audits_to_false_alarm, lasts
        self._clock = clock
        self._path, self._file = path, None if path is None else SnapshotFile(path)
        saved = Saved() if path is None else read_saved(path, now())
        self._watches: dict[str, Watch] = {}
        self._said: dict[str, Any] = {}  # each of them when its last audit was taken in
        self._kept = saved.versions  # the others
        self._heard_s, self._deltas = saved.heard_s, saved.deltas  # of both
        self._certified = saved.certified  # never forgotten: without their state they would serve
        self._parts: dict[str, Callable[[], Any]] = {}
        self._heeding: dict[str, Heed] = {}
        self._kept_parts = saved.parts
        self._lost, self._lost_s = saved.lost, saved.lost_s  # for later runs, too
        self.distrusted = saved.lost  # why the saved state is not trusted
        self.spending = Spending(delta, saved.shares.taken)
        self.spending.begin_after(saved.shares.of_other_parts(delta))
        self.shares_are_own = saved.shares.are_of(delta)  # the file says so
        self.is_shared = False  # another process goes on with what the file says
        self._before: dict[str, Any] = {}  # then: versions as it says
        self._saved_s, self._spent_said = -_SAVED_EVERY_S, 0
        self._taken = 0  # snapshots

    @property
    def path(self) -> Path | None:
        """The file that it is written to; None if nothing is saved."""
        return self._path

    @property
    def names(self) -> Collection[str]:
        """The names of all versions of which something is known."""
        return self._watches.keys() | self._kept.keys()

    @property
    def is_owned(self) -> bool:
        """Whether this process may write that file, and those next to it, now."""
        return self._file is not None

    def watch(
        self,
        identity: str,
        agreement: float,
        *,
        proven: bool,
        settings: int = 1,
        delta: float | None = None,
        created_s: float | None = None,
        on_event: OnEvent | None = None,
        others: Collection[str] = (),
    ) -> Watch:
        """The watch of a version with that number of settings: the saved one, or a new one.

        If the saved watch had another promise or less confidence, or a certificate that is not valid any
        more, or the file was damaged after the version was made (`created_s`), the version is on probation.
        What guards withdrew of `others`, watches of the same caches, a new one must prove, too. All its
        proofs together err with probability at most `delta`, by default the model's.
        """
        bound = self.spending.delta if delta is None else delta
        if proven:
            self._certified.add(identity)

        spend = partial(self._share, identity, bound)

        def told(event: Event) -> None:
            self.save()
            if on_event is not None:
                on_event(event)

        def restored(name: str) -> Watch | None:
            known = self._known(name)
            try:
                return known and Watch.from_json(known, spend=spend, lasts=self._lasts, on_event=told)
            except _DAMAGED as error:
                self._distrust(f"{self._path}: version {name}: {error}")
                return None

        before = restored(identity)
        if before is not None and abs(before.agreement - agreement) < 1e-9 and before.settings == settings:
            if identity not in self._watches:  # saved by an earlier run
                self._doubt(before, self._kept[identity].get("origin", ""), self._heard_s.get(identity))
            if proven:  # perhaps it was certified since
                before.certify()
            self.hold_to(identity, before, proven=proven, delta=bound)
            if self._is_shared(identity):
                before.prove_apart()
            return self._take(identity, before)
        self._deltas[identity] = bound
        like = [each for each in map(restored, others) if each is not None]
        trusted = self._is_trusted(created_s)
        watch = Watch(
            agreement,
            spend=spend,
            proven=proven and trusted,
            settings=settings,
            audits_to_false_alarm=self._audits_to_false_alarm,
            lasts=self._lasts,
            on_event=told,
        )
        watch.certifiable = settings if trusted else 0
        for each in like:
            watch.take_over(each)
            watch.withdrawals = ()  # its own guard withdrew none
        if before is not None:
            watch.take_over(before)
        return self._take(identity, watch)

    def certify(self, identity: str, watch: Watch) -> None:
        """Believe a certificate that a version with a known watch was given since."""
        self._certified.add(identity)
        watch.certify()

    def hold_to(self, identity: str, watch: Watch, *, proven: bool, delta: float) -> None:
        """Believe of a known watch what is still certified, and what was proven as surely as `delta` asks."""
        before, self._deltas[identity] = self._deltas.get(identity, delta), delta
        if watch.certified and not proven:  # the certificate was revoked, or is less sure than is asked now
            watch.revoke()
            if watch.certifiable == watch.settings:  # no guard has withdrawn any: no stop to remember
                self._certified.discard(identity)
        if delta < before - 1e-9:
            watch.begin_anew()

    def watch_only(self, identities: Collection[str]) -> None:
        """Keep the other versions' watches as they are in the file only, for when they are watched again."""
        names = {*identities, *map(of_rest, identities)}
        for name in [each for each in self._watches if each not in names]:
            self._kept[name] = self._written_down(name)
            del self._watches[name], self._said[name]
        for name in self._too_many(self._kept):
            for of in (self._kept, self._heard_s, self._deltas):
                of.pop(name, None)

    def keep(self, name: str, state: Callable[[], Any], heed: Heed | None = None) -> None:
        """Include the JSON values that `state` returns in every snapshot from now on.

        `heed` gets what was kept before, and what another process (`is_shared`) left, once that has ended.
        """
        self._parts[name] = state
        self._heeding |= {} if heed is None else {name: heed}

    def kept(self, name: str, max_age_s: float) -> Any:
        """The part saved under `name`; None if there is none or it is older than `max_age_s`."""
        part = self._kept_parts.get(name)
        if not isinstance(part, dict) or not self._is_recent(part.get("saved_s"), max_age_s):
            return None
        return part.get("state")

    def audited(self) -> Snapshot | None:
        """Call after an audit: returns a snapshot to write, at most once per second.

        Call it under the caller's lock; write the snapshot without, so that no audit waits for the disk.
        """
        if self.spending.used != self._spent_said:  # another proof took a share of delta
            self._spent_said = self.spending.used
            self.save()
        due = self._file is not None and self._clock() - self._saved_s >= _SAVED_EVERY_S
        return self.snapshot() if due else None

    def save(self) -> None:
        """Write everything now."""
        if self._file is not None:
            self.write(self.snapshot())

    def write(self, snapshot: Snapshot) -> None:
        """Write a snapshot, unless a later one was written. Thread-safe.

        A failure is logged, and the file stays as it was.
        """
        if self._file is not None:
            self._file.write(snapshot)

    def snapshot(self) -> Snapshot:
        """Everything as it is now."""
        self._saved_s, self._spent_said = self._clock(), self.spending.used
        self._taken += 1
        versions = {**self._kept, **{name: self._written_down(name) for name in self._watches}}
        for name in self._too_many(versions):
            del versions[name]
        parts = {name: {"saved_s": self._now(), "state": state()} for name, state in self._parts.items()}
        spending = self.spending
        saved = Saved(
            versions=versions,
            parts={**self._kept_parts, **parts},
            shares=DeltaShares(delta=spending.delta, taken=spending.used, since=spending.since),
            lost=self._lost,
            lost_s=self._lost_s,
        )
        return Snapshot(self._taken, saved.text())

    def take_in(self, saved: Saved, on_both: Callable[[str, Watch], None]) -> list[str]:
        """Go on with a file that was shared with another process, which has left `saved` there and ended.

        That process knows best about versions that were not watched here meanwhile; returns their names. Of
        the others, `on_both` gets the name and the watch; proofs with more audits there replace those here.
        """
        if saved.lost:
            self.distrusted = self._lost = saved.lost
            self._lost_s = max(self._lost_s, saved.lost_s)
        before_parts = {name: self.kept(name, math.inf) for name in self._heeding}
        self._kept_parts = saved.parts
        for name, heed in self._heeding.items():
            heed(before_parts[name], self.kept(name, math.inf))
        self._certified |= saved.certified
        theirs = []
        for name, each in saved.versions.items():
            if name in self._watches:
                on_both(name, self._watches[name])
                self._take_proofs(name, saved)
            elif name in self._kept and not self._is_shared(name):
                watch = self._restored(name, self._kept[name])
                on_both(name, watch)
                self._kept[name] = {**self._kept[name], **watch.to_json()}
            else:
                self._kept[name] = each
                self._deltas[name], self._heard_s[name] = saved.deltas[name], saved.heard_s[name]
                theirs.append(name)
        for name in [each for each in self._kept if self._is_shared(each)]:
            with suppress(*_DAMAGED):  # what became of its proofs there is not known
                watch = self._restored(name, self._kept[name])
                watch.prove_apart()
                self._kept[name] = {**self._kept[name], **watch.to_json()}
        self.is_shared, self._before = False, {}
        if self._file is not None:
            self._file.skip(self._taken)  # they do not know of what was taken in
        return theirs

    def _is_shared(self, name: str) -> bool:
        """Whether a version is known only as the file says, with which another process goes on."""
        return name in self._kept and self._kept[name] is self._before.get(name)

    def _take_proofs(self, name: str, saved: Saved) -> None:
        """Take the proofs of a version in `saved`, if they are recent and as sure as is asked here."""
        if saved.deltas[name] <= self._deltas[name] + 1e-9 and self._is_recent(saved.heard_s[name], _WEEK_S):
            with suppress(*_DAMAGED):
                self._watches[name].take_proofs(self._restored(name, saved.versions[name]))

    def _restored(self, name: str, kept: Any) -> Watch:
        """The watch of a version that was written down as `kept`. Raises any of `_DAMAGED`."""
        return Watch.from_json(kept, spend=partial(self._share, name, self._deltas[name]), lasts=self._lasts)

    def _share(self, identity: str, delta: float) -> float:
        """The delta of the next proof of a version; `delta` bounds all of them if nothing else is known."""
        return self.spending.next() * (self._deltas.get(identity, delta) / self.spending.delta)

    def _written_down(self, identity: str) -> dict[str, Any]:
        """The watch as JSON values, with the time of its last audit."""
        stands = self._watches[identity].to_json()
        if stands != self._said.get(identity):
            self._said[identity], self._heard_s[identity] = stands, self._now()
        more = {
            "certified": identity in self._certified,
            "heard_s": self._heard_s[identity],
            "delta": self._deltas[identity],
        }
        return {**stands, **more, **({"origin": self.origin} if self.origin else {})}

    def _too_many(self, names: Collection[str]) -> list[str]:
        """Those without a certificate that are to be forgotten: the oldest."""
        others = [name for name in names if name not in self._certified]
        return others[: max(0, len(others) - _MOST_VERSIONS)]

    def _doubt(self, watch: Watch, origin: Any, heard_s: Any) -> None:
        """Forget what was proven of a saved watch too long ago, or elsewhere."""
        if not self._is_recent(heard_s, _WEEK_S):
            watch.forget()
        epoch = watch.epoch
        if origin != self.origin:
            watch.forget()
            self.elsewhere |= watch.epoch > epoch

    def _is_recent(self, then_s: Any, max_age_s: float) -> bool:
        """Whether that time is at most `max_age_s` ago, and not in the future unless any age will do."""
        if isinstance(then_s, bool) or not isinstance(then_s, int | float):
            return False
        return max_age_s == math.inf or -CLOCK_ERROR_S <= self._now() - then_s <= max_age_s

    def _take(self, identity: str, watch: Watch) -> Watch:
        self._kept.pop(identity, None)
        self._watches[identity] = watch
        self._said[identity] = watch.to_json()
        self._heard_s.setdefault(identity, self._now())
        watch.on_restart = self.save
        self.save()
        return watch

    def _known(self, identity: str) -> Any:
        if identity in self._watches:
            return self._watches[identity].to_json()
        return self._kept.get(identity)

    def _is_trusted(self, created_s: float | None) -> bool:
        """Whether nothing that is known of a version, made at that time, can have been lost."""
        if not self.distrusted:
            return True
        earliest_s = self._lost_s + CLOCK_ERROR_S
        return created_s is not None and earliest_s < created_s <= self._now() + CLOCK_ERROR_S

    def _distrust(self, reason: str) -> None:
        self.distrusted, self._lost_s = reason, max(self._lost_s, self._now())
        _log.warning("the state of versions is unknown; they are on probation: %s", reason)
