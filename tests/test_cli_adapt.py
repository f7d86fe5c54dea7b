"""`gati adapt status`: what is shown of a running server."""

from __future__ import annotations

import pytest

from gati.cli import run
from gati.cli.adapt import lines
from gati.cli.asking import AskedServer

VERSION = {
    "version": "7", "active": False, "pending": True, "state": "probation", "resting": False, "level": 1,
    "settings": 3,
    "proof": {"audits": 212, "losses": 1, "needed": 300, "how_far": "0.99: 212 of about 300 audits"},
}  # fmt: skip
ACTIVE = {**VERSION, "version": "default", "active": True, "pending": False, "state": "serving",
          "resting": True, "settings": 1, "proof": None}  # fmt: skip
MEMORY = {"agreement": 0.99, "level": 0, "settings": 3, "places": 2, "answers": 0, "proof": VERSION["proof"]}
RETRAINING = {
    "version": 7, "samples": 640, "under_way": False, "outcome": "activated", "message": "better",
    "changed_s": 1000.0, "hit_rate": 0.5, "promised_hit_rate": 0.6, "next_s": 420.0, "used_s": 3.25,
    "share": 0.5, "began_s": 990.0,
}  # fmt: skip


def test_it_says_how_far_proofs_are_and_when_the_next_retraining_is() -> None:
    model = {"name": "door", "ready": True, "versions": [ACTIVE, VERSION], "memory": MEMORY,
             "retraining": RETRAINING}  # fmt: skip
    away = {"name": "gate", "ready": False, "error": "it is loading", "versions": [], "memory": None,
            "retraining": None}  # fmt: skip
    busy = {"name": "yard", "ready": True, "versions": [], "memory": None,
            "retraining": {**RETRAINING, "under_way": True, "began_s": 1085.0, "next_s": None}}  # fmt: skip
    assert list(lines({"models": [model, away, busy], "error": None}, 1090.0)) == [
        "door",
        "  version default: serving, active, lookups paused",
        "  version 7: probation, waiting to take over, setting 1 of 3, "
        "proof 0.99: 212 of about 300 audits, 1 of them disagree",
        "  memory: does not answer yet, 0 answers, 2 places, "
        "proof 0.99: 212 of about 300 audits, 1 of them disagree",
        "  retraining: last activated 90 s ago (better), next in 7 min, 640 samples, share 50 %, 3.2 s used",
        "gate: it is loading",
        "yard",
        "  retraining: under way for 5 s, last activated 90 s ago (better), 640 samples, share 50 %, "
        "3.2 s used",
    ]


def test_where_no_server_answers_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["adapt", "status", "--url", "http://127.0.0.1:9"]) != 0
    assert "start one with gati serve" in capsys.readouterr().err


def test_a_query_waits_longer_than_its_slo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gave up after a minute, and said that no server was there."""
    httpx = pytest.importorskip("httpx")
    waited: list[float] = []

    def request(method: str, url: str, *, timeout: float, **_: object) -> object:
        waited.append(timeout)
        raise httpx.ReadTimeout("timed out")

    monkeypatch.setattr(httpx, "request", request)
    for options in ([], ["--slo", "90s"], ["--slo", "99999999999s"]):
        assert run(["query", "p", "--text", "a", *options]) != 0
        assert f"has not replied for {waited[-1]:g} s" in capsys.readouterr().err
    assert waited == [60.0, 240.0, 3660.0]


def test_an_address_may_end_in_a_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    httpx = pytest.importorskip("httpx")
    asked: list[str] = []

    def request(method: str, url: str, **_: object) -> object:
        asked.append(url)
        return httpx.Response(200, json={})

    monkeypatch.setattr(httpx, "request", request)
    for url in ("http://127.0.0.1:8000", "http://127.0.0.1:8000/"):
        AskedServer(url, None).ask("GET", "/v1/adaptation")
    assert asked == ["http://127.0.0.1:8000/v1/adaptation"] * 2
