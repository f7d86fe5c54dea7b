"""The state and evidence of a served model's versions (`gati.guard.standing`), in a file.

The file is `STATE/NAME.json`, by default in the library's folder `standing`. Further replicas have
`NAME@1.json` and so on, with separate proofs and a share of the total error probability. If the guard of one
replica stops caches or withdraws their looser settings, the other replicas must prove them again, too: they
read its file at startup and while they serve, and note what they have heeded. A process that cannot write its
file, or finds it locked by another one, reads it, keeps changes in memory only and logs a warning.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from gati.errors import one_line
from gati.guard.proof import Duration
from gati.guard.standing import Snapshot, Standing, of_rest
from gati.guard.watch import OnEvent, Watch, Withdrawal, withdrawals_in
from services.inference.settings import InferenceSettings
from services.locks import hold

_log = logging.getLogger("gati.inference")

_PART = "heeded"
_DELTA = 0.05  # error probability of all proofs, scaled to that of each version


class ServedStanding(Standing):
    """A `Standing` whose evidence is written by a separate thread.

    Changes of state are still written before they take effect. Versions with equal caches share a watch.
    `others` are the files of other replicas. `writable` False: another process owns the file at `path`, and
    this one only reads it. A proof takes at least `proof_s`.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        writable: bool = True,
        replicas: int = 1,
        others: Sequence[Path] = (),
        proof_s: float = 0.0,
    ) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gati-standing")
        self._others = others
        self._unreadable: set[tuple[Path, str]] = set()  # files of others and why, as logged
        self._withdrawn_there = self._compared = self._withdrawn()
        self._writable = writable
        self._shared: dict[str, Watch] = {}
        self._least_deltas: dict[str, float] = {}  # that versions with equal caches ask for
        self._listeners: dict[str, OnEvent] = {}
        super().__init__(_DELTA / replicas, path, lasts=Duration(proof_s))
        self._heeded = _numbers(self.kept(_PART, math.inf))
        self.keep(_PART, lambda: {name: dict(each) for name, each in self._heeded.items()})

    @property
    def path(self) -> Path | None:
        """The file that is written; None if another process owns it."""
        return super().path if self._writable else None

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

        They may differ in their certificates and in `delta`: only what holds for all of them is believed.
        """
        self._listeners[identity] = on_event
        delta = self._least_deltas[identity] = min(delta, self._least_deltas.get(identity, delta))
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
            self.hold_to(identity, known, proven=proven, delta=delta)
        return known

    def watch_only(self, identities: Collection[str]) -> None:
        """As `Standing.watch_only`; what versions with other caches asked for binds no later ones."""
        super().watch_only(identities)
        for name in self._shared.keys() - {*identities, *map(of_rest, identities)}:
            del self._shared[name], self._least_deltas[name], self._listeners[name]

    def audited(self) -> None:
        """Call after an audit changed a watch: evidence is written soon, without waiting for the disk."""
        snapshot = super().audited()
        if snapshot is not None:
            self._thread.submit(self._exchange, snapshot)
        if self._withdrawn_there is not self._compared:
            self._compared = self._withdrawn_there
            for identity in self._compared.keys() & self._shared.keys():
                self._heed(identity, self._shared[identity])

    def _heed(self, identity: str, watch: Watch) -> None:
        """What the guard of another replica has withdrawn must be proven again here, too, each time once."""
        there = self._compared.get(identity, {})
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
        for path in self._others:
            try:
                versions = json.loads(path.read_text(encoding="utf-8"))["versions"].items()
            except FileNotFoundError:
                continue  # that replica has never been started
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                self._warn_once(path, one_line(error))
                continue
            for name, each in versions:
                try:
                    withdrawals = _withdrawals_of(each)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    self._warn_once(path, f"{name}: {one_line(error)}")
                    continue
                if withdrawals:
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

    def close(self) -> None:
        """Write everything and stop the thread."""
        self.save()
        self._thread.shutdown()


def open_standing(settings: InferenceSettings) -> tuple[ServedStanding, Callable[[], None]]:
    """Open the standing of a model's versions; returns it with a function that unlocks its file.

    Changes are kept in memory only if the file cannot be written or is locked.
    """
    folder = settings.state_folder
    opened = partial(ServedStanding, replicas=settings.replicas, proof_s=settings.proof_s)
    if folder is None:
        return opened(None), _nothing
    path = folder / f"{settings.label}.json"
    labels = [settings.model_copy(update={"replica": each}).label for each in range(settings.replicas)]
    others = [folder / f"{label}.json" for label in labels if label != settings.label]
    lock = hold(path.with_suffix(".lock"))
    if isinstance(lock, str):
        _log.warning(
            "the state of versions is kept in memory only; set `state` to a folder",
            extra={"file": str(path), "reason": lock},
        )
        return opened(path, writable=False, others=others), _nothing
    return opened(path, others=others), lock.close


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
