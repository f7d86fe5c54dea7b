"""How a replay is divided into periods."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gati.adaptation.replay import RecordedRequests, _report, _Row
from gati.adaptation.settings import AdaptSettings, Change

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
