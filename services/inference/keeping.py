"""The state and evidence of a served model's versions (`gati.guard.standing`), in a file.

The file is `STATE/NAME.json`, by default in the library's folder `standing`. Further replicas have
`NAME@1.json` and so on, with separate proofs and a share of the total error probability. If the guard of one
replica stops caches or withdraws their looser settings, the other replicas must prove them again, too: they
read its file at startup and while they serve, and note what they have heeded. A process that cannot write its
file reads it, keeps changes in memory only and logs a warning. So does one that finds it locked by another
process, such as one that still drains, until that ends: then it takes the file over, with what the other one
wrote last.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any

from gati.errors import one_line
from gati.guard.proof import Duration
from gati.guard.standing import Snapshot, Standing, of_rest
from gati.guard.watch import OnEvent, Watch, Withdrawal, withdrawals_in
from services.inference.settings import InferenceSettings
from services.locks import KEPT, hold

_log = logging.getLogger("gati.inference")

_PART = "heeded"
_DELTA = 0.05  # error probability of all proofs, scaled to that of each version
_TRIED_EVERY_S = 1.0
_SHARES_LEFT = 20  # of delta, that another process at the same file may take meanwhile


class ServedStanding(Standing):
    """A `Standing` that is written by a separate thread.

    Await `recorded` before an answer that may rest on a change of state leaves the process. Versions with
    equal caches share a watch. `others` are the files of other replicas. `writable` False: this process only
    reads the file at `path`; with `lock`, until the process that holds that lock has ended. A proof takes at
    least `proof_s`.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        writable: bool = True,
        lock: Path | None = None,
        replicas: int = 1,
        others: Sequence[Path] = (),
        proof_s: float = 0.0,
    ) -> None:
        super().__init__(_DELTA / replicas, path, lasts=Duration(proof_s))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gati-standing")
        self._writable, self._lock = writable, lock
        self._held: IO[bytes] | None = None  # that lock
        self._recording: Future[None] | None = None  # of the last change of state
        self._tried_s = -math.inf
        self._others = others
        self._unreadable: set[tuple[Path, str]] = set()  # files of others and why, as logged
        self._shared: dict[str, Watch] = {}
        self._least_deltas: dict[str, float] = {}  # that versions with equal caches ask for
        self._listeners: dict[str, OnEvent] = {}
        self._heeded = _numbers(self.kept(_PART, math.inf))
        self.keep(_PART, lambda: {name: dict(each) for name, each in self._heeded.items()})
        self._before: dict[str, Any] = {}  # versions as another process had written them by now
        self._spent_before = self.spending.used
        if path is not None and lock is not None:
            self._before = dict(self._kept)
            for name, withdrawals in _all_withdrawals(self._before).items():
                self._heeded.setdefault(name, {})[path.name] = withdrawals[-1].number
            self.spending.used += _SHARES_LEFT
        self._withdrawn_there = self._compared = self._withdrawn()

    @property
    def path(self) -> Path | None:
        """The file that is written, now or once it is free; None if it never is."""
        return super().path if self._writable or self._lock is not None else None

    @property
    def is_owned(self) -> bool:
        """Whether this process may write that file, and those next to it, now."""
        return super().is_owned and self._writable

    def of(
        self,
        identity: str,
        agreement: float,
        *,
        proven: bool,
        delta: float,
        on_event: OnEvent,
        settings: int = 1,
        created_s: float | None = None,
    ) -> Watch:
        """The watch of a version, shared by versions with equal caches and promise; see `watch`.

        They may differ in their certificates and in `delta`: only what holds for all of them is believed. But
        a certificate that was given or revoked since the others were loaded counts for them, too, if it is as
        sure as each of them asks.
        """
        self._take_over()
        self._listeners[identity] = on_event
        own, delta = delta, min(delta, self._least_deltas.get(identity, delta))
        self._least_deltas[identity] = delta
        known = self._shared.get(identity)
        if known is None or known.agreement != agreement or known.settings != settings:
            known = self._shared[identity] = self.watch(
                identity,
                agreement,
                proven=proven,
                settings=settings,
                delta=delta,
                created_s=created_s,
                on_event=lambda event: self._listeners.get(identity, on_event)(event),
            )
            self._heed(identity, known)
        else:
            if proven and own <= delta:
                self._certified.add(identity)
                known.certify()
                self.save()
            self.hold_to(identity, known, proven=proven, delta=delta)
        return known

    def watch_only(self, identities: Collection[str]) -> None:
        """As `Standing.watch_only`; what versions with other caches asked for binds no later ones."""
        super().watch_only(identities)
        for name in self._shared.keys() - {*identities, *map(of_rest, identities)}:
            del self._shared[name], self._least_deltas[name], self._listeners[name]
        for name in self._heeded.keys() - self._watches.keys() - self._kept.keys():
            del self._heeded[name]  # of forgotten versions, nothing is believed either

    def audited(self) -> None:
        """Call after an audit changed a watch: evidence is written soon, without waiting for the disk."""
        self._take_over()
        snapshot = super().audited()
        if snapshot is not None:
            self._thread.submit(self._exchange, snapshot)
        if self._withdrawn_there is not self._compared:
            self._compared = self._withdrawn_there
            for identity in self._compared.keys() & self._shared.keys():
                self._heed(identity, self._shared[identity])

    def _heed(self, identity: str, watch: Watch) -> None:
        """What the guard of another replica has withdrawn must be proven again here, too, each time once."""
        own = self._path.name if self._path is not None and self._writable else None  # what was taken over
        there = {file: each for file, each in self._compared.get(identity, {}).items() if file != own}
        heeded = self._heeded.get(identity, {})
        left = [
            each.left
            for file, withdrawals in there.items()
            for each in withdrawals
            if not each.number <= heeded.get(file, 0) <= withdrawals[-1].number  # above it, the file is new
        ]
        if not left:
            return
        self._heeded[identity] = heeded | {file: each[-1].number for file, each in there.items()}
        level, before = min(left), watch.level
        watch.restrict(level)
        if level < before:
            _log.warning(
                "caches stopped by the guard of another replica",
                extra={"caches": identity, "settings_left": level},
            )

    def _exchange(self, snapshot: Snapshot) -> None:
        self.write(snapshot)
        self._withdrawn_there = self._withdrawn()

    def _withdrawn(self) -> dict[str, dict[str, tuple[Withdrawal, ...]]]:
        """What the guards of other replicas have withdrawn, by caches and file.

        Files that are not readable are ignored, with one warning for each reason.
        """
        withdrawn: dict[str, dict[str, tuple[Withdrawal, ...]]] = {}
        own = [] if self._path is None or self._lock is None else [self._path]  # another process writes it
        for path in (*self._others, *own):
            try:
                versions = json.loads(path.read_text(encoding="utf-8"))["versions"]
                found = _all_withdrawals(versions, partial(self._warn_once, path))
            except FileNotFoundError:
                continue  # that replica has never been started
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                self._warn_once(path, one_line(error))
                continue
            for name, withdrawals in found.items():
                withdrawn.setdefault(name, {})[path.name] = withdrawals
        return withdrawn

    def _warn_once(self, path: Path, reason: str) -> None:
        if (path, reason) not in self._unreadable:
            self._unreadable.add((path, reason))
            _log.warning(
                "the state file of another replica cannot be read; what its guard stops may answer here",
                extra={"file": str(path), "reason": reason},
            )

    def write(self, snapshot: Snapshot) -> None:
        """As `Standing.write`, if this process owns the file."""
        if self._writable:
            super().write(snapshot)

    def save(self) -> None:
        """Have everything written by the thread, so that requests do not wait for the disk."""
        if self.is_owned:
            self._recording = self._thread.submit(self.write, self._snapshot())
            self._recording.add_done_callback(_ended)

    async def recorded(self) -> None:
        """Wait until all changes of state so far are written, or the log says why they cannot be."""
        if self._recording is not None and not self._recording.done():
            await asyncio.wait([asyncio.wrap_future(self._recording)])

    def close(self) -> None:
        """Write everything and stop the thread."""
        self._tried_s = -math.inf
        self._take_over()
        self.save()
        self._thread.shutdown()

    def unlock(self) -> None:
        """Let other processes have the file, if it was taken over."""
        if self._held is not None:
            self._held.close()

    def _take_over(self) -> None:
        """Own the file from now on, if it is waited for and the process that owned it has ended."""
        path, now_s = self._path, self._clock()
        if path is None or self._lock is None or now_s - self._tried_s < _TRIED_EVERY_S:
            return
        self._tried_s = now_s
        held = hold(self._lock)
        if isinstance(held, str):
            return
        self._compared = self._withdrawn_there = self._withdrawn()
        self._held, self._lock = held, None
        self._take_in(path)
        for identity in self._compared.keys() & self._shared.keys():
            self._heed(identity, self._shared[identity])
        self._written = self._taken  # what was written down before does not know of what was taken in
        self._writable = True
        self.save()
        _log.info("the state of versions is written from now on", extra={"file": str(path)})

    def _share(self, delta: float) -> float:
        """The delta of another proof of caches whose proofs may all together err with `delta`."""
        return self.spending.next() * (delta / self.spending.delta)

    def _take_in(self, path: Path) -> None:
        """Take in what the process that owned the file wrote after this one had read it.

        What it stopped is stopped, as if it were another replica. It knows best about the versions that were
        not loaded here; of others, only its withdrawals count.
        """
        last = Standing(self.spending.delta, path)
        took_none = self.spending.used == self._spent_before + _SHARES_LEFT
        own = self._spent_before if took_none else self.spending.used
        self.spending.used = max(own, last.spending.used)
        if last.distrusted:
            self.distrusted, self._lost, self._lost_s = last.distrusted, last._lost, last._lost_s
        self._kept_parts = last._kept_parts
        self._certified |= last._certified
        heeded_there = _numbers(last.kept(_PART, math.inf))
        before, there = _all_withdrawals(self._before), _all_withdrawals(last._kept)
        for name, each in last._kept.items():
            watch, kept = self._watches.get(name), self._kept.get(name)
            if watch is None and (kept is None or kept is self._before.get(name)):
                self._kept[name] = each
                self._deltas[name], self._heard_s[name] = last._deltas[name], last._heard_s[name]
                self._heeded |= {name: heeded_there[name]} if name in heeded_there else {}
                continue
            here = watch or Watch.from_json(self._kept[name], spend=partial(self._share, self._deltas[name]))
            self._heed(name, here)
            here.withdrawals = _continued(here.withdrawals, before.get(name, ()), there.get(name, ()))
            if watch is None:
                self._kept[name] = {**self._kept[name], **here.to_json()}


def open_standing(settings: InferenceSettings) -> tuple[ServedStanding, Callable[[], None]]:
    """Open the standing of a model's versions; returns it with a function that unlocks its file.

    Changes are kept in memory only if the file cannot be written, or as long as another process has it.
    """
    folder = settings.state_folder
    opened = partial(ServedStanding, replicas=settings.replicas, proof_s=settings.proof_s)
    if folder is None:
        return opened(None), _nothing
    path = folder / f"{settings.label}.json"
    labels = [settings.model_copy(update={"replica": each}).label for each in range(settings.replicas)]
    others = [folder / f"{label}.json" for label in labels if label != settings.label]
    lock_path = path.with_suffix(".lock")
    lock = hold(lock_path)
    if lock == KEPT:
        _log.warning(
            "state is kept in memory until that process ends; give each server a `state` folder of its own",
            extra={"file": str(path), "reason": lock},
        )
        waits = opened(path, writable=False, lock=lock_path, others=others)
        return waits, waits.unlock
    if isinstance(lock, str):
        _log.warning(
            "the state of versions is kept in memory only; set `state` to a folder",
            extra={"file": str(path), "reason": lock},
        )
        return opened(path, writable=False, others=others), _nothing
    return opened(path, others=others), lock.close


def _all_withdrawals(
    versions: Mapping[str, Any], tell: Callable[[str], None] = lambda why: None
) -> dict[str, tuple[Withdrawal, ...]]:
    """What guards have withdrawn, by caches, in `versions` of a file; `tell` gets what is wrong with one."""
    found = {}
    for name, each in versions.items():
        try:
            withdrawals = _withdrawals_of(each)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            tell(f"{name}: {one_line(error)}")
            continue
        if withdrawals:
            found[name] = withdrawals
    return found


def _continued(
    here: Sequence[Withdrawal], before: Sequence[Withdrawal], there: Sequence[Withdrawal]
) -> tuple[Withdrawal, ...]:
    """The withdrawals of two processes that both began with those of `before`: `here` after `there`."""
    since = before[-1].number if before else 0
    if not there or there[-1].number <= since:
        return tuple(here)
    found, more = list(there), there[-1].number - since
    for number, left in here:
        if number > since:
            found = [*(each for each in found if each.left < left), Withdrawal(number + more, left)]
    return tuple(found)


def _withdrawals_of(watch: Mapping[str, Any]) -> tuple[Withdrawal, ...]:
    """What the guard of a saved watch has withdrawn.

    Settings that are on probation for other reasons are none of its doing: their certificate was revoked, or
    the file was damaged. An older file says it of certified and of stopped caches only.
    """
    if "withdrawals" in watch:
        return withdrawals_in(watch)
    if watch["state"] == "stopped":
        return (Withdrawal(1, 0),)
    return withdrawals_in(watch, _left_before(watch)) if watch.get("certified") else ()


def _left_before(watch: Mapping[str, Any]) -> int | None:
    """How many settings a guard may have left, in a file of before `withdrawn_to` was written."""
    level = watch.get("certified_level")
    settings = len(watch["guards"]) if "guards" in watch else 1
    return level if level is not None and level < settings else None


def _ended(recording: Future[None]) -> None:
    error = recording.exception()
    if error is not None:
        _log.error("the state of versions cannot be written", exc_info=error)


def _numbers(kept: Any) -> dict[str, dict[str, int]]:
    """The last withdrawal that was heeded, by caches and file, as an earlier run saved it."""
    if not isinstance(kept, dict):
        return {}
    return {
        name: {file: number for file, number in each.items() if isinstance(number, int)}
        for name, each in kept.items()
        if isinstance(each, dict)
    }


def _nothing() -> None:
    """Do nothing: there is no file to unlock."""
