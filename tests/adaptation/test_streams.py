"""Whole streams through every decision about early answers: no bad setting is released."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.promise_streams import CONFIDENCE, run, summary
from gati.guard.proof import Spending

pytestmark = pytest.mark.slow


def test_no_more_streams_break_a_promise_than_delta_allows(tmp_path: Path) -> None:
    """With retraining, versions brought back, memory, stops, restarts; most caches must not pass.

    Half of the streams have room in the queue of audits, the others find it full half of the time.
    """
    room = [run(seed, tmp_path, 6_000, stretch=0) for seed in range(10)]
    full = [run(seed, tmp_path, 6_000, stretch=100) for seed in range(10, 20)]
    for each in (room, full, room + full):
        found = summary(each)
        assert found["broken_streams"] <= found["allowed"]
        assert found["early"] > 0.3
    assert found["alarms_timed"] > 4 and found["delay_of_theory"] <= 2.0


def test_the_streams_would_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of delta for every proof, as it was.

    Then far more than delta of ten streams break one.
    """
    monkeypatch.setattr(Spending, "next", lambda self: self.delta)
    delta, streams, broken = 1.0 - CONFIDENCE, 10, 0
    first = [3, 7]  # they break one: then the other eight need not be looked at
    allowed = delta * streams + 2.0 * math.sqrt(delta * (1.0 - delta) * streams)
    for seed in first + [each for each in range(streams) if each not in first]:
        broken += run(seed, tmp_path, 17_280, until_broken=True).broken > 0
        if broken > allowed:
            return
    pytest.fail(f"{broken} of {streams} streams break a promise, {allowed:.2f} may")
