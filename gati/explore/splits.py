"""Which inputs train, which choose and which are only counted; the same ones found again later."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gati.errors import DataError
from gati.explore.library import CERTIFY, SELECT, Library
from gati.model.data import Data, load_data
from gati.model.preprocess import Preprocessing

__all__ = ["Inputs", "held_out", "split_inputs"]

_LEAST_HELD_OUT = 60


@dataclass(frozen=True)
class Inputs:
    """Training inputs and held-out inputs with their split (SELECT or CERTIFY, uint8 [n])."""

    train: Data
    held_out: Data
    split: npt.NDArray[np.uint8]


def split_inputs(held: Data, more: Data | None, seed: int) -> Inputs:
    """Split VAL into select and certify, and into a third part for training when there is no MORE.

    **Raises:** `DataError` when there is too little data, or when MORE is VAL again.
    """
    if more is not None and more.fingerprint == held.fingerprint:
        raise DataError(
            f"--train-data and --data are the same {len(held)} inputs: hold the validation inputs out, "
            "or leave --train-data away"
        )
    order = np.random.default_rng((seed, 0)).permutation(len(held))
    cut = len(held) // 3 if more is None else 0
    rest = np.sort(order[cut:])
    if len(rest) < _LEAST_HELD_OUT:
        raise DataError(
            f"{held.name} has {len(held)} inputs, which leaves {len(rest)} to measure on: "
            f"give enough for at least {_LEAST_HELD_OUT} (several thousand for a certificate)"
        )
    in_select = set(order[cut : cut + len(rest) // 2].tolist())
    split = np.array([SELECT if index in in_select else CERTIFY for index in rest], dtype=np.uint8)
    train = more if more is not None else held.subset(np.sort(order[:cut]))
    return Inputs(train, held.subset(rest), split)


def held_out(library: Library) -> tuple[Data, npt.NDArray[np.uint8]]:
    """Return the held-out inputs that `explore` measured on, and their split (SELECT or CERTIFY, uint8 [n]).

    **Raises:** `DataError` when they are no longer where explore found them, or have changed.
    """
    manifest = library.manifest
    source = manifest.settings.get("data")
    if not source:
        raise DataError("the manifest does not say where the held-out inputs are; run gati explore again")
    held = load_data(source, Preprocessing.from_json(manifest.preprocessing), what="held-out data")
    # Only whether there was MORE changes the split, so one input stands in for it.
    more = held.subset([0]) if manifest.settings.get("train_data") else None
    inputs = split_inputs(held, more, manifest.seed)
    if not manifest.data.get("held_out", "").endswith((held.fingerprint, inputs.held_out.fingerprint)):
        raise DataError(f"{source} has changed since explore; bring the old one back, or explore again")
    if not np.array_equal(inputs.split, library.base_outcomes().split):
        raise DataError(f"{source} splits otherwise than explore did; run gati explore again")
    return inputs.held_out, inputs.split
