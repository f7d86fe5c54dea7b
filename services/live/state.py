"""The state of a live page: the last answers, audits, events, and the source."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from gati.guard.confidence import watched_agreement
from gati.types import BASE, RECALL
from gati.video import Frame, Result
from gati.video.frames import redact
from services.live.pictures import NewestPicture

EventKind = Literal[
    "version", "alarm", "recovered", "retraining", "source", "trial", "setting", "memory", "resting", "kept",
    "failed",
]  # fmt: skip
SourceWord = Literal["running", "paused", "reconnecting", "ended", "error"]

_END_RETRAINING: tuple[EventKind, ...] = ("version", "recovered", "trial", "kept", "failed")
_POINTS = 600
_RECENT = 200  # answers in rates and means
_EVENTS = 100
AUDITS = 60
_REGIONS = 32
_EXITS = 64
_PICTURES_PER_S = 10.0  # encoded at most
_LONGEST = 300  # of a text, in characters


class _Point(NamedTuple):
    sequence: int
    at_s: float  # since the epoch
    time_s: float
    latency_ms: float | None
    base_latency_ms: float | None
    exit: str


class _Event(NamedTuple):
    sequence: int
    at_s: float
    time_s: float
    kind: EventKind
    text: str


class LiveState:
    """The contents of a live page. Thread-safe; no method waits for a viewer.

    It keeps the last 600 answers, 100 events, 60 audits, and one picture; of the first 32 regions, the last
    answer. Viewers request what happened `since` the last sequence number they have, so they need no queues.

    `promise` is the agreement promised for the active version. Servers, which show no pictures, set
    `pictures` to False.
    """

    def __init__(
        self,
        title: str = "",
        *,
        promise: float | None = None,
        pictures: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.key = secrets.token_hex(6)  # differs in each run
        self._title = _text(title)
        self._promise = _share(promise)
        self._shows_pictures = pictures
        self._pictures = NewestPicture(_PICTURES_PER_S)
        self._clock = clock
        self._lock = threading.Lock()
        self._sequence = 0
        self._points: deque[_Point] = deque(maxlen=_POINTS)
        self._events: deque[_Event] = deque(maxlen=_EVENTS)
        self._answers: dict[tuple[str, str], dict[str, Any]] = {}
        self._has_more_regions = False  # than are shown
        self._order: list[str] = [BASE]
        self._totals: Counter[str] = Counter()
        self._outcomes: deque[bool] = deque(maxlen=AUDITS)
        self._audits: dict[str, Any] | None = None
        self._proof: dict[str, Any] | None = None
        self._source_name = ("", "")  # as reported, as shown
        self._source: dict[str, Any] = {"state": "waiting", "reason": "", "since_s": clock()}
        self._version = ""
        self._version_since_s: float | None = None  # None: since the first answer
        self._alarm: dict[str, Any] | None = None
        self._retraining = False
        self._resting = False

    @property
    def sequence(self) -> int:
        """The sequence number; each event increases it."""
        return self._sequence

    def publish(self, result: Mapping[str, Any]) -> None:
        """Add an answer: the fields of `gati.video.Result`; all but `exit` are optional.

        `region` is [x, y, width, height], in pixels; None is the whole picture.
        """
        now_s = self._clock()
        name = result.get("class_name")
        answer: dict[str, Any] = {
            "source": self._shown_source(result.get("source")),
            "region": result.get("region"),
            "class_name": _text(result.get("class_index", "") if name is None else name),
            "probability": _share(result.get("probability")),
            "exit": _text(result["exit"]),
            "latency_ms": _finite(result.get("latency_ms")),
            "version": _text(result.get("version", "")),
        }
        with self._lock:
            leaves = answer["exit"] = self._known_exit(answer["exit"])
            previous_s = self._points[-1].time_s if self._points else 0.0
            time_s = _finite(result.get("time_s"))
            self._sequence += 1
            self._points.append(
                _Point(
                    self._sequence,
                    now_s,
                    previous_s if time_s is None else time_s,
                    answer["latency_ms"],
                    _finite(result.get("base_latency_ms")),
                    leaves,
                )
            )
            self._totals[leaves] += 1
            version = answer["version"] or self._version
            if self._version and version != self._version:
                self._version_since_s = now_s
            self._version = version
            place = (answer["source"], str(answer["region"]))
            if place in self._answers or len(self._answers) < _REGIONS:
                self._answers[place] = answer
            else:  # which ones are shown does not change from picture to picture
                self._has_more_regions = True
            if self._source["state"] == "waiting":
                self._source = {"state": "running", "reason": "", "since_s": now_s}

    def frame(self, image: NDArray[np.uint8]) -> None:
        """Add a picture: uint8 [H, W, 3] in RGB that is not modified afterwards."""
        with self._lock:
            self._pictures.put(image)
            self._sequence += 1

    def audit(self, agreed: bool, n: int, losses: int) -> None:
        """Add an audit of an answer, with the version's counts of audits and disagreements.

        The agreement is shown as a confidence sequence, which is valid after every audit.
        """
        self.audits([agreed], n, losses)

    def audits(self, agreed: Sequence[bool], n: int, losses: int) -> None:
        """Add several audits, or none: then only the counts are set."""
        lower, upper = watched_agreement(losses, n)
        with self._lock:
            self._outcomes.extend(agreed)
            self._audits = {"n": n, "losses": losses, "lower": _share(lower), "upper": _share(upper)}
            self._sequence += 1

    def no_audits(self) -> None:
        """Reset the counts: another version is active, and earlier audits do not apply to it."""
        with self._lock:
            self._outcomes.clear()
            self._audits = None
            self._sequence += 1

    def proof(
        self,
        version: str | None,
        audits: int = 0,
        losses: int = 0,
        needed: int | None = None,
        *,
        waits: bool = False,
    ) -> None:
        """Set the progress of the proof of `version`, whose caches do not answer yet; None if there is none.

        `waits` means that the caches of another version answer until this one is proven; otherwise the base
        model answers.
        """
        told: dict[str, Any] | None = None
        if version is not None:
            told = {"version": _text(version), "audits": audits, "losses": losses}
            told |= {"needed": needed, "waits": waits}
        with self._lock:
            if told != self._proof:
                self._proof = told
                self._sequence += 1

    def event(
        self, kind: EventKind, text: str, time_s: float | None = None, *, ends_alarm: bool = False
    ) -> None:
        """Add an event at a stream time (default: that of the last answer).

        `alarm` means that the caches stopped; it lasts until `recovered`, or another event with `ends_alarm`.
        `retraining` lasts until `version`, `recovered`, `trial`, `kept` or `failed`. Raises ValueError for an
        unknown kind.
        """
        if kind not in get_args(EventKind):
            raise ValueError(f"unknown event {kind!r}; use one of {', '.join(get_args(EventKind))}")
        with self._lock:
            self._add_event(kind, text, time_s)
            if kind == "alarm":
                self._alarm = {"text": _text(text), "since_s": self._clock()}
            elif kind == "recovered" or ends_alarm:
                self._alarm = None
            if kind in _END_RETRAINING:
                self._retraining = False
            self._retraining |= kind == "retraining"

    def source(self, state: SourceWord, reason: str = "") -> None:
        """Set the state of the source. A change adds an event. Raises ValueError for an unknown state."""
        if state not in get_args(SourceWord):
            raise ValueError(f"unknown source state {state!r}; use one of {', '.join(get_args(SourceWord))}")
        with self._lock:
            before = self._source
            changed = before["state"] != state
            since_s = self._clock() if changed else before["since_s"]
            self._source = {"state": state, "reason": _text(reason), "since_s": since_s}
            self._sequence += 1
            if changed and before["state"] != "waiting":
                self._add_event("source", f"{state}: {reason}" if reason else state, None)

    def exits(self, names: Sequence[str]) -> None:
        """Set the exits in the order of the network; the base model is added as the last one.

        Exits of earlier versions at which answers left stay: these answers still count.
        """
        with self._lock:
            before = self._order
            self._order = [_text(name) for name in names if name != BASE][: _EXITS - 1] + [BASE]
            for name in before:
                if self._totals[name]:
                    self._known_exit(name)
            self._sequence += 1

    def promise(self, agreement: float | None) -> None:
        """Set the agreement promised from now on, or None."""
        with self._lock:
            self._promise = _share(agreement)
            self._sequence += 1

    def rests(self, resting: bool) -> None:
        """Set whether lookups pause, so that the caches do not answer although they may."""
        with self._lock:
            if resting != self._resting:
                self._resting = resting
                self._sequence += 1

    def since(self, sequence: int = 0) -> dict[str, Any]:
        """Return the contents as JSON values, with answers and events after `sequence` only."""
        with self._lock:
            points = tuple(self._points)
            document: dict[str, Any] = {
                "key": self.key,
                "sequence": self._sequence,
                "title": self._title,
                "promise": self._promise,
                "version": self._version,
                "version_since_s": self._version_since_s,
                "source": {"name": self._source_name[1], **self._source},
                "alarm": self._alarm,
                "retraining": self._retraining,
                "resting": self._resting,
                "answers": list(self._answers.values()),
                "has_more_regions": self._has_more_regions,
                "exits": [(name, self._totals[name]) for name in self._order],
                "events": [tuple(event) for event in self._events if event.sequence > sequence],
                "audits": self._audits and {**self._audits, "outcomes": list(self._outcomes)},
                "proof": self._proof,
                "picture": {"number": self._pictures.number, "size": self._pictures.size},
                "pictures": self._shows_pictures,
            }
        document["now_s"] = self._clock()
        document["points"] = [tuple(point) for point in points if point.sequence > sequence]
        document["recent"] = _summary(points[-_RECENT:])
        return document

    def jpeg(self) -> bytes | None:
        """Return the latest picture, encoded in the caller's thread at the first request."""
        return self._pictures.jpeg()

    # ----------------------------------------------------------------------------------------------------

    def _add_event(self, kind: EventKind, text: str, time_s: float | None) -> None:
        if time_s is None:
            time_s = self._points[-1].time_s if self._points else 0.0
        self._sequence += 1
        self._events.append(_Event(self._sequence, self._clock(), _finite(time_s) or 0.0, kind, _text(text)))

    def _known_exit(self, name: str) -> str:
        if name not in self._order:
            if len(self._order) >= _EXITS:
                return BASE
            self._order.insert(0 if name == RECALL else -1, name)
        return name

    def _shown_source(self, name: object) -> str:
        told = "" if name is None else str(name)
        if told != self._source_name[0]:
            self._source_name = (told, _text(redact(told)))
        return self._source_name[1]


def _summary(points: Sequence[_Point]) -> dict[str, Any]:
    """Return counts and means of recent answers."""
    latencies = sorted(point.latency_ms for point in points if point.latency_ms is not None)
    pairs = [
        (point.latency_ms, point.base_latency_ms)
        for point in points
        if point.latency_ms is not None and point.base_latency_ms is not None
    ]
    own_ms, base_ms = sum(own for own, _ in pairs), sum(base for _, base in pairs)
    counts = Counter(point.exit for point in points)
    elapsed_s = points[-1].at_s - points[0].at_s if points else 0.0
    return {
        "n": len(points),
        "exits": counts,
        "hit_rate": 1.0 - counts[BASE] / len(points) if points else None,
        "latency_ms": sum(latencies) / len(latencies) if latencies else None,
        "p99_ms": latencies[math.ceil(0.99 * len(latencies)) - 1] if latencies else None,
        "base_latency_ms": base_ms / len(pairs) if pairs else None,
        "gain": base_ms / own_ms if own_ms > 0.0 else None,
        "per_s": (len(points) - 1) / elapsed_s if elapsed_s > 0.0 else None,
        "last_at_s": points[-1].at_s if points else None,
    }


def _text(value: object) -> str:
    """Return a text of limited length that can be encoded as UTF-8."""
    text = str(value)[:_LONGEST]
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _finite(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _share(value: Any) -> float | None:
    number = _finite(value)
    return None if number is None else min(1.0, max(0.0, number))


class LiveSink:
    """A sink that shows results and their pictures on a live page."""

    def __init__(self, state: LiveState) -> None:
        self._state = state
        self._shown: tuple[str, int] | None = None

    def write(self, result: Result, frame: Frame) -> None:
        """Show a result, and its picture once for all its regions."""
        region = None if result.region is None else astuple(result.region)
        self._state.publish({**vars(result), "region": region})
        if self._shown != (frame.source, frame.index):
            self._shown = (frame.source, frame.index)
            self._state.frame(frame.image)

    def close(self) -> None:
        """Do nothing: the page stays available to its viewers."""
