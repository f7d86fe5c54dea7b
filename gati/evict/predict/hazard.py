"""Return times of blocks: hazards over ages, learned by gradient-boosted trees, and the value of a block.

Age, the time since a block's last access, is divided into bins. The model estimates h_b(x), the probability
that a block with features x returns within bin b if it has not returned before. Samples that have not
returned yet count in the bins they were observed in, so fitting neither waits for the future nor uses it.

A cache of k blocks spends k block-seconds per second, so the worth of a block is its hits per block-second. A
block that is kept from age a until it returns, or until age T at the latest, has

    worth(a) = max over T > a of  P(returns in (a, T]) / E[time until it returns or T]

(the Gittins index of a job of random length). Policies use its inverse, seconds per hit, as the predicted
next use: for a block that is certain to return in 20 s, it is 20 s.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import EvictError
from gati.evict.predict.base import grown
from gati.evict.predict.samples import Labels, by_bin
from gati.evict.predict.trees import binned_trees
from gati.evict.seeds import check_seed

Floats = NDArray[np.float64]
_MOST_KNOWN = 4_096  # rows whose predictions are kept: some hundred kilobytes
_THINNED = 3.0  # one in `_THINNED` rows without a return is used for fitting


def seconds_a_hit(hazards: Floats, edges: Floats) -> Floats:
    """Return the inverse worth at the beginning of every bin, [n, bins], from hazards [n, bins].

    `edges` [bins + 1] are ages in seconds. Blocks that return in a bin are assumed to do so in its middle.
    """
    count, bins = hazards.shape
    alive = np.ones((count, bins + 1))
    np.multiply.accumulate(1.0 - hazards, axis=1, out=alive[:, 1:])
    spent = np.zeros((count, bins + 1))
    between = (edges[1:] - edges[:-1]) * 0.5 * (alive[:, :-1] + alive[:, 1:])
    np.add.accumulate(between, axis=1, out=spent[:, 1:])
    begin, end, first = _stretches(bins)
    hits = alive.take(begin, axis=1) - alive.take(end, axis=1)
    time = spent.take(end, axis=1) - spent.take(begin, axis=1)
    worth = np.divide(hits, time, out=np.zeros(time.shape), where=time > 0.0)
    best = np.maximum.reduceat(worth, first, axis=1)
    inverse: Floats = 1.0 / np.maximum(best, 1e-12)
    return inverse


@lru_cache
def _stretches(bins: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Where each stretch of bins begins and ends, and the first stretch of each beginning."""
    begin, last = np.triu_indices(bins)
    return begin, last + 1, np.flatnonzero(np.diff(begin, prepend=-1))


class HazardModel:
    """One boosted model for all bins; the number of the bin is one of its features."""

    def __init__(self, edges: Floats, booster: Any) -> None:
        self.edges = edges
        self.ends = np.append(edges[1:-1], np.inf)  # of the bins; the last bin is open
        self.booster = booster
        self.trees = binned_trees(booster, self.bins)

    @property
    def bins(self) -> int:
        """Number of age bins."""
        return len(self.edges) - 1

    def hazards(self, features: NDArray[np.float32]) -> Floats:
        """Probability to return in each bin if not before, [n, bins], for features [n, F]."""
        if self.trees is not None:
            return self.trees.probabilities(features)
        count, bins = len(features), self.bins
        rows = np.empty((count, bins, features.shape[1] + 1), dtype=np.float32)
        rows[:, :, :-1] = features[:, None]
        rows[:, :, -1] = np.arange(bins)
        found = self.booster.predict(rows.reshape(count * bins, -1), num_threads=1)
        return np.asarray(found, dtype=np.float64).reshape(count, bins)


class KnownWaits:
    """Seconds per hit of a model, for a few rows at a time.

    Most rows are tested as earlier ones were, which already says everything: theirs are looked up. Not
    thread-safe.
    """

    def __init__(self, model: HazardModel) -> None:
        self._model = model
        self._places: dict[bytes, int] = {}  # by excluded leaves
        self._waits = np.zeros((64, model.bins))

    def of(self, features: NDArray[np.float32]) -> Floats:
        """Seconds per hit at the beginning of every bin, [n, bins], for features [n, F]."""
        model, trees, places = self._model, self._model.trees, self._places
        if trees is None or len(features) > _MOST_KNOWN:
            return seconds_a_hit(model.hazards(features), model.edges)
        if len(places) + len(features) > _MOST_KNOWN:
            places.clear()
        excluded = trees.excluded(features)
        keys = [row.tobytes() for row in excluded]
        new = [number for number, key in enumerate(keys) if key not in places]
        if new:
            found = seconds_a_hit(trees.of(excluded[new]), model.edges)
            self._waits = grown(self._waits, len(places) + len(new))
            for number, wait in zip(new, found, strict=True):
                place = places.setdefault(keys[number], len(places))
                self._waits[place] = wait
        return self._waits.take([places[key] for key in keys], axis=0)


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
    """Fit a model to labels; None if too few samples have returned.

    `edges` are the bounds of the age bins, by default those of `ages` for `bins` bins. Raises EvictError if
    LightGBM is not installed.
    """
    lightgbm = lightgbm_module()
    edges = ages(labels.gaps_s, bins) if edges is None else edges
    if edges is None:
        return None
    rows = by_bin(labels, edges)
    # Most rows are samples that did not return yet; a weighted subset of these is enough.
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
    """Bounds of bins over the known gaps, each weighted by its square root; None if two a bin are not known.

    Without weights most bins would lie in bursts, and the ages at which a cache has to choose would share the
    last ones. A block that returns late has taken space for as long.
    """
    known = np.sort(gaps_s[~np.isnan(gaps_s)])
    if len(known) < 2 * bins or known[-1] <= 0.0:
        return None
    weight = np.cumsum(np.sqrt(known))
    inner = known[np.searchsorted(weight, weight[-1] * np.arange(1, bins) / bins)]
    return np.unique(np.concatenate(([0.0], inner, [1.5 * known[-1]])))


def check_fitting(seed: int) -> None:
    """Raises EvictError if fitting would fail: for a seed out of range, and without LightGBM."""
    check_seed(seed)
    lightgbm_module()


def lightgbm_module() -> Any:
    """LightGBM, imported on first use. Raises EvictError if it is not installed."""
    try:
        import lightgbm
    except ImportError:
        raise EvictError("the predictor reuse needs LightGBM: pip install 'gati[evict]'") from None
    return lightgbm
