"""Whole streams through every decision about early answers: no bad setting is released."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.promise_streams import run, summary
from gati.guard.proof import Spending

pytestmark = pytest.mark.slow


def test_no_more_streams_break_a_promise_than_delta_allows(tmp_path: Path) -> None:
    """With retraining, versions brought back, memory, stops, restarts; most caches must not pass.

    Half of the streams have room in the queue of audits, the others find it full half of the time.
    """
    room = [run(seed, tmp_path, 6_000, stretch=0) for seed in range(12)]
    full = [run(seed, tmp_path, 6_000, stretch=100) for seed in range(16, 28)]
    for each in (room, full, room + full):
        found = summary(each)
        assert found["broken_streams"] <= found["allowed"]
        assert found["early"] > 0.3
    assert found["alarms_timed"] >= 8 and found["delay_of_theory"] <= 2.0


def test_the_streams_would_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of delta for every proof, and memory's begun anew with every restart, as it was.

    Then at least these two of the first ten streams break one: more than two standard errors above delta.
    """
    monkeypatch.setattr(Spending, "next", lambda self: self.delta)
    monkeypatch.setattr("benchmarks.promise_streams._kept", lambda standing: None)
    assert all(run(seed, tmp_path, 17_280).broken for seed in (3, 7))
