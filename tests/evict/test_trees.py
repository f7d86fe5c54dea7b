"""LightGBM's trees as bits, against LightGBM itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gati.evict.predict import hazard
from gati.evict.predict.hazard import HazardModel, KnownWaits, lightgbm_module, seconds_a_hit
from gati.evict.predict.trees import binned_trees

BINS, FEATURES = 6, 5


def table(rows: int, seed: int) -> NDArray[np.float32]:
    """Few different values, so that many lie on a threshold."""
    chance = np.random.default_rng(seed)
    found = chance.integers(-3, 9, (rows, FEATURES + 1)).astype(np.float32)
    found[:, 1] = chance.normal(0.0, 100.0, rows)
    found[:, -1] = chance.integers(0, BINS, rows)
    return found


def fitted(leaves: int, seed: int, *, fewest: int = 5) -> Any:
    rows = table(4_000, seed)
    chance = np.random.default_rng(seed + 1)
    odds = np.sin(rows[:, 0]) + 0.01 * rows[:, 1] * (rows[:, 2] > 2) + 0.3 * rows[:, -1] - 1.0
    returned = chance.random(len(rows)) < 1.0 / (1.0 + np.exp(-odds))
    settings = {"objective": "binary", "num_leaves": leaves, "min_data_in_leaf": fewest, "verbose": -1}
    lightgbm = lightgbm_module()
    return lightgbm.train(settings | {"num_threads": 1}, lightgbm.Dataset(rows, returned), 25)


def asked(booster: Any, features: NDArray[np.float32]) -> NDArray[np.float64]:
    """What the booster says of every bin of every row."""
    rows = np.repeat(features, BINS, axis=0)
    rows = np.column_stack((rows, np.tile(np.arange(BINS, dtype=np.float32), len(features))))
    return np.asarray(booster.predict(rows)).reshape(-1, BINS)


@pytest.mark.parametrize("leaves", [2, 3, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_trees_as_bits_say_what_lightgbm_says(leaves: int, seed: int) -> None:
    booster = fitted(leaves, seed)
    model = HazardModel(np.arange(BINS + 1.0), booster)
    assert binned_trees(booster, BINS) is not None
    features = table(300, seed + 7)[:, :-1]
    found = model.hazards(features)
    np.testing.assert_allclose(found, asked(booster, features), rtol=1e-13)
    for row in range(0, 300, 37):  # bit for bit, alone or with others
        np.testing.assert_array_equal(model.hazards(features[row : row + 1])[0], found[row])


def walked(booster: Any, features: NDArray[np.float32]) -> NDArray[np.float64]:
    """The same, test by test, with the leaves added one by one in the order of the trees."""
    found = np.zeros((len(features), BINS))
    trees = booster.dump_model()["tree_info"]
    for row, values in enumerate(features.astype(float).tolist()):
        for bin_ in range(BINS):
            odds = 0.0
            for tree in trees:
                node = tree["tree_structure"]
                while "leaf_value" not in node:
                    value = [*values, float(bin_)][node["split_feature"]]
                    node = node["left_child" if value <= node["threshold"] else "right_child"]
                odds += node["leaf_value"]
            found[row, bin_] = odds
    return np.asarray(1.0 / (1.0 + np.exp(-found)))


@pytest.mark.parametrize("leaves", [2, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 50])
def test_decisions_stay_as_they_are_since_sums_are_equal_bit_for_bit(leaves: int, rows: int) -> None:
    booster = fitted(leaves, 2)
    features = table(rows, 11)[:, :-1]
    trees = binned_trees(booster, BINS)
    assert trees is not None
    np.testing.assert_array_equal(trees.probabilities(features), walked(booster, features))


@pytest.mark.parametrize("most", [12, 4_096])
@pytest.mark.parametrize("leaves", [3, 8, 9])
def test_what_is_looked_up_is_what_would_be_computed(
    leaves: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, also once more kinds of rows were asked for than are kept, and if trees are too large."""
    monkeypatch.setattr(hazard, "_MOST_KNOWN", most)
    model = HazardModel(np.arange(BINS + 1.0), fitted(leaves, 1))
    known = KnownWaits(model)
    chance = np.random.default_rng(leaves)
    some = table(40, 5)[:, :-1]
    for _ in range(60):
        rows = some[chance.integers(0, len(some), chance.integers(1, 14))]
        np.testing.assert_array_equal(known.of(rows), seconds_a_hit(model.hazards(rows), model.edges))


def test_trees_that_are_a_single_leaf_are_known_too() -> None:
    booster = fitted(8, 0, fewest=3_000)
    features = table(10, 3)[:, :-1]
    found = HazardModel(np.arange(BINS + 1.0), booster).hazards(features)
    np.testing.assert_allclose(found, asked(booster, features), rtol=1e-13)


def test_larger_trees_are_left_to_lightgbm() -> None:
    booster = fitted(9, 0)
    assert binned_trees(booster, BINS) is None
    features = table(10, 3)[:, :-1]
    found = HazardModel(np.arange(BINS + 1.0), booster).hazards(features)
    np.testing.assert_array_equal(found, asked(booster, features))
