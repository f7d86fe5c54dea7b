"""Finding inputs that explore has not seen: if their answers agree, only these are evidence, each once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gati.errors import DataError
from gati.exploration.alike import warning_of_neighbours
from gati.exploration.library import Library
from gati.model.identity import CopyCounts, Identities, group_copies
from gati.model.sequence import Data


@dataclass(frozen=True)
class Fresh:
    """Distinct inputs, and how often each counts, [n]; those that explore has seen only if answers differ.

    `identities` are the hashes of those that it has not seen, `identity` is one of them all, independent of
    order and file, and `seen` is one of the others, empty if there are none. `note` says what hardly counts.
    """

    inputs: Data
    copies: CopyCounts
    identities: Identities
    identity: str
    seen: str = ""
    note: str = ""


def fresh_inputs(library: Library, inputs: Data) -> Fresh:
    """Find inputs that explore has used, under any name or label and in any order.

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
    rows = np.flatnonzero(first == np.arange(len(inputs)))
    notes = []
    if record is None:
        notes.append("explored by an older Gati, which kept no record of its inputs: these may not be new")
    if not new.all():
        notes.append(
            f"gati explore has already seen {int((~new).sum())} of {len(inputs)} inputs: they count only if "
            "their answers differ; leave them out if they are the same recordings"
        )
    if new[rows].sum() < new.sum():
        notes.append(
            f"{int(new.sum() - new[rows].sum())} inputs are copies of others and count only if their answers "
            "differ"
        )
    notes += [warning] if (warning := warning_of_neighbours(inputs)) else []
    return Fresh(
        inputs.subset(rows),
        CopyCounts(copies[rows], new[rows].astype(np.int64)),
        identities[rows][new[rows]],
        _content_hash(identities[rows][new[rows]], copies[rows][new[rows]]),
        "" if new.all() else _content_hash(identities[rows][~new[rows]], copies[rows][~new[rows]]),
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
