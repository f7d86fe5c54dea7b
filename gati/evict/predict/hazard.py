"""Return times of blocks: hazards over ages, learned by gradient-boosted trees, and the value of a block.

Age, the time since a block's last access, is cut into bins. The model gives h_b(x), the chance that a block
with features x returns within bin b if it has not before. Samples still waiting to be requested again count
in the bins they have lived through, so nothing need be waited for and nothing later is looked at.

A cache of k blocks spends k blocks times seconds a second; what a block is worth is hits per block and
second. Kept from age a until it returns, or until an age T at the latest, it gives

    worth(a) = max over T > a of  P(returns in (a, T]) / E[time until it returns or T]

(the index of Gittins for a job whose length is random). Its inverse, seconds a hit, is what policies take as
the predicted next use: a block that surely returns in 20 s has 20 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import EvictError
from gati.evict.predict.samples import Labels, by_bin
from gati.evict.predict.trees import binned_trees

Floats = NDArray[np.float64]
_THINNED = 3.0  # one in so many rows without a return is fitted


def seconds_a_hit(hazards: Floats, edges: Floats) -> Floats:
    """Return the inverse worth at the beginning of every bin, [n, bins], from hazards [n, bins].

    `edges` [bins + 1] are ages in seconds. Those who return in a bin do so in its middle.
    """
    count, bins = hazards.shape
    alive = np.ones((count, bins + 1))
    np.multiply.accumulate(1.0 - hazards, axis=1, out=alive[:, 1:])
    spent = np.zeros((count, bins + 1))
    between = (edges[1:] - edges[:-1]) * 0.5 * (alive[:, :-1] + alive[:, 1:])
    np.add.accumulate(between, axis=1, out=spent[:, 1:])
    hits = alive[:, :bins, None] - alive[:, None, 1:]  # [n, from, to]
    time = spent[:, None, 1:] - spent[:, :bins, None]
    worth = np.divide(hits, time, out=np.zeros(time.shape), where=time > 0.0)
    best = np.maximum.reduce(worth, axis=2)
    inverse: Floats = 1.0 / np.maximum(best, 1e-12)
    return inverse


class HazardModel:
    """One boosted model for all bins: the bin is a feature among the others."""

    def __init__(self, edges: Floats, booster: Any) -> None:
        self.edges = edges
        self.ends = np.append(edges[1:-1], np.inf)  # of the bins; the last one is open
        self.booster = booster
        self._trees = binned_trees(booster, self.bins)

    @property
    def bins(self) -> int:
        """Number of age bins."""
        return len(self.edges) - 1

    def hazards(self, features: NDArray[np.float32]) -> Floats:
        """Chance to return in each bin if not before, [n, bins], for features [n, F]."""
        if self._trees is not None:
            return self._trees.probabilities(features)
        count, bins = len(features), self.bins
        rows = np.empty((count, bins, features.shape[1] + 1), dtype=np.float32)
        rows[:, :, :-1] = features[:, None]
        rows[:, :, -1] = np.arange(bins)
        found = self.booster.predict(rows.reshape(count * bins, -1), num_threads=1)
        return np.asarray(found, dtype=np.float64).reshape(count, bins)


def fit_hazards(
    labels: Labels,
    *,
    edges: Floats | None = None,
    bins: int = 10,
    rounds: int = 40,
    leaves: int = 8,
    rate: float = 0.1,
    seed: int = 0,
) -> HazardModel | None:
    """Fit a model to what is known of samples; None where too few of them have returned to tell anything.

    `edges` are bounds of the bins of ages, by default `bins` of them as `ages` has it. Raises EvictError
    where LightGBM is not installed.
    """
    lightgbm = lightgbm_module()
    edges = ages(labels.gaps_s, bins) if edges is None else edges
    if edges is None:
        return None
    rows = by_bin(labels, edges)
    # Most rows say that a sample did not return yet: a part of them, weighted, tells as much.
    random = np.random.default_rng(seed)
    kept = rows.returned | (random.random(len(rows.returned)) < 1.0 / _THINNED)
    sample, number, returned, weights = (each[kept] for each in rows)
    if returned.all() or not returned.any():
        return None
    table = np.column_stack((labels.features[sample], number.astype(np.float32)))
    weights = weights * np.where(returned, 1.0, _THINNED)
    quiet = {"verbose": -1, "num_threads": 1, "max_bin": 63}
    settings = {
        **quiet,
        "objective": "binary",
        "num_leaves": leaves,
        "learning_rate": rate,
        "min_data_in_leaf": 50,
        "lambda_l2": 10.0,
        "seed": seed,
        "deterministic": True,
        "force_row_wise": True,
    }
    data = lightgbm.Dataset(table, returned, weight=weights, params=quiet)
    return HazardModel(edges, lightgbm.train(settings, data, rounds))


def ages(gaps_s: Floats, bins: int) -> Floats | None:
    """Bounds of the bins, each with as many known returns; None where these are fewer than two a bin."""
    known = gaps_s[~np.isnan(gaps_s)]
    if len(known) < 2 * bins:
        return None
    positive = known[known > 0.0]
    if len(positive) == 0:
        return None
    first = max(float(np.quantile(known, 1.0 / bins)), 0.5 * float(positive.min()))
    later = known[known > first]
    inner = np.quantile(later, np.linspace(0.0, 1.0, bins)[1:-1]) if len(later) else np.zeros(0)
    return np.unique(np.concatenate(([0.0, first], inner, [1.5 * float(known.max())])))


def lightgbm_module() -> Any:
    """LightGBM, imported when it is needed. Raises EvictError where it is not installed."""
    try:
        import lightgbm
    except ImportError:
        raise EvictError("the predictor reuse needs LightGBM: pip install 'gati[evict]'") from None
    return lightgbm
