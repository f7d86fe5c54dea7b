"""A stream of pictures, answered one by one and passed to sinks."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gati.adaptation.adaptation import Adaptation
from gati.adaptation.pictures import PictureInputs, place_of
from gati.adaptation.settings import Status
from gati.video import Frame, Region, Result, Sink, Source, SourceState

_BASE_LOOKS = 10  # runs of the base model to time it at the start
_BASE_EVERY = 50  # the base model is timed once in so many requests, at the same load


@dataclass
class Tally:
    """The totals of a stream so far; latencies in milliseconds."""

    pictures: int = 0
    requests: int = 0
    hits: int = 0
    latency_ms_sum: float = 0.0
    base_latency_ms_sum: float = 0.0
    base_latency_ms: float | None = None  # the latest measurement
    _base_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_BASE_LOOKS), repr=False)

    @property
    def latency_ms(self) -> float:
        """The mean latency; 0 before the first request."""
        return self.latency_ms_sum / max(self.requests, 1)

    @property
    def mean_base_latency_ms(self) -> float | None:
        """The base model's mean latency on the same requests, by regular timings; None before the first."""
        return self.base_latency_ms_sum / self.requests if self.requests else None

    @property
    def gain(self) -> float | None:
        """The speed-up over the base model, which is timed at intervals among the requests."""
        return self.base_latency_ms_sum / self.latency_ms_sum if self.latency_ms_sum > 0.0 else None

    def timed(self, base_ms: float) -> None:
        """Record a timing of the base model."""
        self._base_ms.append(base_ms)
        self.base_latency_ms = statistics.median(self._base_ms)

    def answered(self, latency_ms: float, *, hit: bool) -> None:
        """Count an answer."""
        self.requests += 1
        self.hits += hit
        self.latency_ms_sum += latency_ms
        self.base_latency_ms_sum += self.base_latency_ms or 0.0


@dataclass(frozen=True)
class Streamed:
    """One picture with its results, the counts after it, and the status of model and source."""

    frame: Frame
    results: Sequence[Result]
    tally: Tally
    status: Status
    source: SourceState = field(default=SourceState.RUNNING)


def classify(
    adaptation: Adaptation,
    source: Source,
    *,
    regions: Sequence[Region] = (),
    sinks: Sequence[Sink] = (),
    began_s: float = 0.0,
    tally: Tally | None = None,
) -> Iterator[Streamed]:
    """Answer each picture of an opened source and write the results to the sinks.

    `began_s` is added to the stream time passed to the adaptation: use seconds since 1970 if a store keeps
    the samples. A given `tally` is continued. Regions are in pixels of the first picture:
    later ones of another size are resized to it.

    **Raises:** `VideoError` for a source that fails or a region outside the picture, `StorageError`.
    """
    engine = adaptation.served.engine
    pictures = PictureInputs(engine.preprocessing, engine.traced.input_shape, regions)
    tally = tally or Tally()
    for given in source:
        frame = pictures.fitted(given)
        results = [
            _answered(adaptation, frame, region, x, began_s, tally) for region, x in pictures.inputs(frame)
        ]
        tally.pictures += 1
        for result in results:
            for sink in sinks:
                sink.write(result, frame)
        yield Streamed(frame, results, tally, adaptation.status, source.state)


def _answered(
    adaptation: Adaptation, frame: Frame, region: Region | None, x: Tensor, began_s: float, tally: Tally
) -> Result:
    looks = _BASE_LOOKS if tally.base_latency_ms is None else tally.requests % _BASE_EVERY == 0
    for _ in range(looks):
        tally.timed(adaptation.base_ms(x))
    place = place_of(frame, region)
    answered = adaptation.answer(x, time_s=began_s + frame.time_s, source=frame.source, place=place)
    tally.answered(answered.latency_ms, hit=answered.hit)
    given = answered.prediction
    return Result(
        frame.time_s,
        frame.index,
        frame.source,
        region,
        given.class_index,
        given.class_name,
        float(given.probabilities[given.class_index]),
        given.exit,
        answered.latency_ms,
        tally.base_latency_ms,
        str(answered.version),
        answered.audited,
        answered.agreed if answered.audited else None,
    )
