"""Finding inputs that explore has not seen: if their answers agree, only these are evidence, each once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gati.errors import DataError
from gati.exploration.alike import warning_of_neighbours
from gati.exploration.library import InputRecord, Library
from gati.model.identity import CopyCounts, Identities, group_copies
from gati.model.sequence import Data

_KINDS = {True: "pictures", False: "preprocessed tensors"}
_ALTERNATIVES = {
    True: "pictures: a folder, an .npz with `images`, or a dataset of uint8 or Pillow images",
    False: "preprocessed tensors: a dataset like that of gati explore",
}


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

    A library of an older Gati has no record of its inputs; then only identical data is refused. A picture
    and what a dataset makes of it are the same input, but have not the same content, so pictures are only
    compared with pictures, and preprocessed tensors with such tensors.

    **Raises:** `DataError` if there are no inputs, no new ones, or none of the kind that explore has seen.
    """
    if len(inputs) == 0:
        raise DataError("the certification data is empty; give at least one input")
    record = library.input_record()
    notes = []
    if record is None:
        _refuse_same_data(library, inputs)
        notes.append("explored by an older Gati, which kept no record of its inputs: these may not be new")
    elif note := _check_kind(library, record, inputs):
        notes.append(note)
    identities = inputs.identities
    first, copies = group_copies(identities)
    new = np.ones(len(inputs), dtype=bool) if record is None else ~np.isin(identities, record.seen)
    if not new.any():
        raise _not_new(inputs)
    rows = np.flatnonzero(first == np.arange(len(inputs)))
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
    if record is None:
        return ""
    if record.pictures.tolist() == [not inputs.is_images]:
        return f"{_of_another_kind(inputs)}: if it has seen some of them, the results are too optimistic"
    seen = int(np.isin(inputs.identities, record.seen).sum())
    if seen == 0:
        return ""
    return f"gati explore has seen {seen} of these {len(inputs)} inputs, so the results are too optimistic"


def _check_kind(library: Library, record: InputRecord, inputs: Data) -> str:
    """Return a note if explore may have seen the inputs as something that they cannot be compared with.

    Raises `DataError` if it is known to have seen nothing that they can be compared with.
    """
    known = record.pictures.tolist()
    if known == [inputs.is_images]:
        return ""
    if known == [not inputs.is_images]:
        raise DataError(
            f"{_of_another_kind(inputs)}, so they may not be new; give {_ALTERNATIVES[not inputs.is_images]}"
        )
    if known:
        return "gati explore has seen both pictures and preprocessed tensors: these may not be new"
    takes = library.preprocessing
    if inputs.is_images or takes.tensors is not None or takes.sound is not None:
        return ""
    return (
        "explored by an older Gati, which did not record whether it has seen pictures or preprocessed "
        "tensors: these may not be new"
    )


def _of_another_kind(inputs: Data) -> str:
    return (
        f"gati explore has seen {_KINDS[not inputs.is_images]}, and {inputs.name} holds "
        f"{_KINDS[inputs.is_images]}, which cannot be compared with them"
    )


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
