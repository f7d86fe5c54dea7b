"""Proven settings are opened in the background; one that cannot be is told of, and tried again."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gati.composition.composition import Composition
from gati.errors import CompositionError
from gati.guard.posts import Post
from gati.guard.proof import Spending
from gati.guard.roster import Roster, RosterChange
from gati.guard.watch import Watch
from services.inference.following import Answering
from services.inference.proven_settings import ProvenSettings
from services.inference.service_times import ServiceTimes


class Opener:
    """Opens settings, unless it has an `error`."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.opened = 0

    def open_setting(self, setting: Any) -> Any:
        self.opened += 1
        if self.error is not None:
            raise self.error
        return SimpleNamespace(engine=None, runner=None, times=ServiceTimes())


class Versions(Roster[Answering]):
    """Opens settings as a served model does."""

    def __init__(self, serving: Post[Answering], settings: ProvenSettings) -> None:
        self.settings = settings
        super().__init__(serving)

    def tell(self, kind: RosterChange, message: str) -> None:
        pass

    def begin_opening(self, post: Post[Answering], level: int, kind: RosterChange, counted: str) -> None:
        self.settings.begin(self, post, level, kind, counted)

    def figures(self, post: Post[Answering]) -> Composition | None:
        return None

    def on_serving(self, post: Post[Answering]) -> None:
        pass

    on_promoted = on_fell_back = on_given_up = on_serving


def proven() -> Post[Answering]:
    """A retrained version whose two settings were proven by an earlier run."""
    nothing: Any = None
    watch = Watch(0.9, spend=Spending(0.05).next, proven=False, settings=2)
    while not watch.may_hit:
        watch.audited(agreed=[True, True])
    return Post(Answering("retrained", nothing, nothing), watch, (nothing, nothing))


ERRORS = [CompositionError("no file"), RuntimeError("out of memory"), OSError("disk"), MemoryError()]


@pytest.mark.parametrize("error", ERRORS, ids=[type(each).__name__ for each in ERRORS])
def test_a_setting_that_cannot_be_opened_for_any_reason_is_told_and_tried_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Of errors that are not Gati's own, no one was told, and the setting was "being opened" for ever."""
    opener, post = Opener(), proven()

    async def run() -> None:
        with ThreadPoolExecutor(1) as loader:
            settings: Any = ProvenSettings(opener, loader, capacity=1)  # type: ignore[arg-type]
            settings.add(post.version, [SimpleNamespace(composition=None)] * 2)
            roster = Versions(post, settings)
            opener.error = error
            await settings.open_known(post)
            assert not post.may_hit and opener.opened == 1
            roster.settle()
            await settings.close()
            roster.give_up()
            await settings.close()
            assert not post.may_hit and not post.opening and opener.opened == 2, "not after every request"
            opener.error, requests = None, 0
            while not post.may_hit and requests < 2000:
                roster.give_up()
                await settings.close()
                requests += 1
            assert post.level == 2 and opener.opened == 3

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    reasons = [vars(record)["reason"] for record in caplog.records]
    assert reasons == [str(error) or "MemoryError"] * 2


def test_nobody_is_told_of_a_setting_of_a_version_that_left(caplog: pytest.LogCaptureFixture) -> None:
    opener, post = Opener(), proven()
    opener.error = torch.cuda.OutOfMemoryError("out of memory")

    async def run() -> None:
        with ThreadPoolExecutor(1) as loader:
            settings: Any = ProvenSettings(opener, loader, capacity=1)  # type: ignore[arg-type]
            settings.add(post.version, [SimpleNamespace(composition=None)] * 2)
            roster = Versions(post, settings)
            roster.settle()
            post.version.gone = True
            await settings.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert not caplog.records
