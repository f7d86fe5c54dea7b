"""The engines of the auditing thread: made once, and let go with the versions they are copies of."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

from gati.adaptation.shadow import Shadow


class Copied:
    """An engine that counts its copies."""

    def __init__(self) -> None:
        self.twins: list[weakref.ref[Any]] = []

    def twin(self) -> Any:
        made = type("Twin", (), {})()
        self.twins.append(weakref.ref(made))
        return made


def versions(count: int) -> list[Any]:
    return [SimpleNamespace(engine=Copied()) for _ in range(count)]


def test_the_version_that_serves_and_the_one_on_trial_are_copied_once() -> None:
    """Each audit looks up both: a copy takes as long as opening the network."""
    shadow, (serving, trial) = Shadow(SimpleNamespace()), versions(2)  # type: ignore[arg-type]
    for _ in range(3):
        assert shadow.caches(serving, threaded=True) is serving.engine.twins[0]()
        assert shadow.caches(trial, threaded=True) is trial.engine.twins[0]()
    assert len(serving.engine.twins) == len(trial.engine.twins) == 1


def test_copies_of_versions_that_left_are_let_go() -> None:
    shadow, every = Shadow(SimpleNamespace()), versions(4)  # type: ignore[arg-type]
    for each in every:
        shadow.caches(each, threaded=True)
    gc.collect()
    assert [each.engine.twins[0]() is not None for each in every] == [False, False, True, True]


def test_in_the_thread_that_answers_the_engine_itself_is_used() -> None:
    shadow, (served,) = Shadow(SimpleNamespace()), versions(1)  # type: ignore[arg-type]
    assert shadow.caches(served, threaded=False) is served.engine and not served.engine.twins
