"""`reuse`: predicts from past requests when blocks are requested again, and learns online.

Every run of blocks becomes a sample when it is requested. A refit labels the samples with the bin of ages in
which they returned, or as not returned yet; it never uses later requests. Before the first model, scores are
ages, so the policy equals LRU.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gati.evict.predict.base import grown
from gati.evict.predict.hazard import (
    HazardModel,
    KnownWaits,
    check_fitting,
    fit_hazards,
    seconds_a_hit,
)
from gati.evict.predict.history import FEATURES, Observer, RequestHistory
from gati.evict.predict.samples import Labels, ReuseSamples, next_fit

_log = logging.getLogger("gati.evict")

Floats = NDArray[np.float64]
_TIE = 1e-6  # among equal predictions, the older run is evicted
_AT_ONCE = 512  # rows predicted together, so that intermediate results fit in the processor's cache


@dataclass(frozen=True)
class ReuseSettings:
    """Settings of `reuse`. Tuned on the first quarter of Mooncake's conversation trace.

    Only `first_fit` was chosen on the whole trace: with fewer samples, the guard had to step in early.
    """

    window: int = 40_000  # samples kept
    first_fit: int = 2_500  # samples before the first fit
    growth: float = 1.25  # factor by which the number of samples grows between refits
    longest_step: int = 20_000  # maximum number of samples between refits
    history_blocks: int = 20  # blocks that the history remembers, in capacities
    bins: int = 10
    rounds: int = 40
    leaves: int = 8
    rate: float = 0.1

    def due_after(self, samples: int) -> int:
        """The number of samples at the next fit, after a fit at `samples`."""
        return next_fit(samples, self.growth, self.longest_step)

    def fit(self, labels: Labels, seed: int) -> HazardModel | None:
        """Fit to these labels; None if they are too few."""
        return fit_hazards(
            labels,
            bins=self.bins,
            rounds=self.rounds,
            leaves=self.leaves,
            rate=self.rate,
            seed=seed,
        )


class _Offer(NamedTuple):
    """A model fitted elsewhere, with predictions [slots, bins] for the runs cached at request `since`."""

    model: HazardModel
    tables: Floats
    since: int


class Reuse:
    """Predicts for a cache of `capacity` blocks. `model` is a model that was fitted before.

    It refits while it serves, unless `fits` is false. If that fails, it goes on with the model that it has.
    With `apart`, a background thread fits and no request waits; how long it takes decides which request is
    the first to use the model. `offer` passes it a model fitted elsewhere. Raises EvictError if it is to
    fit without LightGBM, or with a seed out of range.
    """

    def __init__(
        self,
        capacity: int,
        *,
        settings: ReuseSettings | None = None,
        model: HazardModel | None = None,
        flat: bool = False,
        fits: bool = True,
        apart: bool = False,
        seed: int = 0,
    ) -> None:
        if fits:
            check_fitting(seed)  # fail now, not at the first fit, hours later
        self._settings = settings or ReuseSettings()
        self._fits = fits
        # its thread ends with it
        self._apart = ThreadPoolExecutor(1, "gati-refits") if fits and apart else None
        self._fitting: Future[None] | None = None
        self._samples = ReuseSamples(self._settings.window if fits else 1)
        watching = self._samples if fits else Observer()
        self._history = RequestHistory(self._settings.history_blocks * capacity, watching, flat=flat)
        self._model = model
        self._known: KnownWaits | None = None  # of the model in use
        self._seed = seed
        # a given model is not replaced by one fitted to far fewer samples
        self._due = self._settings.first_fit if model is None else self._settings.window // 2
        self._refits = self._failed_refits = 0
        self._taken = 0  # offered models that were put to use
        self._offers: deque[_Offer] = deque(maxlen=1)  # the newest
        self._request = 0
        self._fitting_s = 0.0
        self._now_s = 0.0
        self._request_features = np.zeros((0, len(FEATURES)), dtype=np.float32)
        self._request_tables = np.zeros((0, 0))
        self._features = np.zeros((64, len(FEATURES)), dtype=np.float32)  # by slot, like all arrays below
        self._tables = np.zeros(
            (64, 1 if model is None else model.bins)
        )  # seconds per hit at the beginning of each bin of ages
        self._values = np.zeros(64)  # the tables' values at the current age
        self._until_s = np.full(64, -np.inf)  # when these expire
        self._seen_s = np.zeros(64)
        self._seen_in = np.zeros(64, dtype=np.int64)  # request number

    @property
    def model(self) -> HazardModel | None:
        """The model in use."""
        return self._model

    def observe(self, ids: list[int], request: int, time_s: float) -> list[int]:
        """Learn from the request; if due, refit first, on everything before it."""
        self._now_s = time_s
        self._request += 1
        self._take_offer()
        if self._fits and self._samples.taken_in_all >= self._due:
            self._begin_refit()
        ends, self._request_features = self._history.access(ids, request, time_s)
        if self._model is not None:
            if self._known is None:
                self._known = KnownWaits(self._model)
            self._request_tables = self._known.of(self._request_features)
        return ends

    def assign(self, slot: int, stretch: int) -> None:
        """Store the features and predictions of the section."""
        self._grow(slot + 1)
        self._seen_s[slot] = self._now_s
        self._seen_in[slot] = self._request
        self._features[slot] = self._request_features[stretch]
        self._until_s[slot] = -np.inf
        if self._model is not None:
            self._tables[slot] = self._request_tables[stretch]

    def copy(self, source: int, target: int) -> None:
        """Both parts of a split run start with the same predictions."""
        self._grow(target + 1)
        for array in (self._features, self._tables, self._values, self._until_s, self._seen_s):
            array[target] = array[source]
        # `offer` may have copied the features before this split, so mark the slot as changed now.
        self._seen_in[target] = self._request

    def scores(self, count: int) -> Floats:
        """Predicted seconds per hit at the current ages; the ages themselves without a model."""
        self._grow(count)
        scores: Floats = self._now_s - self._seen_s[:count]  # ages
        if self._model is None:
            return scores
        (over,) = (self._until_s[:count] <= self._now_s).nonzero()
        if len(over):
            edges, ends = self._model.edges, self._model.ends
            at = np.minimum(edges.searchsorted(scores[over], side="right"), len(ends)) - 1
            self._values[over] = self._tables[over, at]
            self._until_s[over] = self._seen_s[over] + ends[at]
        scores *= _TIE  # in place: with tens of thousands of slots, memory traffic dominates
        scores += self._values[:count]
        return scores

    def refit(self) -> None:
        """Fit to everything known now, and recompute all predictions; if it raises, the model stays."""
        self._due = self._settings.due_after(self._due)
        self._refit(self._samples.labels(self._now_s))
        self._take_offer()

    def wait(self) -> None:
        """Wait until no fit is under way; its model is used from the next request on."""
        if self._fitting is not None:
            self._fitting.result()

    def _begin_refit(self) -> None:
        """Refit here, or in the background unless a fit is under way there."""
        if self._fitting is not None and not self._fitting.done():
            return
        self._due = self._settings.due_after(self._due)
        labels = self._samples.labels(self._now_s)
        if self._apart is not None:
            self._fitting = self._apart.submit(self._try_refit, labels)
            return
        self._try_refit(labels)
        self._take_offer()

    def _try_refit(self, labels: Labels) -> None:
        try:
            self._refit(labels)
        except Exception as error:  # whatever the reason: serving does not depend on learning
            self._failed_refits += 1
            if self._failed_refits == 1:  # said once
                _log.warning("predictions stay as they are, because a refit failed: %s", error)

    def _refit(self, labels: Labels) -> None:
        began = time.perf_counter()
        model = self._settings.fit(labels, self._seed + self._refits)
        if model is not None:
            self.offer(model)
            self._refits += 1
            self._fitting_s += time.perf_counter() - began

    def offer(self, model: HazardModel) -> None:
        """Use this model from the next request on. The calling thread computes most of the predictions.

        The serving thread recomputes those of the few runs that change in the meantime.
        """
        since = self._request
        features = self._features.copy()  # rows written meanwhile are predicted again in `_take`
        self._offers.append(_Offer(model, self._table(model, features), since))

    def _take_offer(self) -> None:
        if self._offers:
            self._take(self._offers.popleft())

    def _take(self, offer: _Offer) -> None:
        tables = np.zeros((len(self._seen_s), offer.model.bins))
        tables[: len(offer.tables)] = offer.tables
        newer = np.flatnonzero(self._seen_in >= offer.since)
        if len(newer):
            tables[newer] = self._table(offer.model, self._features[newer])
        self._model, self._tables, self._known = offer.model, tables, None
        self._until_s[:] = -np.inf
        self._taken += 1

    def figures(self) -> Mapping[str, Any]:
        """Number and duration of fits, and failures; with `fits` false, the number of models put to use."""
        if not self._fits:
            return {"models_taken": self._taken}
        return {
            "refits": self._refits,
            "failed_refits": self._failed_refits,
            "fitting_s": self._fitting_s,
        }

    def _table(self, model: HazardModel, features: NDArray[np.float32]) -> Floats:
        parts = [
            seconds_a_hit(model.hazards(features[begin : begin + _AT_ONCE]), model.edges)
            for begin in range(0, len(features), _AT_ONCE)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _grow(self, count: int) -> None:
        if count > len(self._seen_s):
            self._features = grown(self._features, count)
            self._tables = grown(self._tables, count)
            self._values = grown(self._values, count)
            self._until_s = grown(self._until_s, count)
            self._seen_s = grown(self._seen_s, count)
            self._seen_in = grown(self._seen_in, count)
