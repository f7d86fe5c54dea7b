"""The samples that an adaptation keeps in memory, and the training window made of them."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gati.adaptation.settings import AdaptSettings
from gati.adaptation.window import Window
from gati.composition.load import Served
from gati.engine.exits import BASE, Prediction
from gati.samples.record import LONGEST_TEXT, Record

_HALF_LIVES = 4.0  # half-lives of sample weights in a window
_FAR = 100.0  # times the usual largest number of an input: one that goes beyond spoils training


@dataclass(frozen=True, eq=False)
class Sample:
    """A preprocessed input [...] of `place`, if known, with the base model's class and probabilities [K]."""

    input: Tensor
    base_class: int
    probabilities: Tensor
    time_s: float
    request: int
    source: str = ""
    number: int | None = None  # counts all samples ever taken; given by `Samples.add` if None
    place: str | None = None

    def is_like(self, other: Sample) -> bool:
        """Whether its input and the base model's answer are exactly those of the other."""
        return torch.equal(self.probabilities, other.probabilities) and torch.equal(self.input, other.input)


class Samples:
    """At most `limit` samples of the last `max_age_s` seconds; counts those that showed something new.

    Thread-safe.
    """

    def __init__(self, limit: int, max_age_s: float) -> None:
        self._kept: deque[Sample] = deque(maxlen=limit)
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._next = 1
        self.taken = 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)

    def add(self, sample: Sample) -> bool:
        """Add a sample, and drop those that are too old by its time; returns whether it shows something new.

        Otherwise, it takes place and number of the one before of its place: a camera that is frozen would
        fill the window with one picture, some of it held out from training and some not.
        """
        with self._lock:
            before = self._before(sample.place)
            new = before is None or not sample.is_like(before)
            number = self._next if sample.number is None else sample.number
            if before is not None and not new:
                self._kept.remove(before)
                number = before.number or number
            self._kept.append(replace(sample, number=number))
            self.taken += new
            self._next = max(self._next, number + 1)
            while self._kept and self._kept[0].time_s < sample.time_s - self._max_age_s:
                self._kept.popleft()
        return new

    def _before(self, place: str | None) -> Sample | None:
        """The newest sample of a place that is known."""
        of_it = (each for each in reversed(self._kept) if each.place == place)
        return None if place is None else next(of_it, None)

    def recent(self, count: int) -> list[Sample]:
        """The newest `count` samples, in the order of requests."""
        with self._lock:
            kept = list(self._kept)
        return _in_order(kept)[-count:]

    def count(self, after_request: int) -> int:
        """The number of samples of later requests."""
        with self._lock:
            return sum(sample.request > after_request for sample in self._kept)

    def window(self, after_request: int | None = None) -> Window:
        """The samples, all or of later requests, in order; older ones have lower training weights."""
        with self._lock:
            kept = [each for each in self._kept if after_request is None or each.request > after_request]
        return window_of(_in_order(kept))


def _in_order(samples: Iterable[Sample]) -> list[Sample]:
    """Sort by request: samples answered in the background arrive later than those of misses."""
    return sorted(samples, key=lambda sample: sample.request)


def window_of(samples: list[Sample]) -> Window:
    """The samples as a window, without freaks; their weight halves with each quarter of the time span."""
    samples = _without_freaks(samples)
    times = np.array([sample.time_s for sample in samples])
    times = np.minimum(times, times[-1])  # those of a run before the clock was set back are later
    span = max(float(times[-1] - times.min()), 1e-9)
    return Window(
        torch.stack([sample.input for sample in samples]),
        np.array([sample.base_class for sample in samples], dtype=np.int64),
        torch.stack([sample.probabilities for sample in samples]),
        0.5 ** ((times[-1] - times) / span * _HALF_LIVES),
        number=np.array([sample.number for sample in samples], dtype=np.int64),
    )


def _without_freaks(samples: list[Sample]) -> list[Sample]:
    """Leave out inputs far beyond all others, and those with an answer that is not finite.

    A client may send such numbers. One of them among hundreds of samples, and nothing is learned from any.
    """
    largest = torch.stack([sample.input.abs().amax().double() for sample in samples])
    limit = _FAR * float(largest.median()) or math.inf
    kept = [
        sample
        for sample, most in zip(samples, largest.tolist(), strict=True)
        if (most <= limit or not sample.input.is_floating_point())
        and bool(torch.isfinite(sample.probabilities).all())
    ]
    return kept or samples


def recorded(sample: Sample, answered: Prediction, model: str) -> Record:
    """The sample as a record for the store; `answered` is the answer of `model`."""
    early = answered.exit != BASE
    source = sample.source.encode(errors="replace").decode()[:LONGEST_TEXT]  # that of a file is its path
    return Record(
        sample.input.numpy(),
        "input",
        sample.base_class,
        sample.time_s,
        model,
        source,
        exit=answered.exit if early else None,
        agreed=answered.class_index == sample.base_class if early else None,
        probabilities=sample.probabilities.numpy(),
    )


def restored(history: Sequence[Record], served: Served, settings: AdaptSettings) -> Samples:
    """The samples of an earlier run that fit the inputs of this network.

    They keep the numbers of their records, and new ones are counted on from there: what was held out from
    training stays held out (`split_window`).
    """
    samples = Samples(settings.window_inputs or len(history) or 1, settings.window_s)
    traced = served.engine.traced
    for request, record in enumerate(history, -len(history)):
        known = record.probabilities
        if known is None or known.shape != (traced.classes,) or record.input.shape != traced.input_shape:
            continue
        samples.add(
            Sample(
                torch.from_numpy(record.input.copy()).to(traced.dtype),
                record.base_class,
                torch.from_numpy(known.copy()).float(),
                record.time_s,
                request,
                record.source,
                record.number,
            )
        )
    return samples
