"""Recall: an input that looks like what its place has shown before is answered as the base model did then.

It is a cache before the network, and learned like the others: what it predicts is the remembered answer
(`gati.adapt.memory`), what selects is a regression of how probable it is that this one is wrong
(`gati.adapt.risk`), fitted anew to every request whose base answer becomes known. So it fits a scene after
some seconds, follows it without any training of networks, and costs a few percent of a small network.

How much it answers is steered by audits. Of all requests, a share of `_TARGET` of what the promise tolerates
is to be answered differently from the base model: each audit raises what the regression may expect a little,
each loss lowers it by half (after Gibbs and Candes 2021, whose bound on the average needs no assumption about
the stream). It may answer once the promise is proven on requests that it did not answer yet
(`gati.adapt.recertify`), and stops when the guard says that the promise is broken (`gati.adapt.guard`): both
count every early answer while it is in place, not only its own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gati.adapt.guard import Guard
from gati.adapt.memory import FEATURES, FURTHER, Memory, Seen, sketch
from gati.adapt.recertify import Recertification
from gati.adapt.risk import Risk
from gati.runtime.exits import Prediction

__all__ = ["RECALL", "Looked", "Recall"]

RECALL = "recall"  # Prediction.exit of an answer from memory

_TARGET = 0.5  # of the tolerated disagreement
_RATE = 0.7  # a loss halves what may be expected
_FIRST, _LEAST, _MOST = 0.1, 0.02, 0.6  # what may be expected, as a share of the tolerated
_LABELS = 1500  # the last ones are fitted to
_FEWEST = 60
_FIT_EVERY = 10  # labels, and no less than a share of them all
_FIT_SHARE = 1 / 50
_RECENT = 600  # requests among which the threshold is looked for
_HIGHEST_RISK = 0.5
_PLACES = 64


class Looked(NamedTuple):
    """What recall says of a request. `confident`: it would answer, if it is allowed to."""

    place: str
    sketched: NDArray[np.float32]
    seen: Seen | None
    confident: bool

    def wrong(self, base: Prediction) -> bool:
        """Whether the remembered answer is not the base model's."""
        return self.seen is not None and self.seen.answer.class_index != base.class_index


class Recall:
    """Remembers, answers, and learns how far it may be trusted; for several threads.

    `agreement` at `confidence` is the promise, `audits_to_false_alarm` the guard's. `leave` is handed the
    fits, for a thread that nobody waits for, and says whether it takes them. `on_change` hears whether it
    answers from now on, and of how many audits how many were losses.
    """

    def __init__(
        self,
        agreement: float,
        confidence: float,
        audits_to_false_alarm: float,
        *,
        leave: Callable[[Callable[[], None]], bool],
        on_change: Callable[[bool, int, int], None],
    ) -> None:
        self._agreement, self._confidence = agreement, confidence
        self._guard = Guard(agreement, audits_to_false_alarm)
        self._proof: Recertification | None = Recertification(agreement, confidence)
        self._leave, self._on_change = leave, on_change
        self._lock = threading.RLock()
        self._places: dict[str, Memory] = {}
        self._labelled = _Rows(_LABELS)
        self._looked = _Rows(_RECENT)
        self._since_fit = 0
        self._fitting = False
        self._risk: Risk | None = None
        self._risks = self._expected = np.empty(0)
        self._allowed = _FIRST
        self._threshold = 0.0

    @property
    def serves(self) -> bool:
        """Whether it may answer."""
        return self._proof is None

    def look(self, x: Tensor, place: str) -> Looked | None:
        """Look an input [1, ...] of that place up; None where it is not made of finite numbers."""
        sketched = sketch(x)
        if not np.isfinite(sketched).all():
            return None
        with self._lock:
            memory = self._places.get(place)
            seen = None if memory is None else memory.recall(sketched)
            confident = False
            if seen is not None:
                self._looked.add(seen.features)
                confident = self._risk is not None and float(self._risk(seen.features)) < self._threshold
        return Looked(place, sketched, seen, confident)

    def learn(self, looked: Looked, base: Prediction, *, drawn: bool, agreed: bool) -> None:
        """Take in the base model's answer to a request.

        `drawn`: it was to be audited before anything was known of it; only such requests count for promise
        and proof. `agreed`: what was answered is what the base model says.
        """
        changed: tuple[bool, int, int] | None = None
        with self._lock:
            if looked.seen is not None:
                self._labelled.add(looked.seen.features, looked.wrong(base))
                self._since_fit += 1
            self._memory(looked).add(looked.sketched, base)
            if drawn and self._risk is not None:
                changed = self._judge(looked, base, agreed)
            count = len(self._labelled)
            due = count >= _FEWEST and self._since_fit >= max(_FIT_EVERY, count * _FIT_SHARE)
            wanted = due and not self._fitting
            self._fitting |= wanted
        if wanted and not self._leave(self._fit):
            self._fitting = False
        if changed is not None:
            self._on_change(*changed)

    def _judge(self, looked: Looked, base: Prediction, agreed: bool) -> tuple[bool, int, int] | None:
        """Count an audit for the proof or the guard; who may answer, if that changes."""
        if self._proof is not None:
            if looked.confident:
                agreed = not looked.wrong(base)
            if not self._proof.audit(agreed=agreed):
                return None
            counted = True, self._proof.audits, self._proof.losses
            self._proof = None
            self._guard.reset()
            return counted
        self._steer(agreed)
        if not self._guard.audit(agreed=agreed):
            return None
        counted = False, self._guard.audits, self._guard.losses
        self._proof = Recertification(self._agreement, self._confidence)
        self._allowed = _FIRST
        self._find_threshold()
        return counted

    def _steer(self, agreed: bool) -> None:
        step = _TARGET * (1.0 - self._agreement) - (0.0 if agreed else 1.0)
        self._allowed = min(max(self._allowed * math.exp(_RATE * step), _LEAST), _MOST)
        self._find_threshold()

    def _find_threshold(self) -> None:
        """The highest risk such that what is answered goes wrong no more often than allowed, as expected."""
        allowed = self._allowed * (1.0 - self._agreement)
        answered = int(np.searchsorted(self._expected, allowed))
        self._threshold = min(float(self._risks[answered - 1]), _HIGHEST_RISK) if answered else 0.0

    def _fit(self) -> None:
        with self._lock:
            self._since_fit = 0
            features, wrong = self._labelled.all()
            recent, _ = self._looked.all()
        risk = Risk(features, wrong, FURTHER)
        risks = np.sort(risk(recent))
        with self._lock:
            self._risk, self._risks = risk, risks
            self._expected = np.cumsum(risks) / max(len(risks), 1)
            self._find_threshold()
            self._fitting = False

    def _memory(self, looked: Looked) -> Memory:
        if looked.place not in self._places:
            if len(self._places) >= _PLACES:
                del self._places[next(iter(self._places))]
            self._places[looked.place] = Memory(len(looked.sketched))
        return self._places[looked.place]


class _Rows:
    """The last `limit` features, with labels; the order is lost."""

    def __init__(self, limit: int) -> None:
        self._features = np.empty((limit, FEATURES))
        self._labels = np.zeros(limit, dtype=np.bool_)
        self._taken = 0

    def __len__(self) -> int:
        return min(self._taken, len(self._features))

    def add(self, features: NDArray[np.float64], label: bool = False) -> None:
        at = self._taken % len(self._features)
        self._features[at], self._labels[at] = features, label
        self._taken += 1

    def all(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        return self._features[: len(self)].copy(), self._labels[: len(self)].copy()
