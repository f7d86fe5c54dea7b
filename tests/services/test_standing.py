"""What is said of a version, and where it is kept."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gati.composition.certificate import ClassCounts
from gati.composition.walk import certify
from gati.guard.posts import Post
from gati.guard.watch import Watch
from services.inference.counts import Counts
from services.inference.following import Answering, Following, Shared
from services.inference.keeping import ServedStanding, open_standing
from services.inference.line import Line
from services.inference.settings import InferenceSettings
from services.inference.standing import Stands, stands
from tests.engine.served import composed, exit_at
from tests.waiting import until

CERTIFICATE = certify([(0, 1500)], 0.97, 0.05)


def settings(**known: Any) -> InferenceSettings:
    return InferenceSettings.model_validate({"name": "small", **known})


def said(
    watch: Watch | None, *, retrained: bool = False, by_class: tuple[ClassCounts, ...] = (), **known: Any
) -> Stands:
    standings, counts = ServedStanding(None), Counts()
    queue: Any = None
    shared = Shared(settings(**known), counts, Line(counts), standings, None)
    certificate = replace(CERTIFICATE, by_class=by_class)
    composition = replace(composed("0" * 64, (exit_at(0, 0.5),)), certificate=certificate)
    engine: Any = None
    answering = Answering("a", engine, queue, composition)
    post = None if watch is None else Post(answering, watch)
    return stands(composition, Following(answering, post, queue, shared), retrained=retrained)


def watch_of(*, proven: bool) -> Watch:
    return ServedStanding(None).watch("a", 0.97, proven=proven)


def test_what_is_promised_is_said_with_what_it_rests_on() -> None:
    certified = said(watch_of(proven=True))
    promise = "at least 97 % of answers are the base model's"
    assert certified == ("serving", 0.97, f"{promise}, certified with 95 % confidence", True)

    watch = watch_of(proven=False)
    for _ in range(57):
        watch.audited(agreed=True)
    assert watch.proof is not None
    needed = watch.proof.required
    assert said(watch) == (
        "probation", None, f"on probation: 57 of about {needed} audits; the base model answers", False,
    )  # fmt: skip
    assert said(watch, audit_budget=0.0, unguarded=True).state == "unguarded"
    while not watch.may_hit:
        watch.audited(agreed=True)
    assert said(watch, retrained=True) == ("serving", 0.97, f"{promise}, proven on {needed} audits", False)
    by_class = said(watch, retrained=True, by_class=(ClassCounts("a", 0, 1500),)).sentence
    assert by_class == f"{promise}, over all classes together, proven on {needed} audits"

    while watch.may_hit:
        watch.audited(agreed=False)
    watch.audited(agreed=False)
    state, agreement, sentence, rests = said(watch, audit_budget=0.0, unguarded=True)
    assert (state, agreement, rests) == ("stopped", None, False), "told so or not, what was stopped stays so"
    assert sentence.startswith("stopped by the guard: 1 of about ") and "1 of them losses" in sentence
    assert said(None) == ("serving", None, "every answer is the base model's", False)


def stopped(path: Path) -> None:
    """Leave a file in which the caches `a` are stopped."""
    standings = ServedStanding(path)
    watch = standings.of("a", 0.9, proven=True, delta=0.05, on_event=lambda event: None)
    while watch.may_hit:
        watch.audited(agreed=False)
    assert json.loads(path.read_text())["versions"]["a"]["state"] == "stopped", "before anybody acts on it"


def state_of(standings: ServedStanding) -> str:
    return standings.of("a", 0.9, proven=True, delta=0.05, on_event=lambda event: None).state


def test_who_finds_another_process_at_the_file_reads_it_and_keeps_to_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = settings(state=tmp_path)
    stopped(tmp_path / "small.json")
    first, unlock = open_standing(chosen)
    with caplog.at_level(logging.WARNING):
        second, _ = open_standing(chosen)
    assert [vars(record)["reason"] for record in caplog.records] == ["another process keeps it"]
    before = (tmp_path / "small.json").read_bytes()
    assert state_of(second) == "stopped"
    second.save()
    assert (tmp_path / "small.json").read_bytes() == before
    unlock()
    third, _ = open_standing(chosen)
    assert state_of(third) == state_of(first) == "stopped"
    third.save()


def test_what_the_guard_of_one_replica_stops_no_other_frees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that is started, or that serves already, has the same caches prove themselves again."""
    monkeypatch.setattr("gati.guard.standing._SAVED_EVERY_S", 0.0)
    running, unlock = open_standing(settings(state=tmp_path, replica=1, replicas=3))
    assert state_of(running) == "serving"
    stopped(tmp_path / "small.json")
    added, unlock_added = open_standing(settings(state=tmp_path, replica=2, replicas=3))
    assert state_of(added) == "probation", "a new replica believes the certificate"

    def noticed() -> bool:
        running.audited()
        return state_of(running) == "probation"

    until(noticed)
    again = running.of("a", 0.9, proven=True, delta=0.05, on_event=lambda event: None)
    while not again.may_hit:
        again.audited(agreed=True)
    running.audited()
    assert again.may_hit and again.proven_on, "its own proof counts, whatever has become of the other"
    for each, free in ((running, unlock), (added, unlock_added)):
        each.close()
        free()


def test_a_library_that_cannot_be_written_is_said_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "standing").write_text("in the way of a folder", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        standings, _ = open_standing(settings(library=tmp_path))
        assert state_of(standings) == "serving"
        standings.save()
    assert [record.message for record in caplog.records] == [
        "how versions stand is kept in memory only; name a folder with `state`"
    ]


def test_a_disk_that_fails_is_said_once_and_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kept" / "small.json"
    standings = ServedStanding(path)
    watch = standings.of("a", 0.9, proven=True, delta=0.05, on_event=lambda event: None)
    path.unlink()
    path.mkdir()  # nothing can be renamed to it
    with caplog.at_level(logging.ERROR):
        while watch.may_hit:
            watch.audited(agreed=False)
        standings.save()
    assert len(caplog.records) == 1 and watch.state == "stopped"
    path.rmdir()
    standings.save()
    assert state_of(ServedStanding(path)) == "stopped"
