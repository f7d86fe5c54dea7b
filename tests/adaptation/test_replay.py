"""How a replay is divided into periods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gati.adaptation import replay as replay_module
from gati.adaptation.replay import RecordedRequests, _report, _Row, record
from gati.adaptation.settings import AdaptSettings, Change
from gati.errors import VideoError
from gati.model.preprocess import Preprocessing
from gati.video import Frame
from tests.guard.named import TRUE

COUNT = 9


@pytest.mark.parametrize(
    ("kinds", "versions", "expected"),
    [
        # The library's caches answer instead of stopped ones, which counted as its own.
        (("alarm", "returned"), (5,) * 4 + (0,) * 5, [(5, 4), (0, 5)]),
        (("alarm", "returned"), (5,) * 9, [(5, 9)]),
        (("activated",), (0,) * 4 + (5,) * 5, [(0, 4), (5, 5)]),
        (("recalling",), (0,) * 9, [(0, 4), (0, 5)]),
    ],
)
def test_a_period_is_of_one_version(
    kinds: tuple[str, ...], versions: tuple[int, ...], expected: list[tuple[int, int]]
) -> None:
    time_s, frame = np.arange(COUNT, dtype=np.float64), np.arange(COUNT)
    recording = RecordedRequests("road", [torch.zeros(1)] * COUNT, time_s, frame, [])
    rows = [_Row(version, True, True, 1.0, 2.0, "block", 0) for version in versions]
    changes = tuple(Change(kind, 4.0, 4, versions[4]) for kind in kinds)  # type: ignore[arg-type]
    found = _report(recording, AdaptSettings(), rows, changes, 0, 0)
    assert [(each.version, each.requests) for each in found.periods] == expected
    assert (found.after is None) is (len(expected) == 1)


@pytest.mark.parametrize("fits", [True, False])
def test_a_recording_that_does_not_fit_into_memory_is_refused(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was killed, without a word."""

    class Recording:
        name = "road.mp4"

        def __iter__(self) -> Iterator[Frame]:
            return iter(Frame(np.zeros((8, 8, 3), np.uint8), at, 0.1 * at, "road") for at in range(COUNT))

    @contextmanager
    def opened(*_: Any, **options: Any) -> Iterator[Recording]:
        yield Recording()

    reference = SimpleNamespace(base=lambda x: [TRUE])
    monkeypatch.setattr(replay_module, "open_source", opened)
    monkeypatch.setattr(replay_module, "reference_of", lambda served: reference)
    monkeypatch.setattr(replay_module, "available_bytes", lambda: (20 if fits else 9) * 3 * 8 * 8 * 4)
    engine = SimpleNamespace(preprocessing=Preprocessing(), traced=SimpleNamespace(input_shape=(3, 8, 8)))
    served: Any = SimpleNamespace(engine=engine)
    if fits:
        assert len(record(served, "road.mp4")) == COUNT
    else:
        with pytest.raises(VideoError, match=r"more than the 6 inputs .* \(--every or --fps\)"):
            record(served, "road.mp4")
