"""Evaluates LightGBM's trees for a few rows, without the overhead of calling LightGBM.

A request needs predictions for a few rows, for which the call takes several times as long as the trees. Here
leaves are bits, numbered from left to right. A failed test excludes the leaves to its left, so the lowest
remaining bit is the leaf that is reached (QuickScorer, Lucchese et al. 2015). Tests of the bin are the same
for all rows, and are evaluated once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bits = NDArray[np.uint8]

_LEAVES = 8  # per tree: the bits of a byte
_ALL = np.uint8(255)


class _Test(NamedTuple):
    """If the feature is larger than the threshold, only the leaves `kept`, as bits, can be reached."""

    feature: int
    threshold: float
    kept: int


class _UnknownTreesError(Exception):
    """These trees have a feature that is not supported here."""


class BinnedTrees:
    """Trees of a binary model whose last feature is the number of a bin, from 0 to `bins` - 1."""

    def __init__(self, trees: list[tuple[list[_Test], list[float]]], bins: int, features: int) -> None:
        """Each tree has its tests and the values of its leaves; `features` counts all but the bin."""
        most = max(len(tests) for tests, _ in trees)
        shape = (len(trees), max(most, 1))
        feature, threshold = np.zeros(shape, dtype=np.intp), np.full(shape, np.inf)
        kept = np.full(shape, _ALL)
        self._bins = np.full((len(trees), bins), _ALL)
        self._values = np.zeros((len(trees), 256))  # by the remaining bits
        lowest = [(bits & -bits).bit_length() - 1 for bits in range(1, 256)]
        for number, (tests, leaves) in enumerate(trees):
            for place, test in enumerate(tests):
                if test.feature == features:
                    self._bins[number, np.arange(bins) > test.threshold] &= np.uint8(test.kept)
                else:
                    feature[number, place], threshold[number, place] = test.feature, test.threshold
                    kept[number, place] = test.kept
            self._values[number, 1:] = np.append(leaves, np.zeros(_LEAVES - len(leaves)))[lowest]
        self._shape = shape
        self._feature = feature.ravel()
        self._threshold, self._kept = threshold.reshape(-1, 1), kept.reshape(-1, 1)
        self._first = 256 * np.arange(len(trees))[:, None, None]

    def probabilities(self, rows: NDArray[np.float32]) -> Floats:
        """Probabilities of rows [n, features] without NaN in each bin, [n, bins]."""
        columns = rows.T.astype(np.float64)
        failed = columns.take(self._feature, axis=0) > self._threshold
        kept = np.where(failed, self._kept, _ALL).reshape(*self._shape, len(rows))
        left: Bits = np.bitwise_and.reduce(kept, axis=1)
        at = (left[:, :, None] & self._bins[:, None, :]) + self._first
        odds = np.add.reduce(self._values.take(at), axis=0)  # in the order in which LightGBM adds them
        return np.asarray(1.0 / (1.0 + np.exp(-odds)))


def binned_trees(booster: Any, bins: int) -> BinnedTrees | None:
    """The trees of a LightGBM booster; None if one has more than 8 leaves or is not supported."""
    dumped = booster.dump_model()
    plain = dumped.get("objective") == "binary sigmoid:1" and not dumped.get("average_output")
    if not plain or dumped.get("num_tree_per_iteration") != 1 or not dumped["tree_info"]:
        return None
    trees = []
    try:
        for tree in dumped["tree_info"]:
            tests: list[_Test] = []
            leaves: list[float] = []
            _walk(tree["tree_structure"], tests, leaves)
            trees.append((tests, leaves))
    except _UnknownTreesError:
        return None
    return BinnedTrees(trees, bins, dumped["max_feature_idx"])


def _walk(node: Mapping[str, Any], tests: list[_Test], leaves: list[float]) -> int:
    """Collect the tests and leaves below a node, from left to right; return its leaves as bits."""
    if "leaf_value" in node:
        if len(leaves) == _LEAVES or "leaf_coeff" in node:
            raise _UnknownTreesError
        leaves.append(node["leaf_value"])
        return 1 << (len(leaves) - 1)
    if node["decision_type"] != "<=" or node["missing_type"] != "None":
        raise _UnknownTreesError
    left = _walk(node["left_child"], tests, leaves)
    tests.append(_Test(node["split_feature"], node["threshold"], int(_ALL) & ~left))
    return left | _walk(node["right_child"], tests, leaves)
