"""The state of an exploration on disk, so that an interrupted run can be resumed.

.state/settings.json      settings of this exploration; only one with equal settings may resume it
.state/costs.json         what was measured before training: latencies, the network's answers, harmless
                          augmentations, and the trials that cannot pay off
.state/answers/           the network's answers to the first held-out inputs, until costs.json is there
.state/plans.json         how long each stage trains
.state/exits.json         seconds of the budget for exits, if decided before any training
.state/spent.json         seconds of the budget used so far
.state/rows/TRIAL.json    a trial that is trained and measured
.state/STAGE.safetensors  weights and optimiser moments of the stage in training, at most a minute old
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from gati.errors import LibraryError, StorageError
from gati.files import atomic_write_text, mode_of
from gati.types import OperatingPoint, Trial, TrialId

_PLACES = ("data", "model", "train_data")  # settings that name a place, unless "objects" names them, too


def places_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings of an exploration that say where network and inputs are, which may move."""
    objects = settings.get("objects", ())
    named = {name: settings.get(name) for name in _PLACES if name not in objects}
    found = {name: place for name, place in named.items() if place is not None}
    return found | {name: settings[name] for name in ("companions",) if name in settings}


def by_content(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an exploration without places; that these lead to the same inputs must be checked."""
    found = {**settings, **dict.fromkeys(places_in(settings), "somewhere")}
    if "companions" in settings:
        found["companions"] = [[variant, *others] for variant, _, *others in settings["companions"]]
    return found


def gone(source: str | None) -> str | None:
    """The path in the stored name of a network, a checkpoint or inputs, if nothing is there; else None."""
    if source is None:
        return None
    place, _, _ = source.rpartition(":")
    path = Path(place if place.endswith(".py") else source)
    return str(path) if path.is_absolute() and _is_missing(path) else None


def _is_missing(path: Path) -> bool:
    """Whether nothing is there; False if its folder is closed to this user: opening it tells why."""
    try:
        return not mode_of(path)
    except OSError:
        return False


class FinishedTrial(NamedTuple):
    """A row of the trials table with its operating points."""

    trial: Trial
    points: tuple[OperatingPoint, ...]


class StagePlan(NamedTuple):
    """How a stage trains: its length, its engine for base answers, its rounds of views, and its batches."""

    steps: int
    planned_s: float | None  # seconds for all steps; None without a budget
    engine: str | None = None
    rounds: int | None = None  # after which views repeat; None: never
    fresh_cost: float = 1.0  # time of a step in these rounds, relative to later ones
    places: int | None = None  # batches per round; None: all inputs
    batch_size: int | None = None  # None: as usual
    most_steps: int | None = None  # if the time ends it: then `steps` is how many are expected


class RunState:
    """Reads and writes the state folder of one cache library."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / ".state"

    def training_path(self, stage: str) -> Path:
        """The file with the weights of a stage in training."""
        return self.directory / f"{stage}.safetensors"

    @property
    def answers_path(self) -> Path:
        """The folder of `gati.exploration.kept_answers`."""
        return self.directory / "answers"

    def claimed(self) -> dict[str, Any]:
        """The settings of the run that started here; empty if there is none."""
        return self._json(self.directory / "settings.json") or {}

    def claim(self, settings: dict[str, Any]) -> None:
        """Start or resume the exploration that these settings describe, wherever its measured inputs are now.

        **Raises:** `LibraryError` naming the first setting that differs from those of an unfinished one.
        """
        path = self.directory / "settings.json"
        wanted: dict[str, Any] = json.loads(json.dumps(settings))
        found = self._json(path)
        if found is None:
            atomic_write_text(path, json.dumps(wanted, indent=1) + "\n")
            return
        by, now = found.get("gati"), wanted.get("gati")
        if by and now and by != now:
            raise LibraryError(
                f"{self.directory.parent} holds an unfinished exploration by Gati {by}, and this is {now}: "
                f"resume with that version, choose another --out, or delete {self.directory} to start again"
            )
        library = self.directory.parent
        if ("round" in found) != ("round" in wanted):
            if "round" in wanted:
                raise LibraryError(
                    f"{library} holds an unfinished exploration that must end before it is trained further: "
                    f"repeat its command, or delete {self.directory} to give that exploration up"
                )
            raise LibraryError(
                f"{library} holds an unfinished round of training (gati explore --more): repeat its command, "
                "or choose another --out"
            )
        # before its inputs are recorded, others could not be told from those that have moved
        asked, known = (wanted, found) if self.costs() is None else (by_content(wanted), by_content(found))
        for name in sorted(wanted.keys() | found.keys()):
            if asked.get(name) == known.get(name):
                continue
            other = f"with another {name} ({found.get(name)!r}, now {wanted.get(name)!r})"
            if "round" in wanted:
                raise LibraryError(
                    f"{library} holds an unfinished round of training {other}: repeat its command, or delete "
                    f"{self.directory} to give up that round"
                )
            raise LibraryError(
                f"{library} holds an unfinished exploration {other}: repeat its command, or choose another "
                "--out"
            )
        if wanted != found:
            atomic_write_text(path, json.dumps(wanted, indent=1) + "\n")

    def costs(self) -> dict[str, Any] | None:
        """What `write_costs` stored, or None."""
        found: dict[str, Any] | None = self._json(self.directory / "costs.json")
        return found

    def write_costs(self, costs: dict[str, Any]) -> None:
        """Store the measurements made before training."""
        atomic_write_text(self.directory / "costs.json", json.dumps(costs))

    def plan(self, stage: str) -> StagePlan | None:
        """The plan of a stage, or None if it is not planned yet."""
        found = (self._json(self.directory / "plans.json") or {}).get(stage)
        return None if found is None else StagePlan(*found)

    def write_plan(self, stage: str, plan: StagePlan) -> None:
        """Store the plan of a stage: an interrupted run continues with it."""
        path = self.directory / "plans.json"
        atomic_write_text(path, json.dumps({**(self._json(path) or {}), stage: plan}))

    @property
    def exits_s(self) -> float | None:
        """What `write_exits_s` stored, or None."""
        found = self._json(self.directory / "exits.json")
        return None if found is None else float(found["seconds"])

    def write_exits_s(self, seconds: float) -> None:
        """Store how many seconds exits may train."""
        atomic_write_text(self.directory / "exits.json", json.dumps({"seconds": seconds}))

    @property
    def spent_s(self) -> float:
        """Seconds of the budget that earlier runs used."""
        return float((self._json(self.directory / "spent.json") or {}).get("seconds", 0.0))

    def write_spent(self, seconds: float) -> None:
        """Store how many seconds of the budget are used."""
        atomic_write_text(self.directory / "spent.json", json.dumps({"seconds": seconds}))

    def finished(self) -> dict[TrialId, FinishedTrial]:
        """All trials that need no more work."""
        rows = {}
        for path in sorted((self.directory / "rows").glob("*.json")):
            raw = self._json(path)
            if raw is not None:
                trial = Trial(**raw["trial"])
                points = tuple(OperatingPoint(**point) for point in raw["points"])
                rows[trial.trial_id] = FinishedTrial(trial, points)
        return rows

    def write_finished(self, row: FinishedTrial) -> None:
        """Record a trial whose cache and outcomes are on disk."""
        path = self.directory / "rows" / f"{row.trial.trial_id}.json"
        content = {"trial": asdict(row.trial), "points": [asdict(point) for point in row.points]}
        atomic_write_text(path, json.dumps(content))

    def check_finished(self) -> None:
        """Raise `LibraryError` if an exploration has begun here and not finished; it says how far it is."""
        if self.claimed():
            # counted, not read: another version of Gati may have written them
            count = len(glob("*.json", root_dir=self.directory / "rows"))
            raise LibraryError(
                f"gati explore has not finished in {self.directory.parent} (variants so far: "
                f"{count}, in {self.spent_s / 60:.0f} min): wait until it ends, or, if it was "
                "interrupted, run the same command again to resume"
            )

    def clear(self) -> None:
        """Remove the state folder of a finished exploration, atomically."""
        done = self.directory.with_name(".state.done")
        shutil.rmtree(done, ignore_errors=True)
        if self.directory.is_dir():
            self.directory.rename(done)
            shutil.rmtree(done, ignore_errors=True)

    def _json(self, path: Path) -> Any:
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(
                f"cannot read {path}: {error.strerror}; check the disk and the permissions"
            ) from error
        except ValueError as error:
            raise LibraryError(
                f"{path} is damaged ({error}): delete {self.directory} to start again"
            ) from error


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a cache library for writing. A run that fails before it has measured anything leaves no files.

    **Raises:** `LibraryError` if another process holds the lock, `StorageError` if there can be none here.
    """
    try:
        real = Path(os.path.realpath(directory))  # a link may lead to a folder that is not there yet
        made = [folder for folder in (real, *real.parents) if not folder.exists()]
        real.mkdir(parents=True, exist_ok=True)
        handle = open(directory / ".lock", "a+", encoding="ascii")  # noqa: SIM115 - closing it releases the lock
    except OSError as error:
        raise StorageError(
            f"cannot write to {directory}: {error.strerror}; choose another folder, or make it writable"
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle.fileno(), 0)
            os.write(handle.fileno(), str(os.getpid()).encode())  # not buffered: closing would fail again
        except (BlockingIOError, PermissionError) as error:
            handle.seek(0)
            owner = handle.read().strip() or "unknown"
            raise LibraryError(
                f"another gati explore (process {owner}) is writing to {directory}: "
                "wait for it or choose another folder"
            ) from error
        except OSError as error:
            _leave_nothing(directory, made)
            raise StorageError(
                f"cannot lock {directory / '.lock'}: {error.strerror}; choose an --out on a disk that has "
                "file locks, and room"
            ) from error
        try:
            yield
        except BaseException:
            _leave_nothing(directory, made)
            raise


def _leave_nothing(directory: Path, made: Sequence[Path]) -> None:
    """Remove the first files of a run, and the folders `made`, innermost first, if there is nothing else."""
    state = directory / ".state"
    if not set(state.rglob("*")) - {state / "settings.json"}:
        shutil.rmtree(state, ignore_errors=True)  # else it would demand these settings of the corrected run
    if set(directory.rglob("*")) - {directory / ".lock"}:
        return
    (directory / ".lock").unlink(missing_ok=True)
    for folder in made:
        with suppress(OSError):  # another process has put something there
            folder.rmdir()
