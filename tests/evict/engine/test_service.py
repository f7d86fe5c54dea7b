"""An engine with the folder of `gati evict serve`: predictors come from there; no service needs to run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gati.evict.engine.decoder import Decoder, DecoderSettings
from gati.evict.engine.engine import PrefixEngine, pool_for
from gati.evict.engine.generation import GenerationRequest
from gati.evict.engine.pages import KeptPrefixes
from gati.evict.learn.fitting import VersionFitter
from gati.evict.learn.folder import access_of
from gati.evict.learn.reading import AccessReader
from gati.evict.predict.reuse import ReuseSettings
from tests.evict.learn.streams import CAPACITY, hot_and_cold
from tests.waiting import until

PAGE_TOKENS = 4
SETTINGS = DecoderSettings(vocabulary=16, ends=(15,), layers=1, width=8, heads=2, key_heads=1, inner_width=8)


class Asked:
    """An engine that is asked for a stream, a request each second of its own clock."""

    def __init__(self, folder: Path) -> None:
        decoder = Decoder.random(SETTINGS, seed=0)
        pool = pool_for(decoder, 4096 * (CAPACITY + 1), PAGE_TOKENS)  # one is for the last token
        kept = KeptPrefixes("gati", service=str(folder))
        clock = lambda: float(self.count)  # noqa: E731
        self.engine = PrefixEngine(decoder, pool, kept, page_tokens=PAGE_TOKENS, clock=clock)
        self.count = 0

    def requests(self, count: int) -> int:
        """Pages found for so many requests."""
        hits = 0
        for ids in hot_and_cold(count, first=self.count):
            self.count += 1
            prompt = [token for block in ids for token in _tokens(block)]
            generation = self.engine.submit(GenerationRequest((*prompt, 0), 1))
            self.engine.run_until_idle()
            hits += generation.hit_tokens // PAGE_TOKENS
        return hits

    @property
    def taken(self) -> int:
        """Predictors that came from the service."""
        return int(self.engine.figures()["policy"]["models_taken"])


def _tokens(block: int) -> list[int]:
    return [(block >> shift) & 15 for shift in (12, 8, 4, 0)]


@pytest.mark.slow
def test_an_engine_takes_versions_and_goes_on_with_the_last_when_no_service_runs(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    assert asked.requests(800) == 0  # no service: LRU, which never hits here
    reader = AccessReader(access_of(tmp_path))
    fitter = VersionFitter(tmp_path, ReuseSettings(first_fit=600), trial_capacities=4.0)

    def fitted() -> bool:
        for record in reader.read():
            fitter.take(record)
        return fitter.version is not None

    until(fitted)
    until(lambda: bool(asked.requests(5) or asked.taken))
    asked.requests(100)
    assert asked.taken == 1 and asked.requests(100) > 100
    asked.engine.close()
