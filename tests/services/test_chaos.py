"""Fault injection under load: every request is answered or refused, and nothing leaks."""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from benchmarks.chaos import verdicts
from tests.services import chaos
from tests.services.chaos import KINDS, Chaos
from tests.services.faults import Census

WELL = Census(threads=4, files=30, children=2, resident_bytes=2**26)


def reply(status: int, document: object) -> httpx.Response:
    return httpx.Response(status, json=document)


def answer(probabilities: list[float]) -> httpx.Response:
    outputs = [{"name": "probabilities", "data": probabilities}, {"name": "exit", "data": ["base"]}]
    return reply(200, {"outputs": outputs})


def test_the_report_sees_what_must_not_be(tmp_path: Path) -> None:
    judge = Chaos(tmp_path)
    report = judge.report
    report.before = report.after = WELL
    report.status = 0
    right = [each.tolist() for each in judge.answers[3]]
    for probabilities in right:
        judge.take_in(3, answer(probabilities), 0.1)
    for status in (429, 503, 504):
        judge.take_in(3, reply(status, {"error": "because"}), 0.1)
    assert all(verdicts(report).values())
    now_s = time.monotonic()
    with judge.deaf():
        assert judge.kept_waiting(now_s, math.inf) == math.inf
        assert judge.kept_waiting(now_s - 9.0, now_s) == 0.0
    assert 0.0 < judge.kept_waiting(now_s, math.inf) < math.inf
    judge.take_in(4, answer(right[0]), 0.1)
    assert not verdicts(report)["no wrong answer"]
    judge.take_in(3, reply(503, {}), 0.1)
    judge.take_in(3, reply(500, {"error": "internal"}), 100.0)
    assert len(report.unexplained) == 2 and not verdicts(report)["no later than its deadline"]
    report.after = Census(threads=40, files=90, children=2, resident_bytes=2**26)
    report.resident_bytes = [2**26] * 8 + [2**27] * 8
    found = verdicts(report)
    assert not (found["no thread or file left"] or found["memory flat"])
    judge.read_log(['{"level": "error", "message": "failed", "exception": "Traceback (most recent"}'])
    assert not verdicts(report)["no mistake in the log"] and report.logged == {"error: failed": 1}


@pytest.mark.slow
def test_faults_under_load_are_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "MOMENT_S", 0.3)
    report = Chaos(tmp_path, rate=20.0).run(seconds=0.0, every_s=0.0)
    said = report.to_json()
    assert not (report.unexplained or report.wrong or report.left or report.mistakes), said
    assert report.status == 0 and report.statuses[200] > 0, said
    assert report.faults == Counter(KINDS.keys()), said
