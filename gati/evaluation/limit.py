"""Measuring on the first inputs of data only."""

from __future__ import annotations

import numpy as np

from gati.model.sequence import Data


def first_inputs(inputs: Data, limit: int | None) -> tuple[Data, str]:
    """Return the first `limit` inputs, all if it is None, and a warning if they lack classes by their order.

    In folders, and in files that were made from them, inputs are ordered by class.
    """
    if limit is None or limit >= len(inputs):
        return inputs, ""
    few, labels = inputs.subset(range(limit)), inputs.labels
    if labels is None or bool((np.diff(labels) < 0).any()):
        return few, ""
    shown, classes = (len(np.unique(each)) for each in (labels[:limit], labels))
    if shown == classes:
        return few, ""
    return few, (
        f"the data is ordered by class, so its first {limit} inputs show {shown} of {classes} classes: "
        "shuffle it, or leave out --limit"
    )
