"""What a log shows while caches are trained."""

from __future__ import annotations

import io
import threading

import pytest

from gati.exploration.progress import LiveProgress, PlainProgress, SilentProgress, told_if_long
from tests.waiting import LONG_S


def test_a_log_gets_the_stage_the_share_done_the_detail_and_the_time_left() -> None:
    log = io.StringIO()
    progress = PlainProgress(log, interval_s=0.0)
    progress.stage("training", total=10)
    progress.advance(4, "loss 1.250")
    lines = log.getvalue().splitlines()
    assert lines[0] == "training"
    assert lines[1].startswith("training: 4/10  loss 1.250  ")
    assert lines[1].endswith(" s left")


def test_a_log_is_not_flooded() -> None:
    log = io.StringIO()
    progress = PlainProgress(log, interval_s=3600.0)
    progress.stage("training", total=1000)
    for _ in range(1000):
        progress.advance(1)
    assert log.getvalue() == "training\n"


def test_a_resumed_stage_says_nothing_before_its_first_step() -> None:
    log = io.StringIO()
    progress = PlainProgress(log, interval_s=0.0)
    progress.stage("training", total=10, done=6)
    progress.advance(0)
    assert log.getvalue() == "training\n"
    progress.advance(1)
    assert "training: 7/10" in log.getvalue()


def test_a_stage_that_time_ends_takes_no_longer_than_that() -> None:
    """The first steps are slow, and a stage with too many of them ends with fewer."""
    log = io.StringIO()
    progress = PlainProgress(log, interval_s=0.0)
    progress.stage("training", total=10**9, most_s=1000.0)
    progress.advance(1)
    left_s = float(log.getvalue().split()[-3])
    assert 0.0 <= left_s <= 1000.0
    progress.stage("training", total=10**9)
    progress.advance(1)
    assert float(log.getvalue().split()[-3]) >= 0.0


def test_of_a_stage_that_only_time_ends_no_number_of_steps_is_promised() -> None:
    log = io.StringIO()
    progress = PlainProgress(log, interval_s=0.0)
    progress.stage("students", total=None, done=40, most_s=1000.0)
    progress.advance(2, "loss 1.250")
    line = log.getvalue().splitlines()[1]
    assert line.startswith("students: 42 steps  loss 1.250  ")
    assert 900.0 < float(line.split()[-3]) <= 1000.0, "however fast the first steps are"


def test_a_display_tells_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveProgress() as progress:
        progress.stage("students", total=None, most_s=3600.0)
        progress.advance(3)
        progress.stage("training", total=10**9, most_s=60.0)
        progress.advance(1, "loss 1.250")
        progress.stage("measuring", total=1)
        progress.advance(1)
    told = capsys.readouterr().err
    assert "loss 1.250" in told and "0:00:00 left" in told and "3 steps" in told


class _Heard(SilentProgress):
    """Tells when a note has come."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.heard = threading.Event()

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.heard.set()


def test_what_takes_long_is_told_while_it_goes_on() -> None:
    progress = _Heard()
    with told_if_long(progress, "reading the inputs", after_s=0.01):
        assert progress.heard.wait(LONG_S)
    assert progress.notes == ["reading the inputs"]


def test_what_ends_at_once_is_not_told() -> None:
    progress = _Heard()
    with told_if_long(progress, "reading the inputs", after_s=3600):
        pass
    assert progress.notes == []


def test_a_live_note_shows_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    LiveProgress().note("left out blocks[0]: caches read float32 tensors [batch, width]")
    assert " ".join(capsys.readouterr().err.split()) == (
        "left out blocks[0]: caches read float32 tensors [batch, width]"
    )
