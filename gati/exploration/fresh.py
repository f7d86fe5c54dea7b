"""Finding inputs that explore has not seen: only these may certify a composition, and each counts once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gati.errors import DataError
from gati.exploration.alike import warning_of_neighbours
from gati.exploration.library import Library
from gati.model.identity import Identities, group_copies
from gati.model.sequence import Data


@dataclass(frozen=True)
class Fresh:
    """Distinct inputs that explore has not seen, and the number of copies of each, [n].

    `identities` are their hashes, `identity` is one of them all, independent of order and file. `note` says
    what was left out, or is empty.
    """

    inputs: Data
    copies: NDArray[np.int64]
    identities: Identities
    identity: str
    note: str = ""


def fresh_inputs(library: Library, inputs: Data) -> Fresh:
    """Leave out inputs that explore has used, under any name or label and in any order.

    A library of an older Gati has no record of its inputs; then only identical data is refused.

    **Raises:** `DataError` if there are no inputs, or no new ones.
    """
    if len(inputs) == 0:
        raise DataError("the certification data is empty; give at least one input")
    record = library.input_record()
    if record is None:
        _refuse_same_data(library, inputs)
    identities = inputs.identities
    first, copies = group_copies(identities)
    new = np.ones(len(inputs), dtype=bool) if record is None else ~np.isin(identities, record.seen)
    if not new.any():
        raise _not_new(inputs)
    rows = np.flatnonzero(new & (first == np.arange(len(inputs))))
    notes = []
    if record is None:
        notes.append("explored by an older Gati, which kept no record of its inputs: these may not be new")
    if not new.all():
        notes.append(
            f"left out {int((~new).sum())} of {len(inputs)} inputs, which gati explore has already seen"
        )
    if len(rows) < new.sum():
        notes.append(
            f"{int(new.sum()) - len(rows)} inputs are copies of others and count only if their answers differ"
        )
    notes += [warning] if (warning := warning_of_neighbours(inputs)) else []
    return Fresh(
        inputs.subset(rows),
        copies[rows],
        identities[rows],
        _content_hash(identities[rows], copies[rows]),
        "; ".join(notes),
    )


def _content_hash(identities: Identities, copies: NDArray[np.int64]) -> str:
    order = np.argsort(identities)
    return hashlib.sha256(identities[order].tobytes() + copies[order].tobytes()).hexdigest()


def note_of_seen(library: Library, inputs: Data) -> str:
    """Return a warning if explore has seen some of the inputs to measure on, else an empty string."""
    record = library.input_record()
    seen = 0 if record is None else int(np.isin(inputs.identities, record.seen).sum())
    if seen == 0:
        return ""
    return f"gati explore has seen {seen} of these {len(inputs)} inputs, so the results are too optimistic"


def _refuse_same_data(library: Library, inputs: Data) -> None:
    used = {entry.rsplit(" ", 1)[-1] for entry in library.manifest.data.values()}
    # explore keeps the fingerprint of the part that it measured on: all of VAL, or two thirds of it
    order = np.random.default_rng((library.manifest.seed, 0)).permutation(len(inputs))
    parts = [inputs, *(inputs.subset(np.sort(order[cut:])) for cut in (0, len(inputs) // 3))]
    if used & {part.fingerprint for part in parts}:
        raise _not_new(inputs)


def _not_new(inputs: Data) -> DataError:
    return DataError(
        f"this composition was made from {inputs.name}, so it proves nothing; "
        "give inputs that gati explore has not seen"
    )
