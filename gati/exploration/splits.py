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
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gati.errors import DataError
from gati.exploration.library import CERTIFY, SELECT, InputRecord, Library
from gati.model.data import load_data
from gati.model.identity import Identities, group_copies
from gati.model.sequence import Data

_LEAST_HELD_OUT = 60
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


def inputs_to_select_on(count: int) -> int:
    """Return how many of `count` held-out inputs are for selecting; the others certify."""
    return count // 2 if count <= TWICE_ENOUGH else max(ENOUGH, count // 3)


def split_inputs(held: Data, more: Data | None, seed: int) -> Inputs:
    """Split `held` into select and certify, and into a third part for training if `more` is None.

    What certifies is drawn copy by copy, so that common inputs are as common there as in `held`; all other
    copies of an input go to the same part. Inputs of `held` are left out of `more`.

    **Raises:** `DataError` if there is too little data, or if `more` has only inputs of `held`.
    """
    notes: list[str] = []
    train = None if more is None else _without(more, held, notes)
    first, _ = group_copies(held.identities)
    distinct = int((first == np.arange(len(held))).sum())
    if distinct < len(held):
        notes.append(
            f"{len(held) - distinct} of {len(held)} inputs of --data are copies of others: the certificate "
            "counts an input once if its answer agrees and no copy was used to train or to choose, and every "
            "copy if it differs"
        )
    part = _parts(np.random.default_rng((seed, 0)).permutation(len(held)), first, third=more is None)
    certifies = np.flatnonzero(part == CERTIFY)
    own, copies = group_copies(held.identities[certifies])
    firsts = own == np.arange(len(certifies))
    new = ~np.isin(held.identities, held.identities[part != CERTIFY])
    of_all = np.ones(len(held), dtype=np.int64)
    of_all[certifies] = copies
    # keep the order of the inputs, which may be that of files on disk
    rows = np.sort(np.concatenate([np.flatnonzero(part == SELECT), certifies[firsts]]))
    _check_enough(held, rows, first, part[rows], new[rows])
    split = part[rows].astype(np.uint8)
    trained = held.subset(np.flatnonzero(part == _TRAIN)) if train is None else train
    seen = held.identities if more is None else np.concatenate([held.identities, more.identities])
    record = InputRecord(
        rows.astype(np.int64),
        held.identities[rows],
        of_all[rows],
        np.unique(seen),
        new[rows] | (split == SELECT),
    )
    return Inputs(trained, held.subset(rows), split, record, tuple(notes))


def content_hash(inputs: Data) -> str:
    """Return a hash of all inputs in their order."""
    return hashlib.sha256(inputs.identities.tobytes()).hexdigest()


_TRAIN = -1


def _without(more: Data, held: Data, notes: list[str]) -> Data:
    """Return `more` without the inputs of `held`."""
    left = left_over(more, held.identities)
    if len(left) == 0:
        same = f"--train-data and --data are the same {len(more)} inputs"
        part = f"all {len(more)} inputs of --train-data are also in --data"
        raise DataError(
            f"{same if len(more) == len(held) else part}: hold out the validation inputs, "
            "or omit --train-data"
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


def _parts(
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
    first: npt.NDArray[np.int64],
    part: npt.NDArray[np.int64],
    new: npt.NDArray[np.bool_],
) -> None:
    left = len(np.unique(first[rows]))
    if left < _LEAST_HELD_OUT or not (part == SELECT).any() or not (new & (part == CERTIFY)).any():
        different = len(np.unique(first))
        what = "" if different == len(held) else f", {different} of them different"
        raise DataError(
            f"{held.name} has {len(held)} inputs{what}; only {left} are left to measure on: "
            f"give enough for at least {_LEAST_HELD_OUT} (several thousand for a certificate)"
        )


def held_out(library: Library) -> tuple[Data, npt.NDArray[np.uint8]]:
    """Return the held-out inputs that `explore` measured on, and their split (SELECT or CERTIFY, uint8 [n]).

    **Raises:** `DataError` when they are no longer where explore found them, or have changed.
    """
    manifest = library.manifest
    source = manifest.settings.get("data")
    if not source:
        raise DataError("the manifest does not say where the held-out inputs are; run gati explore again")
    held = load_data(source, library.preprocessing, what="held-out data")
    record = library.input_record()
    if record is None:
        return _held_out_by_seed(library, held, source)
    return recorded_inputs(held, record, source), library.base_outcomes().split


def recorded_inputs(held: Data, record: InputRecord, source: Any) -> Data:
    """Return the inputs of `held` that an exploration measured on.

    **Raises:** `DataError` if they have changed since; the message names `source`.
    """
    inside = len(record.rows) == 0 or int(record.rows.max()) < len(held)
    found = held.subset(record.rows) if inside else None
    if found is None or not np.array_equal(found.identities, record.identities):
        raise DataError(f"{source} has changed since explore; restore the old one, or explore again")
    return found


def _held_out_by_seed(library: Library, held: Data, source: str) -> tuple[Data, npt.NDArray[np.uint8]]:
    """As `held_out`, for libraries of an older Gati, which split by seed alone and kept no identities."""
    manifest = library.manifest
    order = np.random.default_rng((manifest.seed, 0)).permutation(len(held))
    cut = 0 if manifest.settings.get("train_data") else len(held) // 3
    rest = np.sort(order[cut:])
    inputs = held.subset(rest)
    if not manifest.data.get("held_out", "").endswith((held.fingerprint, inputs.fingerprint)):
        raise DataError(f"{source} has changed since explore; restore the old one, or explore again")
    recorded = library.base_outcomes().split
    select = np.isin(rest, order[cut : cut + int((recorded == SELECT).sum())])
    split = np.where(select, SELECT, CERTIFY).astype(np.uint8)
    if not np.array_equal(split, recorded):
        raise DataError(f"{source} splits differently than in explore; run gati explore again")
    return inputs, split
