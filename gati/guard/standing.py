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
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from gati.composition.composition import REDUCED, Composition
from gati.documents import DocumentKind
from gati.errors import AdaptError, StorageError
from gati.files import atomic_write_text
from gati.guard.proof import AT_ONCE, Duration, Spending
from gati.guard.watch import Event, OnEvent, Watch

_log = logging.getLogger(__name__)

_KIND = DocumentKind(1, AdaptError, "versions are on probation until they are proven anew", compact=True)
_SAVED_EVERY_S = 1.0
_MOST_VERSIONS = 100  # without a certificate: forgotten, they are on probation
_PRESUMED_SPENT = 20  # proofs, where the count was lost
_WEEK_S = 7 * 86_400.0
_CLOCK_ERROR_S = 60.0


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


def is_proven(composition: Composition, accuracy: float, confidence: float) -> bool:
    """Whether a certificate covers agreement of `accuracy` at `confidence`.

    True without caches, if the network computes as precisely as the reference.
    """
    is_reference = not composition.exits and not composition.backend.endswith(REDUCED)
    return is_reference or composition.proves(accuracy, confidence)


class Snapshot(NamedTuple):
    """The content of the file at one moment; later snapshots have higher numbers."""

    number: int
    text: str


@dataclass(frozen=True, kw_only=True)
class _Spent:
    """One part of the file: the number of shares of `delta` that proofs took."""

    delta: float
    spent: int


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """The rest: each watch (`Watch.to_json`) with the time of its last audit, and the parts of others.

    `distrusted`: why an earlier file was lost, at `lost_s`; versions of before that are not among these are
    on probation.
    """

    versions: dict[str, Any]
    parts: dict[str, Any] = field(default_factory=dict)
    distrusted: str = ""
    lost_s: float | None = None


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
        self._heard_s: dict[str, float] = {}  # when the last audit of a version was taken in, since 1970
        self._deltas: dict[str, float] = {}  # which all proofs of a watch keep to
        self._said: dict[str, Any] = {}  # its watch at that time
        self._parts: dict[str, Callable[[], Any]] = {}
        self._kept_parts: dict[str, Any] = {}
        self._path = path
        self._audits_to_false_alarm, self._lasts = audits_to_false_alarm, lasts
        self._clock = clock
        self._saved_s, self._spent_said = -_SAVED_EVERY_S, 0
        self._taken = self._written = 0  # snapshots
        self._writing = threading.Lock()
        self._failing = False
        self._watches: dict[str, Watch] = {}
        self._kept: dict[str, Any] = {}
        self._certified: set[str] = set()  # never forgotten: without their state they would serve
        self.distrusted = ""  # why the saved state is not trusted
        self._lost = ""  # the same, if it concerns versions of which nothing is known, in later runs, too
        self._lost_s = 0.0  # when that was found
        self.spending = Spending(delta)
        if path is not None and path.exists():
            self._read(path)

    @property
    def path(self) -> Path | None:
        """The file that it is written to; None if nothing is saved."""
        return self._path

    @property
    def is_owned(self) -> bool:
        """Whether this process may write that file, and those next to it, now."""
        return self._path is not None

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
    ) -> Watch:
        """The watch of a version with that number of settings: the saved one, or a new one.

        If the saved watch had another promise or less confidence, or a certificate that is not valid any
        more, or the file was damaged after the version was made (`created_s`), the version is on probation.
        All its proofs together err with probability at most `delta`, by default the model's.
        """
        bound = self.spending.delta if delta is None else delta
        if proven:
            self._certified.add(identity)

        def spend() -> float:
            return self.spending.next() * (self._deltas.get(identity, bound) / self.spending.delta)

        def told(event: Event) -> None:
            self.save()
            if on_event is not None:
                on_event(event)

        known, before = self._known(identity), None
        if known is not None:
            try:
                before = Watch.from_json(known, spend=spend, lasts=self._lasts, on_event=told)
            except (KeyError, TypeError, ValueError, AttributeError, AdaptError) as error:
                self._distrust(f"{self._path}: version {identity}: {error}")
        if before is not None and abs(before.agreement - agreement) < 1e-9 and before.settings == settings:
            if identity not in self._watches:  # saved by an earlier run
                self._doubt(before, known.get("origin", ""), self._heard_s.get(identity))
            if proven:  # perhaps it was certified since
                before.certify()
            self.hold_to(identity, before, proven=proven, delta=bound)
            return self._take(identity, before)
        self._deltas[identity] = bound
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
        if before is not None:
            watch.take_over(before)
        return self._take(identity, watch)

    def hold_to(self, identity: str, watch: Watch, *, proven: bool, delta: float) -> None:
        """Believe of a known watch what is still certified, and what was proven as surely as `delta` asks."""
        before, self._deltas[identity] = self._deltas.get(identity, delta), delta
        if watch.certified and not proven:  # the certificate was revoked, or is less sure than is asked now
            if watch.certifiable == watch.settings:  # no guard has withdrawn any: no stop to remember
                self._certified.discard(identity)
            watch.revoke()
        if delta < before - 1e-9:
            watch.begin_anew()

    def watch_only(self, identities: Collection[str]) -> None:
        """Keep the other versions' watches as they are in the file only, for when they are watched again."""
        names = {*identities, *map(of_rest, identities)}
        for name in [each for each in self._watches if each not in names]:
            self._kept[name] = self._written_down(name)
            del self._watches[name], self._said[name]
        others = [name for name in self._kept if name not in self._certified]
        for name in others[: max(0, len(others) - _MOST_VERSIONS)]:
            for of in (self._kept, self._heard_s, self._deltas):
                of.pop(name, None)

    def keep(self, name: str, state: Callable[[], Any]) -> None:
        """Include the JSON values that `state` returns in every snapshot from now on."""
        self._parts[name] = state

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
        due = self._path is not None and self._clock() - self._saved_s >= _SAVED_EVERY_S
        return self._snapshot() if due else None

    def save(self) -> None:
        """Write everything now."""
        if self._path is not None:
            self.write(self._snapshot())

    def write(self, snapshot: Snapshot) -> None:
        """Write a snapshot, unless a later one was written. Thread-safe.

        A failure is logged, and the file stays as it was.
        """
        if self._path is None:
            return
        with self._writing:
            if snapshot.number <= self._written:
                return
            self._written = snapshot.number
            try:
                atomic_write_text(self._path, snapshot.text)
            except StorageError as error:  # caches must stop even if the file cannot be written
                if not self._failing:
                    _log.error("cannot save the state and evidence of versions: %s", error)
                self._failing = True
            else:
                self._failing = False

    def _snapshot(self) -> Snapshot:
        self._saved_s, self._spent_said = self._clock(), self.spending.used
        self._taken += 1
        versions = {**self._kept, **{name: self._written_down(name) for name in self._watches}}
        others = [name for name in versions if name not in self._certified]
        for name in others[: max(0, len(others) - _MOST_VERSIONS)]:
            del versions[name]
        parts = {name: {"saved_s": self._now(), "state": state()} for name, state in self._parts.items()}
        spent = _Spent(delta=self.spending.delta, spent=self.spending.used)
        lost_s = self._lost_s if self._lost else None
        parts = {**self._kept_parts, **parts}
        kept = _Kept(versions=versions, parts=parts, distrusted=self._lost, lost_s=lost_s)
        return Snapshot(self._taken, _KIND.text_of({**vars(spent), **vars(kept)}))

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
        return max_age_s == math.inf or -_CLOCK_ERROR_S <= self._now() - then_s <= max_age_s

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

    def _read(self, path: Path) -> None:
        where = str(path)
        try:
            document = _KIND.read(path)
            spent = _KIND.record(_Spent, document, where)  # counts even if the rest of the file is damaged
        except AdaptError as error:
            self.spending.used = _PRESUMED_SPENT
            self._lose(error)
            return
        self.spending.used = max(0, spent.spent)
        try:
            kept = _KIND.record(_Kept, document, where)
            with _KIND.reading(where):
                written_s = path.stat().st_mtime  # for files without times
        except AdaptError as error:
            self._lose(error)
            return
        self._kept_parts = kept.parts
        if kept.distrusted:
            self.distrusted = self._lost = kept.distrusted
            self._lost_s = written_s if kept.lost_s is None else kept.lost_s
            _log.warning("an earlier state of versions was lost; others are on probation: %s", self._lost)
        for name, each in kept.versions.items():
            try:
                with _KIND.reading(f"{where}: version {name}"):
                    self._read_version(name, each, spent.delta, written_s)
            except AdaptError as error:  # the others are believed
                self._lose(error)

    def _read_version(self, name: str, kept: dict[str, Any], model_delta: float, written_s: float) -> None:
        """Take in one version. Raises like a mapping or a number if it is damaged, and leaves it out."""
        delta = float(kept.get("delta", model_delta))  # missing in older files, like all others here
        heard_s = float(kept.get("heard_s", written_s))
        if not 0.0 < delta < 1.0:
            raise ValueError(f"delta is {delta!r}")
        self._kept[name] = {**kept, "delta": delta}
        self._deltas[name], self._heard_s[name] = delta, heard_s
        if kept.get("certified", kept.get("state") == "stopped"):
            self._certified.add(name)

    def _is_trusted(self, created_s: float | None) -> bool:
        """Whether nothing that is known of a version, made at that time, can have been lost."""
        if not self.distrusted:
            return True
        earliest_s = self._lost_s + _CLOCK_ERROR_S
        return created_s is not None and earliest_s < created_s <= self._now() + _CLOCK_ERROR_S

    def _lose(self, error: AdaptError) -> None:
        """What was known of some versions is lost, for later runs, too."""
        self._distrust(str(error))
        self._lost = str(error)

    def _distrust(self, reason: str) -> None:
        self.distrusted, self._lost_s = reason, self._now()
        _log.warning("the state of versions is unknown; they are on probation: %s", reason)
