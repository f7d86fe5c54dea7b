"""What happens to one camera within weeks: it freezes, retraining fails each time, the process is ended."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from gati.adaptation import renewal
from gati.adaptation.adaptation import Adaptation
from gati.adaptation.settings import AdaptSettings, Change
from gati.composition.load import Served
from gati.errors import AdaptError
from tests.adaptation.deployed import FAMILIAR, STRANGE, make_deployed, stream
from tests.waiting import LONG_S, until

pytestmark = pytest.mark.slow

SETTINGS = AdaptSettings(
    interval_s=1e9, window_inputs=600, accuracy=0.9, blocks=("blocks.0",), original_inputs=0,
    rest=False, recall=False, seed=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_deployed(tmp_path_factory.mktemp("deployed"))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise AdaptError("it never succeeds")

    monkeypatch.setattr(renewal, "retrain", fails)


def feed(adaptation: Adaptation, inputs: Tensor, begin_s: float = 0.0) -> Iterator[None]:
    for number, x in enumerate(inputs.split(1)):
        adaptation.answer(x, time_s=begin_s + 0.1 * number, source="camera", place="door")
        yield


def test_a_camera_that_is_frozen_does_not_fill_the_window_with_one_picture(served: Served) -> None:
    """After minutes nothing else was left to train on."""
    with Adaptation(served, SETTINGS, deterministic=True) as adaptation:
        for _ in feed(adaptation, stream(FAMILIAR, 200, seed=3)):
            pass
        before = adaptation.status.samples
        for _ in feed(adaptation, stream(FAMILIAR, 1, seed=4).repeat(300, 1, 1, 1), 20.0):
            pass
        assert before > 20 and adaptation.status.samples == before + 1
        for _ in feed(adaptation, stream(FAMILIAR, 200, seed=5), 50.0):
            pass
        assert adaptation.status.samples > before + 20


def test_what_a_camera_repeats_in_turn_is_learned_from(served: Served) -> None:
    """A picture that was there before was left out: with a clip in a loop, the window never filled."""
    with Adaptation(served, replace(SETTINGS, sampling=1.0), deterministic=True) as adaptation:
        for _ in feed(adaptation, stream(FAMILIAR, 20, seed=3).repeat(5, 1, 1, 1)):
            pass
        assert adaptation.status.samples == 100


@pytest.mark.usefixtures("failing")
def test_retraining_that_always_fails_is_tried_ever_more_rarely(served: Served) -> None:
    """With stopped caches, whose requests are all sampled, it was tried once in five seconds."""
    changes: list[Change] = []
    with Adaptation(served, SETTINGS, deterministic=True, on_change=changes.append) as adaptation:
        for _ in feed(adaptation, stream(STRANGE, 1200, seed=2)):
            pass
        taken = adaptation.status.samples
    failed = [change for change in changes if change.kind == "failed"]
    assert taken == 600 and 2 <= len(failed) <= 5
    told = re.fullmatch(
        r"retraining failed: it never succeeds; next after (\d+) more samples", failed[0].message
    )
    assert told is not None and int(told[1]) > 50


def test_a_retraining_that_fails_with_many_lines_is_told_in_one(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory\nException raised from empty_generic at EmptyTensor.cpp:1\nframe #0")

    monkeypatch.setattr(renewal, "retrain", fails)
    told: list[Change] = []
    settings = replace(SETTINGS, interval_s=20.0, falls_to=0.0, sampling=1.0)
    with Adaptation(served, settings, on_change=told.append) as adaptation:
        for begin_s in (0.0, 100.0):  # once the samples are taken, the next request shows that it is time
            list(feed(adaptation, stream(STRANGE, 260, seed=2), begin_s))
            assert adaptation.wait(LONG_S)
    said = [change.message for change in told if change.kind == "failed"]
    assert said and all(each.startswith("retraining failed: no memory; next after") for each in said)


def test_what_was_learned_is_saved_before_a_retraining_is_waited_for(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is told to end has a minute or so, and a retraining may take longer: then comes SIGKILL."""
    begun, goes_on = threading.Event(), threading.Event()

    def patient(*_: Any, **__: Any) -> None:
        begun.set()
        goes_on.wait()
        raise AdaptError("it took too long")

    monkeypatch.setattr(renewal, "retrain", patient)
    settings = replace(SETTINGS, interval_s=1.0, sampling=1.0, window_inputs=140, recall=True)
    adaptation = Adaptation(served, settings, standing=tmp_path / "standing.json")
    for _ in feed(adaptation, stream(FAMILIAR, 150, seed=3)):
        pass
    for _ in feed(adaptation, stream(FAMILIAR, 1000, seed=4), 15.0):
        if begun.wait(0.01):
            break
    assert begun.wait(LONG_S)
    assert adaptation._workers.auditing.wait(LONG_S)
    kept = tmp_path / "standing.json", tmp_path / "standing-memory.npz"
    for file in kept:
        file.unlink(missing_ok=True)  # saved as something was proven
    closing = threading.Thread(target=adaptation.close)
    closing.start()
    try:
        until(lambda: all(file.exists() for file in kept))
        assert closing.is_alive()
    finally:
        goes_on.set()
        closing.join()
