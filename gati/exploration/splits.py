"""Splits: inputs that train, that select, and that only certify; reproducible later.

How many choose depends on how many there are, and on nothing else: accuracy targets are not known yet, and
what looked at outcomes would spoil the certificate. Few inputs to choose on, and what was found on them does
not hold on others; few to certify on, and hardly a loss is allowed. Up to `TWICE_ENOUGH` inputs neither part
can spare any, and each gets half. From there on `ENOUGH` choose and what is added certifies, until those that
choose are a third.

`benchmarks.splitting` simulates it. On the caches of a ResNet-56, targets 0.97 to 0.99 together, 600 inputs
gained most at a half, 1,000 and 2,000 at seven to eight tenths to certify on, one to two per cent over a half
(standard errors are about as large). Less than the simulated best certifies here, as the choice of selectors
and of variants, which it leaves out, wants inputs to choose on. Above 2,000 the rule is not measured.
"""

from __future__ import annotations

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
ENOUGH = 400  # inputs to choose on
TWICE_ENOUGH = 2 * ENOUGH


@dataclass(frozen=True)
class Inputs:
    """Training inputs, held-out inputs with their split (SELECT or CERTIFY, uint8 [n]), and who they are.

    Of the copies of an input in the certify split only the first is held out; `record` counts them. `notes`
    say what was left out and why, one line each.
    """

    train: Data
    held_out: Data
    split: npt.NDArray[np.uint8]
    record: InputRecord
    notes: tuple[str, ...] = ()


def inputs_to_select_on(count: int) -> int:
    """Return how many of `count` held-out inputs choose; the others certify."""
    return count // 2 if count <= TWICE_ENOUGH else max(ENOUGH, count // 3)


def split_inputs(held: Data, more: Data | None, seed: int) -> Inputs:
    """Split VAL into select and certify, and into a third part for training when there is no MORE.

    All copies of an input go to the same part, and inputs of VAL are left out of MORE.

    **Raises:** `DataError` when there is too little data, or when MORE has nothing but what VAL has.
    """
    notes: list[str] = []
    train = None if more is None else _without(more, held, notes)
    first, copies = group_copies(held.identities)
    distinct = int((first == np.arange(len(held))).sum())
    if distinct < len(held):
        notes.append(
            f"{len(held) - distinct} of {len(held)} inputs of --data are copies of another: all copies of "
            "one are in the same part, and for the certificate they count as one where the answers agree"
        )
    order = _copies_together(np.random.default_rng((seed, 0)).permutation(len(held)), first)
    part = _parts(order, first, third=more is None)
    # the order of the inputs is kept, for it may be the order of files on disk
    rows = np.flatnonzero((part == SELECT) | ((part == CERTIFY) & (first == np.arange(len(held)))))
    _check_enough(held, rows, first, part)
    split = part[rows].astype(np.uint8)
    trained = held.subset(np.flatnonzero(part == _TRAIN)) if train is None else train
    seen = held.identities if more is None else np.concatenate([held.identities, more.identities])
    record = InputRecord(
        rows.astype(np.int64),
        held.identities[rows],
        np.where(split == CERTIFY, copies[rows], 1).astype(np.int64),
        np.unique(seen),
    )
    return Inputs(trained, held.subset(rows), split, record, tuple(notes))


_TRAIN = -1


def _without(more: Data, held: Data, notes: list[str]) -> Data:
    """Return MORE without the inputs of VAL."""
    left = left_over(more, held.identities)
    if len(left) == 0:
        same = f"--train-data and --data are the same {len(more)} inputs"
        part = f"all {len(more)} inputs of --train-data are in --data, too"
        raise DataError(
            f"{same if len(more) == len(held) else part}: hold the validation inputs out, "
            "or leave --train-data away"
        )
    if len(left) == len(more):
        return more
    notes.append(
        f"left {len(more) - len(left)} of {len(more)} inputs of --train-data out: they are in --data, too"
    )
    return left


def left_over(inputs: Data, identities: Identities) -> Data:
    """Return `inputs` without those that have one of these identities."""
    fresh = np.flatnonzero(~np.isin(inputs.identities, identities))
    return inputs if len(fresh) == len(inputs) else inputs.subset(fresh)


def _copies_together(order: npt.NDArray[np.int64], first: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Move every input next to its copy that comes first in `order`; without copies nothing moves."""
    place = np.full(len(order), len(order), dtype=np.int64)
    np.minimum.at(place, first[order], np.arange(len(order)))
    return order[np.argsort(place[first[order]], kind="stable")]


def _parts(
    order: npt.NDArray[np.int64], first: npt.NDArray[np.int64], *, third: bool
) -> npt.NDArray[np.int64]:
    """Return the part of each input, [n]: where the cuts fall among copies, all go where the first goes."""
    count = len(order)
    cut = count // 3 if third else 0
    ordered = np.full(count, CERTIFY, dtype=np.int64)
    ordered[: cut + inputs_to_select_on(count - cut)] = SELECT
    ordered[:cut] = _TRAIN
    starts = np.append(True, first[order][1:] != first[order][:-1])
    ordered = ordered[np.maximum.accumulate(np.where(starts, np.arange(count), 0))]
    part = np.empty(count, dtype=np.int64)
    part[order] = ordered
    return part


def _check_enough(
    held: Data, rows: npt.NDArray[np.int64], first: npt.NDArray[np.int64], part: npt.NDArray[np.int64]
) -> None:
    left = len(np.unique(first[rows]))
    missing = [name for name, value in (("select", SELECT), ("certify", CERTIFY)) if value not in part[rows]]
    if left < _LEAST_HELD_OUT or missing:
        different = len(np.unique(first))
        what = "" if different == len(held) else f", {different} of them different"
        raise DataError(
            f"{held.name} has {len(held)} inputs{what}, which leaves {left} to measure on: "
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
    """Return those of `held` that an exploration measured on.

    **Raises:** `DataError` when they have changed since; it names `source`.
    """
    inside = len(record.rows) == 0 or int(record.rows.max()) < len(held)
    found = held.subset(record.rows) if inside else None
    if found is None or not np.array_equal(found.identities, record.identities):
        raise DataError(f"{source} has changed since explore; restore the old one, or explore again")
    return found


def _held_out_by_seed(library: Library, held: Data, source: str) -> tuple[Data, npt.NDArray[np.uint8]]:
    """As `held_out`, for libraries from before inputs had identities: they split without looking at them."""
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
