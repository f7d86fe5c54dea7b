"""Results for the tests of sinks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gati.video import Frame, Result
from tests.video.films import picture

ANSWER = Result(
    time_s=1.5,
    frame_index=15,
    source="rtsp://***@10.0.0.7/live",
    region=None,
    class_index=3,
    class_name="cat",
    probability=0.875,
    exit="layer2",
    latency_ms=2.25,
    base_latency_ms=4.5,
    version="v1",
)


def answer(number: int, **changes: Any) -> Result:
    """The answer for picture `number` of ten a second."""
    return replace(ANSWER, frame_index=number, time_s=number / 10, **changes)


def frame(number: int, width: int = 64, height: int = 48) -> Frame:
    """The picture that it is about."""
    return Frame(picture(number, width, height), number, number / 10, ANSWER.source)
