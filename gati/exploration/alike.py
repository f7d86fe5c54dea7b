"""A warning about sequential inputs, such as frames of a video, which a certificate does not cover.

Neighbours in the data are compared with random pairs of the same label. Frames one apart differ a fifth as
much or less on the traffic videos of the benchmarks, five apart up to a half; pictures that were drawn by
themselves differ as much, three quarters where similar ones were sorted together (scikit-learn's digits).
Shuffled data cannot be detected this way.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gati.model.identity import group_copies
from gati.model.sequence import Data

_PAIRS = 100
_NEARLY = 0.4  # of how much random pairs differ
_LEAST = 30


def warning_of_neighbours(data: Data) -> str:
    """Return a line where neighbours are nearly the same, else an empty one. Reads 300 inputs."""
    first, _ = group_copies(data.identities)
    rows = np.flatnonzero(first == np.arange(len(data)))  # copies are reported elsewhere
    if len(rows) < _LEAST:
        return ""
    random = np.random.default_rng(0)
    labels = np.zeros(len(rows)) if data.labels is None else data.labels[rows]
    near, far = [], []
    for place in random.permutation(len(rows) - 1)[:_PAIRS]:
        same = np.flatnonzero(labels == labels[place])
        other = same[random.integers(len(same))]
        inputs = data.images(rows[[place, place + 1, other]])
        near.append(_difference(inputs[0], inputs[1]))
        if abs(other - place) > 1:
            far.append(_difference(inputs[0], inputs[2]))
    if len(far) < _LEAST // 2 or np.median(near) >= _NEARLY * np.median(far):
        return ""
    return (
        f"neighbours in {data.name} are nearly the same, as frames of a video are: a certificate assumes "
        "inputs drawn independently from what will be served"
    )


def _difference(first: Tensor, second: Tensor) -> float:
    """How far values are apart; of whole numbers, which are names of something, how many differ."""
    apart = (first - second).abs() if first.is_floating_point() else (first != second).float()
    return float(apart.mean())
