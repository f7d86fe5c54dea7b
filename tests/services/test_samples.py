"""Samples of requests that caches did not answer say what the caches would have answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from gati.engine.exits import BASE
from gati.guard.auditor import Probed
from gati.guard.posts import Post
from gati.samples.record import Record
from services.inference.following import Answering, Following
from tests.services.test_line import GIVEN, House, X, prediction, run
from tests.waiting import in_the_end

STRICT, LOOSE = Probed(0, "strict", True), Probed(3, "loose", False)


class Kept(list[Record]):
    """A writer that keeps what it is offered."""

    offer = list.append


class Sampled:
    """A version of two settings, of which the stricter one is right. Every request is kept."""

    def __init__(self) -> None:
        house, self.kept, nothing = House(sampling=1.0), Kept(), (None, None)
        self.watch = house.standings.watch("a", 0.9, proven=False, settings=2)
        engine: Any = None
        writer: Any = self.kept
        settings: Any = nothing
        version = Answering("a", engine, engine, probe=lambda *_: (STRICT, LOOSE))
        self.post = Post(version, self.watch, settings)
        base: Any = house.base
        self._following = Following(version, self.post, base, replace(house.shared, writer=writer))

    async def ask(self, *, new_scene: bool = False, repeated: bool = False) -> Record:
        """Let the reference answer a request; returns its sample."""
        looked: Any = SimpleNamespace(new_scene=new_scene, repeated=repeated)
        drawn = self._following.draw(None, looked)
        assert not drawn.decided.may_hit
        before = len(self.kept)
        self._following.answered(drawn, X, GIVEN, prediction(BASE, 0), None)
        await in_the_end(lambda: len(self.kept) > before)
        return self.kept[-1]


def said(record: Record) -> Sequence[Any]:
    return record.exit, record.agreed


def test_a_request_that_shows_the_same_as_the_one_before_proves_nothing() -> None:
    """Copies of one picture released a setting, as a frozen camera sends them."""

    async def test() -> None:
        sampled, asked = Sampled(), 0
        while not sampled.watch.level:
            await sampled.ask()
            asked += 1
        sampled = Sampled()
        for _ in range(asked):
            await sampled.ask(repeated=True)
        assert sampled.watch.level == 0 and sampled.watch.proof is not None
        assert sampled.watch.proof.audits == 0

    run(test)


def test_before_anything_is_proven_they_say_what_the_setting_to_prove_would_have() -> None:
    """The audit that proved it was kept with the answer of the next one."""

    async def test() -> None:
        sampled = Sampled()
        while not sampled.watch.level:
            assert said(await sampled.ask()) == ("strict", True)
        assert said(await sampled.ask()) == ("loose", False), "proven, but not open"

    run(test)


def test_of_a_new_scene_they_say_what_the_deployed_setting_would_have() -> None:
    """They said what the setting would have that is to be proven next."""

    async def test() -> None:
        sampled = Sampled()
        while not sampled.watch.level:
            sampled.watch.audited(agreed=[True, False])
        sampled.post.open[1] = sampled.post.version
        assert said(await sampled.ask(new_scene=True)) == ("strict", True)

    run(test)
