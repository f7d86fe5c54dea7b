"""Many models share one thread by their weights; a failing one does not block the others."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import NotFoundError, UnavailableError
from services.adaptation.adaptations import Adaptations, Turns
from services.adaptation.settings import AdaptationSettings, AdaptedModel
from services.wire.gen.ttypes import AdaptationStatus


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.2, 5.0), min_size=2, max_size=5),
    st.lists(st.floats(0.1, 3.0), min_size=200, max_size=200),
)
def test_who_always_wants_time_gets_its_share(shares: list[float], lasts_s: list[float]) -> None:
    """Up to a few turns, however long each takes."""
    names = [str(at) for at in range(len(shares))]
    turns = Turns(dict(zip(names, shares, strict=True)))
    for seconds in lasts_s:
        turns.used(turns.next(names), seconds)
    total = sum(turns.used_s.values())
    for name in names:
        assert abs(turns.used_s[name] - turns.shares[name] * total) <= 3.0 * len(names)


def test_who_wanted_none_has_saved_none_up() -> None:
    turns = Turns({"busy": 1.0, "idle": 1.0})
    for _ in range(100):
        turns.used(turns.next(["busy"]), 1.0)
    after = []
    for _ in range(10):
        after.append(turns.next(["busy", "idle"]))
        turns.used(after[-1], 1.0)
    assert 4 <= after.count("idle") <= 6


class Model:
    """A model whose every look fails, or none."""

    def __init__(self, name: str, *, fails: bool) -> None:
        self.name, self.fails, self.looks = name, fails, 0
        self.closed = False

    def look(self, *, asked: bool = False) -> None:
        self.looks += 1
        if self.fails:
            raise MemoryError("too large")

    def status(self) -> Any:
        return AdaptationStatus(self.name, 3, 10, False, "kept", "as good", 0.5, 0.6, changed_s=1000.0)

    def close(self) -> None:
        self.closed = True


def test_a_model_that_fails_or_cannot_be_opened_holds_up_no_other() -> None:
    made: dict[str, Model] = {}

    def open_model(described: AdaptedModel, settings: AdaptationSettings) -> Model:
        if described.name == "broken":
            raise OSError("no such library")
        return made.setdefault(described.name, Model(described.name, fails=described.name == "failing"))

    def described(name: str) -> AdaptedModel:
        return AdaptedModel(name=name, library=Path(name), composition="default", records="r", repository="v")

    async def body() -> None:
        began_s = time.time()
        models = tuple(map(described, ("broken", "failing", "good")))
        adaptations = Adaptations(AdaptationSettings(models=models, look_every_s=0.001), open_model)
        adaptations.start()
        assert (await adaptations.health()).ready
        assert await adaptations.status() == [], "nothing is known of what is not open"
        looking = asyncio.create_task(adaptations.keep_looking())
        while "good" not in made or made["good"].looks < 20:
            await asyncio.sleep(0.001)
        told = {each.model: (each.outcome, each.message) for each in await adaptations.status()}
        assert told["good"] == ("kept", "as good") and told["failing"] == ("failed", "too large")
        assert told["broken"] == ("failed", "no such library")
        ended = {each.model: each.changed_s for each in await adaptations.status()}
        assert ended["good"] == 1000.0 and ended["broken"] >= began_s and ended["failing"] >= began_s
        assert [each.share for each in await adaptations.status()] == pytest.approx([1 / 3] * 3)
        assert (await adaptations.adapt("good")).version == 3
        with pytest.raises(UnavailableError, match="no such library"):
            await adaptations.adapt("broken")
        with pytest.raises(NotFoundError):
            await adaptations.adapt("other")
        looking.cancel()
        adaptations.close()
        assert made["good"].closed and made["failing"].closed

    asyncio.run(body())
