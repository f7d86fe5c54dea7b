"""The state and evidence of a served model's versions (`gati.guard.standing`), in a file.

The file is `STATE/NAME.json`, by default in the library's folder `standing`. Further replicas have
`NAME@1.json` and so on, with separate proofs and an equal part of the total error probability. If the number
of replicas changes, what all files say was spent stays spent (`_begin_after_others`). If the guard of one
replica stops caches or withdraws their looser settings, the other replicas must prove them again, too: they
read its file at startup and every few seconds (`look`), and note what they have heeded. So it is with the
same caches under other promises, except that what broke a stricter promise may keep a looser one. A process
that cannot write its file reads it, keeps changes in memory only and logs a warning. So does one that finds
it locked by another process, such as one that still drains, until that ends: then it takes the file over,
with what the other one wrote last. Meanwhile both prove the same caches, each on its own shares of delta.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from gati.exploration.library import Library
from gati.guard.proof import Duration
from gati.guard.standing import Standing, of_rest
from gati.guard.standing_file import Snapshot, read_saved, read_shares
from gati.guard.watch import Event, OnEvent, Watch
from services.inference.settings import InferenceSettings
from services.inference.withdrawn import (
    Withdrawn,
    WithdrawnElsewhere,
    agreement_in,
    all_withdrawals,
    continued,
    identity_in,
    name_of,
    source_of,
)
from services.locks import KEPT, hold, is_held, is_in_place

_log = logging.getLogger("gati.inference")

_PART, _HERE = "heeded", "here"
_DELTA = 0.05  # error probability of all proofs, scaled to that of each version
_FILES_EACH_LOOK = 20  # more are read less often: all replicas read those of all others
_SHARES_LEFT = 20  # of delta, that another process at the same file may take meanwhile
_BEGINS_S = 0.5  # that a process may take from its lock to its file
_PAUSE_S = 0.02
_ASKED = 3  # times that a lock is asked for, as other replicas take it for a moment (`is_held`)


class ServedStanding(Standing):
    """A `Standing` that is written by a separate thread.

    Await `recorded` before an answer that may rest on a change of state leaves the process, and `look` every
    few seconds. Versions with equal caches and promise share a watch. `others` are the files of other
    replicas. `held` is the lock of the file, released by `close`. `writable` False: this process only reads
    the file at `path`; with `lock`, until the process that holds that lock has ended. A proof takes at least
    `proof_s`.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        writable: bool = True,
        held: IO[bytes] | None = None,
        lock: Path | None = None,
        replicas: int = 1,
        others: Sequence[Path] = (),
        proof_s: float = 0.0,
    ) -> None:
        super().__init__(_DELTA / replicas, path, lasts=Duration(proof_s))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gati-standing")
        self._writable, self._held, self._lock = writable, held, lock
        self._is_gone = False  # the folder around that of the file
        self._recording: Future[None] | None = None  # of the last change of state
        self._shared: dict[str, Watch] = {}
        self._least_deltas: dict[str, float] = {}  # that versions which share a watch ask for
        self._listeners: dict[str, OnEvent] = {}
        self.on_heeded: Callable[[Watch], None] = lambda watch: None  # a stop elsewhere
        self._heeded = _numbers(self.kept(_PART, math.inf))
        self.keep(_PART, lambda: {name: dict(each) for name, each in self._heeded.items()})
        self._others, self._looks = WithdrawnElsewhere(others), 0
        if writable and not self.shares_are_own:  # now: they tell others that this process does not drain
            self.write(self.snapshot())
        self._begin_after_others(patience_s=_BEGINS_S)
        self._spent_before = self.spending.used
        self.is_shared = lock is not None
        if path is not None and lock is not None:  # another process writes it
            self._others.paths.append(path)
            self._before = dict(self._kept)
            for name, withdrawals in all_withdrawals(self._before).items():
                number = withdrawals.withdrawals[-1].number
                self._heeded.setdefault(name, {})[source_of(path.name, name)] = number
            self.spending.used += _SHARES_LEFT
        self._withdrawn = self._others.read()

    @property
    def path(self) -> Path | None:
        """The file that is written, now or once it is free; None if it never is."""
        return super().path if self._writable or self._lock is not None else None

    @property
    def is_owned(self) -> bool:
        """Whether this process may write that file, and those next to it, now."""
        return super().is_owned and self._writable and self._is_in_place()

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
        name = self._name(identity, agreement)
        self._listeners[name] = on_event
        own, delta = delta, min(delta, self._least_deltas.get(name, delta))
        self._least_deltas[name] = delta
        known = self._shared.get(name)
        if known is None or known.settings != settings:
            is_new = name not in self.names
            known = self._shared[name] = self.watch(
                name,
                agreement,
                proven=proven,
                settings=settings,
                delta=delta,
                created_s=created_s,
                on_event=partial(self._changed, name, on_event),
                others=self._others_like(name),
            )
            self._heed(name, known, is_new=is_new)
        else:
            if proven and own <= delta:
                self.certify(name, known)
                self.save()
            self.hold_to(name, known, proven=proven, delta=delta)
        return known

    def _name(self, identity: str, agreement: float) -> str:
        """The name of the watch of caches with that promise.

        Those that are known with another promise, as `gati certify --accuracy --write` makes them, have a
        watch for each: else one would be judged and written down in place of the other.
        """
        second, first = name_of(identity, agreement), self._known(identity)
        is_second = second in self.names or (first and agreement_in(first) not in (0.0, agreement))
        return second if is_second else identity

    def _others_like(self, name: str) -> list[str]:
        """The names of watches of the same caches with other promises."""
        identity = identity_in(name)
        return [each for each in self.names if each != name and identity_in(each) == identity]

    def _changed(self, name: str, on_event: OnEvent, event: Event) -> None:
        if event.tightened:
            self._heed_all()
        self._listeners.get(name, on_event)(event)

    def watch_only(self, identities: Collection[str]) -> None:
        """As `Standing.watch_only`; what versions with other caches asked for binds no later ones."""
        named = {*identities, *map(of_rest, identities)}
        used = {name for name in self._shared if identity_in(name) in named}
        super().watch_only({*identities, *used})
        for name in self._shared.keys() - used:
            del self._shared[name], self._least_deltas[name], self._listeners[name]
        for name in self._heeded.keys() - self.names:
            del self._heeded[name]  # of forgotten versions, nothing is believed either

    def audited(self) -> None:
        """Call after an audit changed a watch: evidence is written soon, without waiting for the disk."""
        snapshot = super().audited()
        if snapshot is not None:
            self._thread.submit(self.write, snapshot)

    async def look(self) -> None:
        """Heed what other replicas have stopped by now, and take the file over if it is free."""
        self._take_over()
        self._looks += 1  # since the files were read
        if self._others.paths and self._looks * _FILES_EACH_LOOK >= self._others.count:
            self._looks = 0
            loop, lock = asyncio.get_running_loop(), self._lock
            withdrawn = await loop.run_in_executor(self._thread, self._others.read)
            if lock == self._lock:  # else the file has been taken over meanwhile, and read since
                self._withdrawn = withdrawn
                self._heed_all()

    def _heed_all(self) -> None:
        for name, watch in tuple(self._shared.items()):  # what answers instead may need another watch
            self._heed(name, watch)

    def _heed(self, name: str, watch: Watch, *, is_new: bool = False) -> None:
        """What other guards of the same caches have withdrawn must be proven again here, each time once.

        What broke a stricter promise counts only for a watch that `is_new`, as nothing is known of it yet.
        """
        there = {
            source: each
            for source, each in {**self._withdrawn.get(identity_in(name), {}), **self._here(name)}.items()
            if is_new or each.agreement <= watch.agreement
        }
        heeded = self._heeded.get(name, {})
        left = [
            left
            for source, each in there.items()
            for left in each.left(heeded.get(source, 0), watch.settings)
        ]
        if not left:
            return
        numbers = {source: each.withdrawals[-1].number for source, each in there.items()}
        self._heeded[name] = heeded | numbers
        level, before = min(left), watch.level
        watch.restrict(level)
        if level < before:
            _log.warning(
                "caches stopped by the guard of another replica or promise",
                extra={"caches": name, "settings_left": level},
            )
            if self._shared.get(name) is watch:
                self.on_heeded(watch)

    def _here(self, name: str) -> dict[str, Withdrawn]:
        """What the guards of the same caches with other promises have withdrawn, by source."""
        others = all_withdrawals({each: self._known(each) for each in self._others_like(name)})
        return {source_of(_HERE, other): each for other, each in others.items()}

    def write(self, snapshot: Snapshot) -> None:
        """As `Standing.write`, if this process owns the file."""
        if self.is_owned:
            super().write(snapshot)

    def _is_in_place(self) -> bool:
        if self._held is None or self._path is None:
            return True
        found = is_in_place(self._held, self._path.with_suffix(".lock"))
        if not found and not self._is_gone:
            _log.warning("its folder is gone: state is kept in memory", extra={"file": str(self._path)})
        self._is_gone = not found
        return found

    def save(self) -> None:
        """Have everything written by the thread, so that requests do not wait for the disk."""
        if super().is_owned and self._writable:
            self._recording = self._thread.submit(self.write, self.snapshot())
            self._recording.add_done_callback(_ended)

    async def recorded(self) -> None:
        """Wait until all changes of state so far are written, or the log says why they cannot be."""
        if self._recording is not None and not self._recording.done():
            await asyncio.wait([asyncio.wrap_future(self._recording)])

    def close(self) -> None:
        """Write everything, stop the thread, and let other processes have the file."""
        self._take_over()
        self.save()
        self._thread.shutdown()
        if self._held is not None:
            self._held.close()
            self._held, self._writable = None, False

    def _begin_after_others(self, patience_s: float = 0.0) -> None:
        """Take no share of delta that replicas may have taken when there were more of them, or fewer.

        So no two parts of different sizes have taken one share, and all proofs ever err with probability at
        most delta. A replica that has just begun may take `patience_s` to say so in its file.
        """
        delta, until_s = self.spending.delta, time.monotonic() + patience_s
        for path in self._others.paths:
            drains = False
            while (shares := read_shares(path)) is not None and not shares.are_of(delta):
                drains = is_held(path.with_suffix(".lock"))
                if not drains or time.monotonic() >= until_s:
                    break
                time.sleep(_PAUSE_S)
            if shares is not None:  # else that replica has never been started
                may_take = drains and not shares.are_of(delta)
                self.spending.begin_after(shares.of_other_parts(delta) + may_take * _SHARES_LEFT)

    def _take_over(self) -> None:
        """Own the file from now on, if it is waited for and the process that owned it has ended."""
        path = self._path
        if path is None or self._lock is None or isinstance(held := hold(self._lock), str):
            return
        self._withdrawn = self._others.read()
        self._others.paths.remove(path)
        self._held, self._lock = held, None
        self._take_in_all(path)
        self._heed_all()
        self._withdrawn = self._others.read()  # without that file, which is written here now
        self._writable = True
        self.save()
        _log.info("the state of versions is written from now on", extra={"file": str(path)})

    def _take_in_all(self, path: Path) -> None:
        """Take in what the process that owned the file wrote after this one had read it.

        What it stopped is stopped, as if it were another replica. Of versions that were loaded here, only its
        withdrawals count, and its proofs under way if they counted more audits.
        """
        saved = read_saved(path, time.time())
        took_none = self.spending.used == self._spent_before + _SHARES_LEFT
        own = self._spent_before if took_none else self.spending.used
        self.spending.used = max(own, saved.shares.taken)
        self.spending.begin_after(saved.shares.of_other_parts(self.spending.delta))
        self._begin_after_others()
        before, there = all_withdrawals(self._before), all_withdrawals(saved.versions)

        def heed(name: str, watch: Watch) -> None:
            self._heed(name, watch)
            those = [each[name].withdrawals if name in each else () for each in (before, there)]
            watch.withdrawals = continued(watch.withdrawals, *those)

        theirs = self.take_in(saved, heed)
        heeded = _numbers(self.kept(_PART, math.inf))
        self._heeded |= {name: heeded[name] for name in theirs if name in heeded}


def open_standing(settings: InferenceSettings) -> ServedStanding:
    """Open the standing of a model's versions.

    Changes are kept in memory only if the file cannot be written, or as long as another process has it.
    Raises `LibraryError` where there is no library: it must not come back with nothing but this file.
    """
    folder = settings.state_folder
    opened = partial(ServedStanding, replicas=settings.replicas, proof_s=settings.proof_s)
    if folder is None:
        return opened(None)
    if settings.state is None and not os.path.isdir(folder.parent):
        Library.open(folder.parent)
    path = folder / f"{settings.label}.json"
    others = _files_of_others(folder, settings)
    lock_path = path.with_suffix(".lock")
    for _ in range(_ASKED):
        if (lock := hold(lock_path)) != KEPT:
            break
        time.sleep(_PAUSE_S)
    if lock == KEPT:
        _log.warning(
            "state is kept in memory until that process ends; give each server a `state` folder of its own",
            extra={"file": str(path), "reason": lock},
        )
        return opened(path, writable=False, lock=lock_path, others=others)
    if isinstance(lock, str):
        _log.warning(
            "the state of versions is kept in memory only; set `state` to a folder",
            extra={"file": str(path), "reason": lock},
        )
        return opened(path, writable=False, others=others)
    return opened(path, held=lock, others=others)


def _files_of_others(folder: Path, settings: InferenceSettings) -> list[Path]:
    """The files of the other replicas, and of those that there were when there were more of them."""
    labels = [settings.model_copy(update={"replica": each}).label for each in range(settings.replicas)]
    earlier: list[str] = []
    with suppress(OSError):  # whoever opens the own file there says why it cannot be
        earlier = sorted(path.stem for path in folder.glob(f"{settings.name}@*.json"))
    labels += [each for each in earlier if each.removeprefix(f"{settings.name}@").isdecimal()]
    return [folder / f"{label}.json" for label in dict.fromkeys(labels) if label != settings.label]


def _ended(recording: Future[None]) -> None:
    error = recording.exception()
    if error is not None:
        _log.error("the state of versions cannot be written", exc_info=error)


def _numbers(kept: Any) -> dict[str, dict[str, int]]:
    """The last withdrawal that was heeded, by name of watch and source, as an earlier run saved it."""
    if not isinstance(kept, dict):
        return {}
    return {
        name: {file: number for file, number in each.items() if isinstance(number, int)}
        for name, each in kept.items()
        if isinstance(each, dict)
    }
