"""What the guards of other processes have withdrawn, as the state files of a model say.

The file of a replica has one entry for each watch, by name: the identity of the caches
(`gati.guard.standing.identity_of`), and the promise if they are served with another one, too (`name_of`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gati.errors import one_line
from gati.guard.withdrawals import Withdrawal, withdrawals_in

_log = logging.getLogger("gati.inference")

_AT = " at "  # in no identity, and in no name of a file


class Withdrawn(NamedTuple):
    """What the guard of one watch, of that agreement, has withdrawn of that number of settings."""

    agreement: float
    settings: int
    withdrawals: tuple[Withdrawal, ...] = ()

    def left(self, heeded: int, settings: int) -> list[int]:
        """How many of `settings` each withdrawal left, except those up to number `heeded`."""
        return [
            each.left if settings == self.settings else 0
            for each in self.withdrawals
            if not each.number <= heeded <= self.withdrawals[-1].number  # above it, the file is new
        ]


def name_of(identity: str, agreement: float) -> str:
    """The name of a second watch of the same caches, for another promise."""
    return f"{identity}{_AT}{agreement!r}"


def identity_in(name: str) -> str:
    """The identity of the caches with a watch of that name."""
    return name.partition(_AT)[0]


def source_of(file: str, name: str) -> str:
    """What identifies one watch of caches: the file that it is in, and its promise as in its name."""
    return file + name.removeprefix(identity_in(name))


def agreement_in(watch: Mapping[str, Any]) -> float:
    """The agreement of a saved watch; 0 if it does not say so."""
    try:
        return float((watch["guards"][0] if "guards" in watch else watch["guard"])["agreement"])
    except (ValueError, OverflowError, LookupError, TypeError):
        return 0.0


class WithdrawnElsewhere:
    """Reads what guards have withdrawn, in the files of other processes at `paths`.

    Files are read again only after they have changed. A file that is not readable is ignored, with one
    warning for each reason.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._known: dict[Path, tuple[tuple[int, ...], dict[str, Withdrawn]]] = {}
        self._told: set[tuple[Path, str]] = set()

    @property
    def count(self) -> int:
        """How many of the files have been there so far."""
        return len(self._known)

    def read(self) -> dict[str, dict[str, Withdrawn]]:
        """What the files say now, by identity and by source."""
        found: dict[str, dict[str, Withdrawn]] = {}
        for path in tuple(self.paths):
            try:
                withdrawals = self._read(path)
            except FileNotFoundError:
                continue  # that replica has never been started
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                self._warn_once(path, one_line(error))
                continue
            for name, each in withdrawals.items():
                found.setdefault(identity_in(name), {})[source_of(path.name, name)] = each
        return found

    def _read(self, path: Path) -> dict[str, Withdrawn]:
        with path.open(encoding="utf-8") as file:
            is_now = os.fstat(file.fileno())  # of the open file: a network file system may keep older ones
            version = is_now.st_ino, is_now.st_mtime_ns, is_now.st_size
            known = self._known.get(path)
            if known is not None and known[0] == version:
                return known[1]
            versions = json.load(file)["versions"]
        found = all_withdrawals(versions, partial(self._warn_once, path))
        self._known[path] = version, found
        return found

    def _warn_once(self, path: Path, reason: str) -> None:
        if (path, reason) not in self._told:
            self._told.add((path, reason))
            _log.warning(
                "the state file of another replica cannot be read; what its guard stops may answer here",
                extra={"file": str(path), "reason": reason},
            )


def all_withdrawals(
    versions: Mapping[str, Any], tell: Callable[[str], None] = lambda why: None
) -> dict[str, Withdrawn]:
    """What guards have withdrawn, by name of watch, in `versions` of a file; `tell` gets what is damaged."""
    found = {}
    for name, each in versions.items():
        try:
            if withdrawals := _withdrawals_of(each):
                found[name] = Withdrawn(agreement_in(each), _settings_of(each), withdrawals)
        except (ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
            tell(f"{name}: {one_line(error)}")
    return found


def continued(
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
    return level if level is not None and level < _settings_of(watch) else None


def _settings_of(watch: Mapping[str, Any]) -> int:
    return len(watch["guards"]) if "guards" in watch else 1
