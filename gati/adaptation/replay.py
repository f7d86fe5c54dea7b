"""Replays a recorded stream as fast as possible, and measures it against the base model.

    recording = record(served, "road.mp4", regions=[Region(0, 0, 128, 128)])
    report = replay(served, recording, AdaptSettings(interval_s=10))

The base model answers every input beforehand, so the agreement covers all requests. Two replays of a
recording with the same settings give the same answers, as long as memory suffices for retraining on all
samples; only the latencies differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gati.adaptation.adaptation import Adaptation
from gati.adaptation.pictures import PictureInputs, place_of
from gati.adaptation.references import reference_of
from gati.adaptation.settings import AdaptSettings, Change, OnChange
from gati.composition.load import Served
from gati.engine.exits import Prediction
from gati.errors import VideoError
from gati.exploration.memory import USABLE, available_bytes
from gati.guard.auditor import RECALL
from gati.video import Region, open_source

_WINDOW = 200  # frames over which the worst agreement is computed
_BASE_EVERY = 3  # the base model is timed on one in so many requests
_WARM_UP = 20  # requests before the first timed one


@dataclass(frozen=True)
class RecordedRequests:
    """n requests in order: inputs, stream times, frame numbers, and the base model's answers.

    `source` names the stream, without credentials.
    """

    source: str
    inputs: Sequence[Tensor]
    time_s: NDArray[np.float64]
    frame: NDArray[np.int64]
    base: Sequence[Prediction]
    place: Sequence[str | None] = ()  # the place each input shows; empty if unknown

    def __len__(self) -> int:
        return len(self.inputs)


def record(
    served: Served,
    source: str,
    *,
    regions: Sequence[Region] = (),
    every_s: float | None = None,
    fps: float | None = None,
    authority: Path | None = None,
) -> RecordedRequests:
    """Read a recording, and compute the reference's answers.

    `authority` is as in `open_source`.

    **Raises:** `VideoError` for a source that cannot be read, has no pictures, or more than fit into memory.
    """
    engine, available = served.engine, available_bytes()
    pictures = PictureInputs(engine.preprocessing, engine.traced.input_shape, regions)
    inputs: list[Tensor] = []
    times: list[float] = []
    numbers: list[int] = []
    places: list[str | None] = []
    with open_source(source, policy="wait", every_s=every_s, fps=fps, authority=authority) as opened:
        for given in opened:
            frame = pictures.fitted(given)
            for region, x in pictures.inputs(frame):
                if available is not None and (len(inputs) + 1) * x.nbytes > USABLE * available:
                    raise VideoError(
                        f"{opened.name} has more than the {len(inputs)} inputs that there is memory for; "
                        "take fewer of its pictures (--every or --fps), or a shorter recording"
                    )
                inputs.append(x)
                places.append(place_of(frame, region))
                times.append(frame.time_s)
                numbers.append(frame.index)
    if not inputs:
        raise VideoError(f"{opened.name} has no pictures; give another source")
    reference = reference_of(served)
    base = [reference.base(x)[0] for x in inputs]
    numbered = np.array(numbers, dtype=np.int64)
    return RecordedRequests(opened.name, inputs, np.array(times), numbered, base, places)


class Period(NamedTuple):
    """Results from one version to the next; latencies in ms, `gain` is base mean / mean.

    `recall_rate` is the share of requests that memory answered, which `hit_rate` includes. `worst_agreement`
    is the lowest of any 200 frames within it.
    """

    version: int
    from_s: float
    requests: int
    hit_rate: float
    recall_rate: float
    agreement: float
    worst_agreement: float
    latency_ms: float
    base_latency_ms: float
    gain: float


@dataclass(frozen=True)
class Replayed:
    """The results of a replay; a new period starts when another version, or memory, starts to answer.

    `after` covers the requests after the first such change.
    """

    source: str
    settings: AdaptSettings
    total: Period
    after: Period | None
    periods: tuple[Period, ...]
    changes: tuple[Change, ...]
    audits: int
    losses: int
    exits: tuple[str, ...] = field(repr=False)
    classes: tuple[int, ...] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """All results except the individual answers, as JSON values."""
        return {
            "source": self.source,
            "settings": asdict(self.settings),
            "total": self.total._asdict(),
            "after_first_change": None if self.after is None else self.after._asdict(),
            "periods": [period._asdict() for period in self.periods],
            "changes": [asdict(change) for change in self.changes],
            "audits": self.audits,
            "losses": self.losses,
        }


def replay(
    served: Served,
    recording: RecordedRequests,
    settings: AdaptSettings | None = None,
    *,
    on_change: OnChange | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Replayed:
    """Answer a recording and adapt by the settings; the base model is timed on every third request.

    Latencies exclude retraining and audits.
    """
    changes: list[Change] = []

    def changed(change: Change) -> None:
        changes.append(change)
        if on_change is not None:
            on_change(change)

    chosen = settings or AdaptSettings()
    with Adaptation(served, chosen, on_change=changed, deterministic=True, clock=clock) as adaptation:
        with served.engine:
            for x in recording.inputs[:_WARM_UP]:
                served.engine(x)
                adaptation.base_ms(x)
        rows = [_row(adaptation, recording, number) for number in range(len(recording))]
        status = adaptation.status
    return _report(recording, chosen, rows, tuple(changes), status.audits, status.losses)


class _Row(NamedTuple):
    version: int
    hit: bool
    agreed: bool
    latency_ms: float
    base_ms: float  # NaN where not timed
    exit: str
    class_index: int


def _row(adaptation: Adaptation, recording: RecordedRequests, number: int) -> _Row:
    x, base = recording.inputs[number], recording.base[number]
    base_ms = adaptation.base_ms(x) if number % _BASE_EVERY == 0 else float("nan")
    answered = adaptation.answer(
        x,
        time_s=float(recording.time_s[number]),
        source=recording.source,
        place=recording.place[number] if recording.place else None,
        base=base,
    )
    given = answered.prediction
    return _Row(
        answered.version,
        answered.hit,
        given.class_index == base.class_index,
        answered.latency_ms,
        base_ms,
        given.exit,
        given.class_index,
    )


def _report(
    recording: RecordedRequests,
    settings: AdaptSettings,
    rows: Sequence[_Row],
    changes: tuple[Change, ...],
    audits: int,
    losses: int,
) -> Replayed:
    """Build the report; the base model's latency is its mean over the whole replay."""
    count = len(rows)
    bounds = [0, *_begins(rows, changes), count]
    spans = [(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False) if end > begin]
    after = next((_period(rows, recording, begin, count) for begin, _ in spans[1:2]), None)
    return Replayed(
        recording.source,
        settings,
        _period(rows, recording, 0, count),
        after,
        tuple(_period(rows, recording, begin, end) for begin, end in spans),
        changes,
        audits,
        losses,
        tuple(row.exit for row in rows),
        tuple(row.class_index for row in rows),
    )


def _begins(rows: Sequence[_Row], changes: Sequence[Change]) -> list[int]:
    """Where another version or memory starts to answer: a version may also take over after an alarm."""
    recalls = {change.request for change in changes if change.kind == "recalling"}
    return sorted(
        recalls | {at for at, (one, two) in enumerate(pairwise(rows), 1) if one.version != two.version}
    )


def _period(rows: Sequence[_Row], recording: RecordedRequests, begin: int, end: int) -> Period:
    part = rows[begin:end]
    agreed = np.array([row.agreed for row in part])
    latency_ms = float(np.mean([row.latency_ms for row in part]))
    timed = [row.base_ms for row in part if row.base_ms == row.base_ms]
    base_ms = float(np.mean(timed or [row.base_ms for row in rows if row.base_ms == row.base_ms]))
    return Period(
        part[-1].version,
        float(recording.time_s[begin]),
        len(part),
        float(np.mean([row.hit for row in part])),
        float(np.mean([row.exit == RECALL for row in part])),
        float(agreed.mean()),
        worst_window(agreed, recording.frame[begin:end]),
        latency_ms,
        base_ms,
        base_ms / latency_ms if latency_ms > 0.0 else float("nan"),
    )


def worst_window(agreed: NDArray[np.bool_], frame: NDArray[np.int64]) -> float:
    """The lowest agreement of any 200 consecutive frames, or of all frames if there are fewer."""
    numbers, first = np.unique(frame, return_index=True)
    bounds = np.append(first, len(frame))
    right = np.concatenate(([0], np.cumsum(agreed)))
    if len(numbers) <= _WINDOW:
        return float(agreed.mean())
    lows = bounds[: len(numbers) - _WINDOW + 1]
    highs = bounds[_WINDOW:]
    return float(((right[highs] - right[lows]) / (highs - lows)).min())


def sweep(
    settings: AdaptSettings,
    *,
    sampling: Sequence[float] = (),
    interval_s: Sequence[float] = (),
    window_s: Sequence[float] = (),
) -> list[AdaptSettings]:
    """The settings with each combination of the values to try; an empty list keeps the default."""
    return [
        replace(settings, sampling=share, interval_s=interval, window_s=window)
        for share in sampling or (settings.sampling,)
        for interval in interval_s or (settings.interval_s,)
        for window in window_s or (settings.window_s,)
    ]
