"""Which inputs each attempt to certify has counted, so that no later attempt takes them for new ones.

They are stored next to the ledger as sorted identities (`gati.model.identity`), one file for each data set
that was counted: `certify_inputs/DATA.npy`. A file is written before the ledger names it; without an entry in
the ledger it means nothing. One that the ledger names and that is gone is written again when the same data is
given; until then nothing else is certified.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gati.errors import DataError, LibraryError
from gati.files import atomic_write
from gati.model.identity import Identities


class CountedInputs:
    """The records in `directory`, a cache library."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "certify_inputs"

    def of(self, data: str, *, known: bool) -> Identities | None:
        """The inputs counted as `data`, sorted; None if an older Gati counted them and kept no record.

        `known` says that there was a record. Raises LibraryError if it is gone or damaged.
        """
        path = self._path(data)
        if not path.is_file():
            if not known:
                return None
            raise LibraryError(
                f"{path} is missing, so inputs that were counted before would count as new: restore a "
                "backup, or repeat the command that counted them, with the same data"
            )
        try:
            found: Identities = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise LibraryError(f"cannot read {path}: {error}; restore a backup") from error
        if found.dtype != np.uint64 or found.ndim != 1:
            raise LibraryError(f"{path} is damaged: it holds no identities of inputs; restore a backup")
        return found

    def keep(self, data: str, inputs: Identities) -> None:
        """Record what is counted as `data`; what is recorded already stays. Raises StorageError."""
        path = self._path(data)
        if path.is_file():
            return

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                np.save(file, np.unique(inputs))

        atomic_write(path, write)

    def _path(self, data: str) -> Path:
        return self._folder / f"{data}.npy"


class Part(NamedTuple):
    """The part of some data that is evidence: its digest, its rows (None: all), and why."""

    data: str
    rows: NDArray[np.int64] | None = None
    note: str = ""


def part_to_count(
    attempts: Sequence[tuple[str, str]],
    records: Mapping[str, Identities | None],
    data: str,
    inputs: Identities,
    *,
    grows: bool,
) -> Part:
    """The part of `data` that is evidence: what no attempt had counted when the data was first given.

    Of each of the `attempts` there is the data that it counted and the data that it was given. `records` are
    the inputs of each counted data. If the data `grows`, it is counted whole as long as it has all of these.
    Raises DataError without new inputs.
    """
    again = next((at for at, each in enumerate(attempts) if data in each), None)
    earlier = [records[name] for name in dict.fromkeys(each for each, _ in attempts[:again])]
    known = [each for each in earlier if each is not None]
    seen = np.unique(np.concatenate([np.empty(0, np.uint64), *known]))
    old = np.isin(inputs, seen)
    new, counted = ~old, data if again is None else attempts[again][0]
    then = None if counted == data else records[counted]
    if then is not None:
        new = np.isin(inputs, then)
    elif not old.any() or (grows and old.sum() == len(seen)):
        new = np.ones(len(inputs), dtype=bool)
    else:
        content = np.sort(inputs[new]).tobytes()
        counted = hashlib.sha256(f"{data} {hashlib.sha256(content).hexdigest()}".encode()).hexdigest()
    if not new.any():
        raise DataError(
            "earlier attempts have counted all of these inputs as part of other data, so they prove nothing "
            "more; give new inputs, or the same data as then"
        )
    notes = []
    if not new.all():
        notes.append(
            f"earlier attempts have counted {int((~new).sum())} of {len(inputs)} inputs as part of other "
            "data: they count only if their answers differ; leave them out if they are the same recordings"
        )
    elif old.any():
        notes.append(
            f"earlier attempts have counted {int(old.sum())} of {len(inputs)} inputs, too: the confidence "
            "holds unless their results decided how many were added"
        )
    if len(known) < len(earlier):
        notes.append("an older Gati kept no record of the inputs of earlier attempts: these may not be new")
    return Part(counted, None if new.all() else np.flatnonzero(new), "; ".join(notes))


def sharing_inputs(records: Mapping[str, Identities | None], inputs: Identities) -> set[str]:
    """The counted data that have one of these inputs."""
    return {name for name, each in records.items() if each is not None and np.isin(inputs, each).any()}
