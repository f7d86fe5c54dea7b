"""Warnings about inputs that a certificate does not cover: sequential ones, and copies that are no draws.

Neighbours in the data are compared with random pairs of the same label. On the traffic videos of the
benchmarks, adjacent frames differ at most a fifth as much as random pairs, and frames five apart up to half
as much. Neighbours among independent images differ as much as random pairs, or three quarters as much if
similar images were sorted together (scikit-learn's digits). A shuffled sequence cannot be detected this way.

Nor does the data say where copies come from (`gati.composition.copies`). So the warning about them says what
to do if they are not draws of their own; where they are few, it hardly matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gati.model.identity import CopyCounts, group_copies

if TYPE_CHECKING:
    from torch import Tensor

    from gati.model.sequence import Data

_PAIRS = 100
_NEARLY = 0.4  # neighbours that differ by less than this share of random pairs are nearly the same
_LEAST = 30
_MANY_COPIES = 0.1  # share of the certify split that has copies elsewhere


def warning_of_neighbours(data: Data) -> str:
    """Return a warning if neighbours are nearly the same, else an empty string. Reads 300 inputs."""
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
        f"neighbours in {data.name} are nearly the same, like frames of a video: a certificate assumes "
        "inputs drawn independently from those that will be served"
    )


def warning_of_copies(certify: CopyCounts) -> str:
    """Return a warning if many inputs of the certify split have copies that train or select, else ""."""
    if certify.seen <= _MANY_COPIES * certify.draws:
        return ""
    return (
        f"{certify.seen} of {certify.draws} inputs to certify on have copies that train or select: if "
        "data was oversampled or exported twice, certificates may be false; explore with --unique then"
    )


def _difference(first: Tensor, second: Tensor) -> float:
    """The mean difference of values; for integers, which are ids, the share that differ."""
    apart = (first - second).abs() if first.is_floating_point() else (first != second).float()
    return float(apart.mean())
