"""Evaluates LightGBM's trees for a few rows, without the overhead of calling LightGBM.

A request needs predictions for a few rows, for which the call takes several times as long as the trees. Here
leaves are bits, numbered from left to right. A failed test excludes the leaves to its left, so the lowest
remaining bit is the leaf that is reached (QuickScorer, Lucchese et al. 2015). Tests of the bin are the same
for all rows: what a tree adds in each bin is tabled by the leaves that the other tests exclude.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bits = NDArray[np.uint8]

_LEAVES = 8  # per tree: the bits of a byte
_ALL = 255


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
        shape = (max(most, 1), len(trees))
        feature, threshold = np.zeros(shape, dtype=np.intp), np.full(shape, np.inf)
        excluded = np.zeros(shape, dtype=np.uint8)
        lowest = [(bits & -bits).bit_length() - 1 for bits in range(1, 256)]
        added = np.zeros((len(trees), 256, bins))  # by tree and excluded leaves
        for number, (tests, leaves) in enumerate(trees):
            kept = np.full(bins, _ALL)  # by the tests of the bin
            for place, test in enumerate(tests):
                if test.feature == features:
                    kept[np.arange(bins) > test.threshold] &= test.kept
                else:
                    feature[place, number], threshold[place, number] = test.feature, test.threshold
                    excluded[place, number] = _ALL & ~test.kept
            values = np.zeros(256)  # by the remaining leaves
            values[1:] = np.append(leaves, np.zeros(_LEAVES - len(leaves)))[lowest]
            added[number] = values[(_ALL - np.arange(256))[:, None] & kept]
        self._added = added.reshape(-1, bins)
        self._shape = shape
        self._feature, self._threshold, self._excluded = feature.ravel(), threshold.ravel(), excluded.ravel()
        self._first = 256 * np.arange(len(trees))

    def probabilities(self, rows: NDArray[np.float32]) -> Floats:
        """Probabilities of rows [n, features] without NaN in each bin, [n, bins]."""
        return self.of(self.excluded(rows))

    def excluded(self, rows: NDArray[np.float32]) -> Bits:
        """The leaves of each tree that rows [n, features] cannot reach in any bin, [n, trees]."""
        failed = rows.astype(np.float64).take(self._feature, axis=1) > self._threshold
        by_test = (failed * self._excluded).reshape(len(rows), *self._shape)
        found: Bits = np.bitwise_or.reduce(by_test, axis=1)
        return found

    def of(self, excluded: Bits) -> Floats:
        """Probabilities of rows that cannot reach these leaves, [n, bins]."""
        added = self._added.take(excluded + self._first, axis=0)
        odds = np.add.reduce(added, axis=1)  # in the order in which LightGBM adds them
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
    tests.append(_Test(node["split_feature"], node["threshold"], _ALL & ~left))
    return left | _walk(node["right_child"], tests, leaves)
