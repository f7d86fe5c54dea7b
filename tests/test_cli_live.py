"""What `gati stream` shows of its source while there are no pictures: in a terminal, and on its page."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gati.adaptation.settings import Audit, OnTrial, Status
from gati.adaptation.streaming import Streamed, Tally
from gati.cli import run
from gati.cli.live import LineView, TerminalView, open_page, posted, source_shown, summary
from gati.video import Frame, Result, SourceState, SourceStatistics
from gati.video.webhook import WebhookStatistics
from tests.adaptation.deployed import make_deployed
from tests.video.films import Camera, film, plays, refuses
from tests.waiting import LONG_S, until

pytest.importorskip("av")

ROOT = Path(__file__).resolve().parent.parent


def _heed_interrupts() -> None:
    """What a shell starts in the background ignores them, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The states of the pages that are served."""
    live = pytest.importorskip("services.live")
    states, serve = [], live.serve_page

    def served(state: Any, *_: object) -> Any:
        states.append(state)
        return serve(state)

    monkeypatch.setattr(live, "serve_page", served)
    return states


@pytest.mark.slow
def test_a_lost_camera_is_told_at_once_and_without_its_password(tmp_path: Path) -> None:
    library = make_deployed(tmp_path).library.directory
    said = tmp_path / "said"
    camera = Camera(plays(15), refuses)
    address = camera.url.replace("http://", "http://me:hidden@")
    command = [sys.executable, "-m", "gati", "stream", str(library), "--source", address]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with camera, said.open("w") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, cwd=tmp_path, preexec_fn=_heed_interrupts
        )
        until(lambda: process.poll() is not None or "source lost at" in said.read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG_S) == 0
    lines = [line for line in said.read_text().splitlines() if line.startswith("source lost at")]
    assert len(lines) == 1 and ", reconnecting: " in lines[0]
    assert "hidden" not in said.read_text()


def test_a_view_says_that_a_source_is_lost_and_that_it_is_back() -> None:
    told = io.StringIO()
    with ExitStack() as stack:
        heard = source_shown(LineView(told), open_page(stack, "camera", None, []))
        for state, reason in (
            (SourceState.RUNNING, ""),
            (SourceState.RECONNECTING, "the stream ended"),
            (SourceState.RECONNECTING, "gone"),
            (SourceState.RUNNING, ""),
            (SourceState.ENDED, ""),
        ):
            heard(state, reason)
    lost, back = told.getvalue().splitlines()
    assert lost.startswith("source lost at ") and lost.endswith("reconnecting: the stream ended")
    assert back.startswith("source back at ")


def test_a_terminal_shows_a_lost_source_before_its_next_picture() -> None:
    told = io.StringIO()
    with TerminalView(told) as view, ExitStack() as stack:
        heard = source_shown(view, open_page(stack, "camera", None, []))
        heard(SourceState.RECONNECTING, "no picture came for 10 s")
    assert "reconnecting: no picture came for 10 s" in told.getvalue()


def streamed(state: SourceState = SourceState.RUNNING, **changes: Any) -> Streamed:
    """A picture that was answered, and the counts after it."""
    frame = Frame(np.zeros((8, 8, 3), np.uint8), 0, 1.0, "camera:0")
    result = Result(1.0, 0, "camera:0", None, 4, "car", 0.9, "base", 1.0, 2.0, "1")
    return Streamed(frame, [result], Tally(pictures=1, requests=1), status(**changes), state)


def test_a_terminal_that_says_that_a_source_is_lost_does_not_say_that_it_runs() -> None:
    """Its first line was that of the last picture."""
    told = io.StringIO()
    with TerminalView(told) as view:
        view.show(streamed())
        view.note("source lost at 12:00:00, reconnecting: gone")
    assert "camera:0  1.0 s" in told.getvalue() and "reconnecting: gone" in told.getvalue()
    assert "running" not in told.getvalue()


def test_a_terminal_shows_an_alarm_above_more_answers_than_it_has_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With many regions, the end of the screen was left out: all changes, and a lost source."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "12")
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    many = streamed()
    with TerminalView(screen) as view:
        view.show(replace(many, results=30 * list(many.results)))
        view.note("source lost at 12:00:00, reconnecting: gone")
        before = screen.getvalue().count("camera:0  1.0 s")
        until(lambda: screen.getvalue().count("camera:0  1.0 s") > before + 1)  # one may have begun before
        painted = screen.getvalue().rpartition("camera:0  1.0 s")[2]
    assert "reconnecting: gone" in painted.partition("whole picture")[0]
    assert 0 < painted.count("whole picture") < 30


def test_hits_and_the_share_of_memory_are_of_the_same_requests() -> None:
    """The hits were of the last hundred: of 10 % that left early, memory had answered 60 %."""
    told = io.StringIO()
    LineView(told).show(streamed(requests=1000, hits=700, recalled=600, hit_rate=0.1))
    assert "hits 70% (60% from memory)" in told.getvalue()


def test_lookups_that_pause_are_told_in_the_terminal_and_on_the_page(shown: list[Any]) -> None:
    told = io.StringIO()
    LineView(told).show(streamed(resting=True))
    assert "version 0, lookups paused, " in told.getvalue()
    with ExitStack() as stack:
        page = open_page(stack, "camera", 0, [])
        for resting in (True, False):
            page.status(status(resting=resting))
            assert shown[0].since()["resting"] == resting


def test_a_camera_that_sent_only_damaged_pictures_is_told_from_one_that_sent_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counted = SourceStatistics(None, None, 0, 0, corrupt=31, frame_age_s=None, reconnects=2)
    source = SimpleNamespace(state=SourceState.ENDED, reason="the stream ended", statistics=counted)
    summary(Tally(), status(), source)
    assert capsys.readouterr().err.splitlines() == [
        "the source sent no pictures",
        "source ended: 0 dropped, 31 corrupt, 2 reconnections (the stream ended)",
    ]
    summary(Tally(pictures=1, requests=1, hits=1), status(), source)
    assert capsys.readouterr().err.startswith("1 picture, 1 answer, 100.0% left early\n")


def test_a_page_shows_why_a_source_was_lost(shown: list[Any]) -> None:
    with ExitStack() as stack:
        heard = source_shown(LineView(io.StringIO()), open_page(stack, "camera", 0, []))
        heard(SourceState.RUNNING, "")
        heard(SourceState.RECONNECTING, "the stream ended")
        document = shown[0].since()
    assert (document["source"]["state"], document["source"]["reason"]) == ("reconnecting", "the stream ended")
    assert document["events"][-1][-1] == "reconnecting: the stream ended"


def test_a_state_that_is_no_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = make_deployed(tmp_path).library.directory
    video = film(tmp_path / "film.mp4", 3)
    arguments = ["stream", str(library), "--source", str(video), "--adapt", "--state", str(video)]
    assert run(arguments) == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error: ")]
    assert str(video) in line and "--state" in line


@pytest.mark.parametrize(
    ("counted", "line"),
    [
        (WebhookStatistics(7, 0, 0, 0, ""), "webhook: 7 results sent\n"),
        (
            WebhookStatistics(2, 0, 1, 4, "http://host: status 404"),
            "webhook: 2 results sent, 5 failed or dropped (http://host: status 404)\n",
        ),
        (
            WebhookStatistics(2, 1, 0, 0, ""),
            "webhook: 2 results sent, 1 failed or dropped (they waited too long)\n",
        ),
        (
            WebhookStatistics(2, 0, 1, 0, ""),
            "webhook: 2 results sent, 1 failed or dropped (they waited too long)\n",
        ),
    ],
)
def test_results_that_a_webhook_lost_are_told(
    counted: WebhookStatistics, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    posted(SimpleNamespace(statistics=counted))  # type: ignore[arg-type]
    assert capsys.readouterr().err == line


def status(**changes: Any) -> Status:
    """That of a stream whose caches answer."""
    serving = Status(0, "serving", 9, 5, 0, 0.5, 0, 0, 0, 0, retraining=False, promise=0.97)
    return serving._replace(**changes)


def audit(version: int, *, agreed: bool = True, shadow: bool = False) -> Audit:
    """An audit of a version that says that the class is 1."""
    return Audit(0, 0.0, version, 1, 1 if agreed else 2, "early", shadow)


def test_a_page_counts_audits_of_answers_by_version(shown: list[Any]) -> None:
    with ExitStack() as stack:
        page = open_page(stack, "camera", 0, [])
        for _ in range(5):
            page.audit(audit(0))
        page.audit(audit(1, agreed=False, shadow=True))
        known = shown[0].since()["audits"]
        assert (known["n"], known["losses"]) == (5, 0)
        page.status(status(version=1))
        assert shown[0].since()["audits"] is None, "they were of version 0 until the first audit of version 1"
        page.audit(audit(1))
        page.audit(audit(0))  # of an answer before the change
        page.audit(audit(1))
        assert shown[0].since()["audits"]["n"] == 2


def test_a_page_shows_what_is_on_trial_and_whether_caches_answer_meanwhile(shown: list[Any]) -> None:
    """It said that caches answer where none were proven, and that each trial had one audit."""
    with ExitStack() as stack:
        page = open_page(stack, "camera", 0, [])
        page.status(status(state="stopped", promise=None, on_trial=OnTrial(2, 57, 1, 150, waits=False)))
        for version in (0, 2, 0, 2):  # both are looked up
            page.audit(audit(version, shadow=True))
        told = {"version": "2", "audits": 57, "losses": 1, "needed": 150, "waits": False}
        assert shown[0].since()["proof"] == told and shown[0].since()["promise"] is None
        page.status(status(on_trial=OnTrial(2, 58, 1, 150, waits=True)))
        assert shown[0].since()["proof"]["waits"] and shown[0].since()["promise"] == 0.97
        page.status(status())
        assert shown[0].since()["proof"] is None
