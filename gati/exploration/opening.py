"""Opening the held-out inputs, and adapting the network to the pictures, arrays or texts in them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from gati.errors import DataError
from gati.model.data import load_data
from gati.model.lengths import length_shares
from gati.model.load import LoadedModel
from gati.model.packed import fit_tensors, fit_text
from gati.model.sequence import Data

_GREY = "--data are read as grey pictures: the network takes one channel"


def fitted(loaded: LoadedModel, data: Any) -> tuple[LoadedModel, Data]:
    """Open the held-out data, and adapt the network to the arrays or texts in it.

    **Raises:** `DataError`; `ModelError` for arrays that the network does not take.
    """
    loaded, held = _opened(fit_text(loaded), data)
    if held.tensors is None:
        known = loaded.preprocessing
        unknown = known.unknown or not (held.is_images or loaded.preprocessing_from == "told" or known.sound)
        return replace(loaded, preprocessing=replace(loaded.preprocessing, unknown=unknown)), held
    loaded = fit_tensors(loaded, held.tensors, "--data", held.images(np.arange(min(2, len(held)))))
    lengths = length_shares(loaded.module, held.tensors.without_ranges(), held)
    return replace(loaded, preprocessing=replace(loaded.preprocessing, lengths=lengths)), held


def _opened(loaded: LoadedModel, data: Any) -> tuple[LoadedModel, Data]:
    """Open the held-out data: as grey images if only that fits a network that does not tell its channels."""
    known, note = loaded.preprocessing, loaded.note
    try:
        held = load_data(data, known, what="--data")
        if loaded.channels_known or held.tensors is not None or _takes(loaded.module, held):
            return loaded, held
        if held.images(np.arange(1)).shape[1] > 1:
            note = "; ".join(filter(None, (note, _GREY)))
    except DataError:
        if loaded.channels_known:
            raise
    if len({*known.mean}) == len({*known.std}) == 1:
        grey = replace(known, mean=known.mean[:1], std=known.std[:1], channels=1)
        with suppress(DataError):
            held = load_data(data, grey, what="--data")
            if _takes(loaded.module, held):
                return replace(loaded, preprocessing=grey, note=note), held
    return loaded, load_data(data, known, what="--data")


@torch.inference_mode()
def _takes(module: nn.Module, held: Data) -> bool:
    try:
        module(held.images(np.arange(min(2, len(held)))))
    except Exception:  # of the user's code, or of inputs that it does not take
        return False
    return True
