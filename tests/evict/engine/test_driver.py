"""However an engine ends, its pages return to the pool that it shares."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from gati import evict
from gati.errors import UnavailableError
from gati.evict.engine.decoder import Decoder, TokenBatch
from gati.evict.engine.driver import EngineDriver
from gati.evict.engine.engine import PrefixEngine
from gati.evict.engine.generation import Ending, NextToken
from gati.evict.engine.pages import KeptPrefixes
from tests.evict.engine.small import DECODER, PAGE_BYTES, PAGE_TOKENS, SETTINGS, engine, request
from tests.waiting import LONG_S, returns, until

POLICIES = ["lru", pytest.param("gati", marks=pytest.mark.slow)]


def shared(
    policy: str, decoder: Decoder = DECODER
) -> tuple[evict.PagePool, PrefixEngine, evict.EmbeddingCache]:
    """A pool, and an engine and a cache of rows that divide it."""
    pool = evict.PagePool(PAGE_BYTES, 12 * PAGE_BYTES)
    running = PrefixEngine(decoder, pool, KeptPrefixes(policy), page_tokens=PAGE_TOKENS)
    rows = evict.EmbeddingCache(evict.MemoryTier(torch.randn(2_000, 128)), mode="sum", pool=pool)
    assert running.pages == rows.pages == 6
    return pool, running, rows


@pytest.mark.parametrize("policy", POLICIES)
def test_an_engine_that_is_stopped_returns_its_pages(policy: str) -> None:
    pool, running, rows = shared(policy)
    driver = EngineDriver(running, lambda error: None)
    driver.start()
    ended = threading.Event()
    running.submit(request([1] * 9, 3), lambda token: ended.set() if token.ending else None)
    assert ended.wait(LONG_S)
    driver.stop()
    assert (running.pages, rows.pages, pool.used_pages) == (0, 12, 12)
    running.close()  # changes nothing
    pool.resize(4 * PAGE_BYTES)
    assert rows.pages == pool.used_pages == 4


def test_an_engine_is_stopped_although_a_step_begins_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step took the wake-up for one of its own requests, and `stop` waited for ever."""
    running = engine()
    begun, woken = threading.Event(), threading.Event()
    step, wake = running.step, running.wake

    def late() -> bool:
        begun.set()
        assert woken.wait(LONG_S)
        return step()

    def waking() -> None:
        wake()
        woken.set()

    monkeypatch.setattr(running, "step", late)
    monkeypatch.setattr(running, "wake", waking)
    driver = EngineDriver(running, lambda error: None)
    driver.start()
    assert begun.wait(LONG_S)
    returns(driver.stop)


class Failing(Decoder):
    """Fails in the second step."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(SETTINGS)
        self.double()
        self.steps = 0
        self.error = error or RuntimeError("no memory")

    def forward(self, batch: TokenBatch, cache: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps > 1:
            raise self.error
        logits: Any = super().forward(batch, cache)
        return logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_engine_that_fails_ends_its_requests_and_returns_its_pages(policy: str) -> None:
    pool, running, rows = shared(policy, Failing().eval())
    failures: list[BaseException] = []
    told: list[NextToken] = []
    generations = [running.submit(request([each] * 9, 3), told.append) for each in (1, 2)]
    driver = EngineDriver(running, failures.append)
    driver.start()
    until(lambda: bool(failures))
    assert str(failures[0]) == "no memory"
    for generation in generations:
        assert generation.ending is Ending.FAILED and isinstance(generation.error, UnavailableError)
    assert [each.ending for each in told[-2:]] == [Ending.FAILED] * 2
    assert (running.pages, rows.pages, pool.used_pages) == (0, 12, 12)
    pool.resize(6 * PAGE_BYTES)
    assert (running.pages, rows.pages) == (0, 6)
    running.figures()
    driver.stop()


def test_a_step_that_is_interrupted_ends_the_engine() -> None:
    """Pages counted as computed whose keys and values were never written: later requests read them."""
    pool, running, rows = shared("lru", Failing(KeyboardInterrupt()).eval())
    generation = running.submit(request([1] * 9, 3))
    with pytest.raises(KeyboardInterrupt):
        running.run_until_idle()
    assert generation.ending is Ending.FAILED and isinstance(generation.error, UnavailableError)
    assert (running.pages, rows.pages, pool.used_pages) == (0, 12, 12)
    with pytest.raises(UnavailableError, match="is closed"):
        running.submit(request([1] * 9, 3))
    assert not running.step()


def test_other_requests_end_although_a_listener_fails() -> None:
    pool, running, rows = shared("lru")
    told: list[NextToken] = []

    def fails(token: NextToken) -> None:
        raise ValueError("no connection")

    generations = [running.submit(request([1] * 9, 3), each) for each in (told.append, fails, told.append)]
    with pytest.raises(ValueError, match="no connection"):
        running.run_until_idle()
    assert [each.ending for each in generations] == [Ending.FAILED] * 3
    assert [each.ending for each in told[-2:]] == [Ending.FAILED] * 2
    assert (running.pages, rows.pages, pool.used_pages) == (0, 12, 12)
