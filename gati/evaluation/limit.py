"""Measuring on some of the inputs only."""

from __future__ import annotations

import numpy as np

from gati.model.sequence import Data


def drawn_inputs(inputs: Data, limit: int | None) -> Data:
    """Return `limit` of the inputs, each drawn at random from one of as many equal parts; all if it is None.

    They are the same each time. The first inputs would be unlike the others: folders, and files that were
    made from them, are ordered by class.
    """
    if limit is None or limit >= len(inputs):
        return inputs
    bounds = np.arange(limit + 1) * len(inputs) // limit
    return inputs.subset(np.random.default_rng(0).integers(bounds[:-1], bounds[1:]))
