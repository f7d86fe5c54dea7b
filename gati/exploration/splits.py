"""Reproducible splits of the inputs into parts for training, selecting and certifying.

The size of the select split depends only on the number of inputs: accuracy targets are not known yet, and a
rule that looked at outcomes would invalidate the certificate. With few inputs to select on, the choice does
not generalise; with few to certify on, hardly any loss is allowed. Up to `TWICE_ENOUGH` inputs, each part
gets half. Above that, `ENOUGH` inputs are for selecting and all others certify, until the select split is a
third.

`benchmarks.splitting` simulates the rule. On the caches of a ResNet-56, over targets from 0.97 to 0.99, 600
inputs gained most with half of them to certify on; 1,000 and 2,000 inputs with seven to eight tenths, by one
to two per cent over a half (standard errors are about as large). The rule certifies on fewer than the
simulated best, because selectors and variants, which the simulation leaves out, must be chosen, too. Above
2,000 inputs the rule is not measured.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gati.errors import DataError, LibraryError
from gati.exploration.alike import warning_of_copies
from gati.exploration.library import CERTIFY, SELECT, InputRecord, Library
from gati.exploration.state import gone
from gati.model.data import load_data
from gati.model.identity import CopyCounts, Identities, group_copies
from gati.model.sequence import Data

LEAST_HELD_OUT = 60
_LEAST_TAUGHT = 8  # the smallest batch of training
ENOUGH = 400  # inputs to select on
TWICE_ENOUGH = 2 * ENOUGH


@dataclass(frozen=True)
class Inputs:
    """Training inputs, held-out inputs with their split (SELECT or CERTIFY, uint8 [n]), and their identities.

    The certify split holds only the first copy of each input; `record` has the number of copies there, and
    whether others were used to train or select. `notes` say what was left out and why, one line each.
    """

    train: Data
    held_out: Data
    split: npt.NDArray[np.uint8]
    record: InputRecord
    notes: tuple[str, ...] = ()

    @property
    def evidence(self) -> int:
        """How many inputs to certify on are evidence: those of which no copy trained or selected."""
        return int(self.record.new[self.split == CERTIFY].sum())

    def split_hash(self) -> str:
        """Return a hash of which inputs are in which part."""
        content = self.record.rows.tobytes() + self.split.tobytes() + self.record.new.tobytes()
        return hashlib.sha256(content + self.train.fingerprint.encode()).hexdigest()


def inputs_to_select_on(count: int) -> int:
    """Return how many of `count` held-out inputs are for selecting; the others certify."""
    return count // 2 if count <= TWICE_ENOUGH else max(ENOUGH, count // 3)


def split_inputs(held: Data, more: Data | None, seed: int, *, unique: bool = False) -> Inputs:
    """Split `held` into select and certify, and into a third part for training if `more` is None.

    What certifies is drawn copy by copy, so that common inputs are as common there as in `held`; all other
    copies of an input go to the same part. With `unique`, only the first copy of each input is kept: for data
    whose copies are not draws of their own (`gati.composition.copies`). Inputs of `held` are left out of
    `more`.

    **Raises:** `DataError` if there is too little data, or if `more` has only inputs of `held`.
    """
    notes: list[str] = []
    train = None if more is None else _without(more, held, notes)
    part = _parts(held.identities, seed, third=more is None, unique=unique)
    certifies = np.flatnonzero(part == CERTIFY)
    own, copies = group_copies(held.identities[certifies])
    firsts = own == np.arange(len(certifies))
    new = ~np.isin(held.identities, held.identities[(part == _TRAIN) | (part == SELECT)])
    of_all = np.ones(len(held), dtype=np.int64)
    of_all[certifies] = copies
    # keep the order of the inputs, which may be that of files on disk
    rows = np.sort(np.concatenate([np.flatnonzero(part == SELECT), certifies[firsts]]))
    _check_enough(held, rows, part[rows], new[rows])
    split = part[rows].astype(np.uint8)
    trained = held.subset(np.flatnonzero(part == _TRAIN)) if train is None else train
    seen = held.identities if more is None else np.concatenate([held.identities, more.identities])
    record = InputRecord(
        rows.astype(np.int64),
        held.identities[rows],
        of_all[rows],
        np.unique(seen),
        new[rows] | (split == SELECT),
        np.unique([each.is_images for each in (held, more) if each is not None]),
    )
    found = Inputs(trained, held.subset(rows), split, record)
    return replace(found, notes=(*notes, *_notes_of_copies(held, found, unique=unique)))


def part_to_train_on(held: Data, seed: int, *, unique: bool) -> Data:
    """Return the part of `held` that `split_inputs` trains on if there are no other training inputs."""
    part = _parts(held.identities, seed, third=True, unique=unique)
    return held.subset(np.flatnonzero(part == _TRAIN))


def content_hash(inputs: Data) -> str:
    """Return a hash of all inputs in their order."""
    return hashlib.sha256(inputs.identities.tobytes()).hexdigest()


_TRAIN, _LEFT_OUT = -1, -2


def _without(more: Data, held: Data, notes: list[str]) -> Data:
    """Return `more` without the inputs of `held`."""
    if more.is_images != held.is_images:
        notes.append(
            "one of --data and --train-data holds pictures and the other preprocessed tensors, which cannot "
            "be compared: make sure that --train-data has none of --data"
        )
    left = left_over(more, held.identities)
    if len(left) == 0:
        same = f"--train-data and --data are the same {len(more)} inputs"
        part = f"all {len(more)} inputs of --train-data are also in --data"
        raise DataError(
            f"{same if len(more) == len(held) else part}: hold out the validation inputs, "
            "or omit --train-data"
        )
    if len(left) < _LEAST_TAUGHT:
        raise DataError(
            f"training needs at least {_LEAST_TAUGHT} inputs, and --train-data has {len(left)} that are not "
            "in --data: give more (thousands teach better), or omit it"
        )
    if len(left) == len(more):
        return more
    notes.append(
        f"left out {len(more) - len(left)} of {len(more)} inputs of --train-data: they are also in --data"
    )
    return left


def left_over(inputs: Data, identities: Identities) -> Data:
    """Return `inputs` without those that have one of these identities."""
    fresh = np.flatnonzero(~np.isin(inputs.identities, identities))
    return inputs if len(fresh) == len(inputs) else inputs.subset(fresh)


def _copies_together(order: npt.NDArray[np.int64], first: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Move every input next to its copy that comes first in `order`; without copies nothing moves."""
    place = np.full(len(first), len(order), dtype=np.int64)
    np.minimum.at(place, first[order], np.arange(len(order)))
    return order[np.argsort(place[first[order]], kind="stable")]


def _parts(identities: Identities, seed: int, *, third: bool, unique: bool) -> npt.NDArray[np.int64]:
    """Return the part of each input, [n]: SELECT, CERTIFY, _TRAIN (a `third`), or _LEFT_OUT."""
    first, _ = group_copies(identities)
    every = np.arange(len(first))
    kept = np.flatnonzero(first == every) if unique else every
    order = np.random.default_rng((seed, 0)).permutation(len(kept))
    part = np.full(len(first), _LEFT_OUT, dtype=np.int64)
    part[kept] = _parts_of(order, np.searchsorted(kept, first[kept]), third=third)
    return part


def _parts_of(
    order: npt.NDArray[np.int64], first: npt.NDArray[np.int64], *, third: bool
) -> npt.NDArray[np.int64]:
    """Return the part of each input, [n]. Copies that do not certify go to the part of their first one."""
    count = len(order)
    cut = count // 3 if third else 0
    uses = cut + inputs_to_select_on(count - cut)
    used = _copies_together(order[:uses], first)
    ordered = np.full(uses, SELECT, dtype=np.int64)
    ordered[:cut] = _TRAIN
    starts = np.append(True, first[used][1:] != first[used][:-1])
    part = np.full(count, CERTIFY, dtype=np.int64)
    part[used] = ordered[np.maximum.accumulate(np.where(starts, np.arange(uses), 0))]
    return part


def _check_enough(
    held: Data,
    rows: npt.NDArray[np.int64],
    part: npt.NDArray[np.int64],
    new: npt.NDArray[np.bool_],
) -> None:
    left = len(np.unique(held.identities[rows]))
    if left < LEAST_HELD_OUT or not (part == SELECT).any() or not (part == CERTIFY).any():
        different = len(np.unique(held.identities))
        what = "" if different == len(held) else f", {different} of them different"
        raise DataError(
            f"{held.name} has {len(held)} inputs{what}; only {left} are left to measure on: "
            f"give enough for at least {LEAST_HELD_OUT} (several thousand for a certificate)"
        )
    if not (new & (part == CERTIFY)).any():
        raise DataError(
            f"every input of {held.name} to certify on has a copy that trains or selects, so nothing can be "
            "certified: make the inputs unique (--unique)"
        )


def _notes_of_copies(held: Data, inputs: Inputs, *, unique: bool) -> list[str]:
    copied = len(held) - len(np.unique(held.identities))
    if copied == 0:
        return []
    told = f"{copied} of {len(held)} inputs of --data are copies of others"
    if unique:
        return [f"{told}: each input is kept once"]
    certify = inputs.split == CERTIFY
    told += (
        f": {inputs.evidence} inputs are evidence for a certificate; further copies, and inputs of which a "
        "copy trains or selects, count only if their answers differ"
    )
    copies = CopyCounts(inputs.record.copies, inputs.record.new.astype(np.int64)).of(certify)
    warning = warning_of_copies(copies)
    return [told, warning] if warning else [told]


def held_out(library: Library) -> tuple[Data, npt.NDArray[np.uint8]]:
    """Return the held-out inputs that `explore` measured on, and their split (SELECT or CERTIFY, uint8 [n]).

    **Raises:** `DataError` when they are no longer where explore found them, have changed, or were an object.
    """
    settings = library.manifest.settings
    source = settings.get("data")
    if not source:
        raise DataError(
            "the manifest does not say where the held-out inputs are; explore again with another --out"
        )
    if "data" in settings.get("objects", ()):
        raise DataError(
            f"the library was explored from an object ({source.partition(',')[0]}), so its held-out inputs "
            "cannot be read again; explore from a file, a folder or package.module:callable"
        )
    _check_there(library, source, "repeat the gati explore command of this library with its new place")
    held = load_data(source, library.preprocessing, what="held-out data")
    record = library.input_record()
    if record is None:
        return _held_out_by_seed(library, held, source)
    return recorded_inputs(held, record, source), library.base_outcomes().split


def explored_inputs(library: Library, data: Any | None, train_data: Any | None) -> Inputs:
    """Return the inputs of the exploration, split as they were; `data` and `train_data` if they have moved.

    **Raises:** `DataError` if they are missing or others; `LibraryError` without a record of them.
    """
    manifest, record = library.manifest, library.input_record()
    if record is None:
        raise LibraryError(
            f"{library.directory} has no record of its inputs: an older Gati explored it; explore again with "
            "another --out"
        )
    preprocessing = library.preprocessing
    source = _source(library, "data", data)
    held = load_data(source, preprocessing, what="--data")
    held.name = manifest.data["held_out"].rpartition(" ")[0]  # fingerprints include the name as it was typed
    measured_on = recorded_inputs(held, record, source)
    more = _source(library, "train_data", train_data)
    name, _, explored = manifest.data["train"].rpartition(" ")
    if more is None:
        unique = bool(manifest.settings.get("unique"))
        # an older Gati held out all copies of a held-out input
        found = [part_to_train_on(held, manifest.seed, unique=unique), left_over(held, record.identities)]
    else:
        given = load_data(more, preprocessing, what="--train-data")
        given.name = name
        found = [left_over(given, held.identities)]
    train = next((each for each in found if each.fingerprint == explored), None)
    if train is None:
        raise DataError(
            f"the training inputs in {source if more is None else more} differ from those of the "
            "exploration; restore the old ones, or explore again with another --out"
        )
    return Inputs(train, measured_on, library.base_outcomes().split, record)


def _source(library: Library, name: str, given: Any | None) -> Any:
    """The inputs `given`, or where those of the exploration are; `name` is the argument."""
    settings = library.manifest.settings
    if given is not None:
        return given
    if name in settings.get("objects", ()):
        was = settings[name].partition(",")[0]
        raise DataError(f"the library was explored from an object ({was}): pass {name}= again")
    _check_there(library, settings.get(name), f"give its new place with --{name.replace('_', '-')}")
    return settings.get(name)


def _check_there(library: Library, source: str | None, otherwise: str) -> None:
    """Raise `DataError` if nothing is at `source`; the message says what to do `otherwise`."""
    if (place := gone(source)) is not None:
        raise DataError(
            f"the library in {library.directory} was explored with {place}, which is not there any more: put "
            f"it back, or {otherwise}"
        )


def recorded_inputs(held: Data, record: InputRecord, source: Any) -> Data:
    """Return the inputs of `held` that an exploration measured on.

    **Raises:** `DataError` if they have changed since; the message names `source`.
    """
    inside = len(record.rows) == 0 or int(record.rows.max()) < len(held)
    found = held.subset(record.rows) if inside else None
    if found is None or not np.array_equal(found.identities, record.identities):
        raise _changed(source)
    return found


def _changed(source: Any) -> DataError:
    return DataError(
        f"{source} has changed since explore; restore the old one, or explore again with another --out"
    )


def _held_out_by_seed(library: Library, held: Data, source: str) -> tuple[Data, npt.NDArray[np.uint8]]:
    """As `held_out`, for libraries of an older Gati, which split by seed alone and kept no identities."""
    manifest = library.manifest
    order = np.random.default_rng((manifest.seed, 0)).permutation(len(held))
    cut = 0 if manifest.settings.get("train_data") else len(held) // 3
    rest = np.sort(order[cut:])
    inputs = held.subset(rest)
    if not manifest.data.get("held_out", "").endswith((held.fingerprint, inputs.fingerprint)):
        raise _changed(source)
    recorded = library.base_outcomes().split
    select = np.isin(rest, order[cut : cut + int((recorded == SELECT).sum())])
    split = np.where(select, SELECT, CERTIFY).astype(np.uint8)
    if not np.array_equal(split, recorded):
        raise DataError(f"{source} splits differently than in explore; explore again with another --out")
    return inputs, split
