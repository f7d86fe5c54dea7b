"""`gati evict serve` as a separate process: it trains for an engine, which works without it."""

from __future__ import annotations

import errno
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gati.cli import run
from gati.errors import RequestError, UnavailableError
from gati.evict import ContinuationClient, PrefixCache
from gati.evict.train import train_continuation
from services.eviction import __main__ as fitter
from services.eviction import server
from tests.evict.learn.streams import CAPACITY, hot_and_cold
from tests.evict.talking import talks
from tests.services.running import Serving
from tests.waiting import LONG_S, until

OPTIONS = ("--first-fit", "600", "--trial", "4", "--look-every", "100ms", "--log-level", "warning")


class Engine:
    """A cache that is asked for a stream, a request each second of its own clock."""

    def __init__(self, folder: Path) -> None:
        self.cache = PrefixCache(CAPACITY, service=folder, clock=lambda: float(self.count))
        self.count = 0

    def requests(self, count: int) -> int:
        """Hits of so many requests."""
        hits = 0
        for ids in hot_and_cold(count, first=self.count):
            self.count += 1
            match = self.cache.match(ids)
            self.cache.insert(match)
            self.cache.release(match)
            hits += match.hits
        return hits

    @property
    def version(self) -> int:
        return int(self.cache.figures()["version"] or 0)


@pytest.mark.slow
def test_an_engine_learns_from_the_service_whichever_is_killed_and_goes_on_without(tmp_path: Path) -> None:
    """Of several services on a folder one fits until it ends: both published versions, each compared with
    its own last one only, and overwrote one status."""
    folder = tmp_path / "learned"
    engine = Engine(folder)
    assert engine.requests(800) == 0  # no service yet: LRU, which never hits here
    with Serving(folder, *OPTIONS, verb=("evict", "serve")) as first:
        until(lambda: engine.version == 1)
        engine.requests(100)
        assert engine.requests(100) > 100
        until(lambda: first.client.get("/v1/eviction").json().get("records") == engine.count)
        told = first.client.get("/v1/eviction").json()
        assert (told["version"], told["adopted"], told["damaged"]) == (1, 1, 0)
        page = first.client.get("/metrics").text
        assert f"gati_evict_requested_total {4.0 * engine.count}" in page
        assert "gati_evict_guard_excess -" in page
        with Serving(folder, *OPTIONS, verb=("evict", "serve")) as second:
            until(lambda: "another service fits predictors in this folder" in "".join(second.said))
            os.kill(first.process.pid, signal.SIGKILL)
            first.process.wait()
            assert engine.requests(100) > 100 and engine.version == 1
            # the second one reads all of the logs
            until(lambda: second.client.get("/v1/eviction").json().get("records") == engine.count)
            assert second.client.get("/v1/eviction").json()["version"] >= 1
            with Serving(folder, *OPTIONS, verb=("evict", "serve")) as third:
                until(lambda: "this one waits until it ends" in "".join(third.said))
                assert third.stop() == 0
            assert engine.requests(100) > 100
            assert second.stop() == 0
    another = Engine(folder)
    until(lambda: another.version >= 1)  # with no service
    assert another.requests(200) > 100
    another.cache.close()
    engine.cache.close()


@pytest.mark.slow
def test_clients_are_told_how_likely_conversations_go_on(tmp_path: Path) -> None:
    model = tmp_path / "model"
    train_continuation(talks(200), model)
    keys = {"GATI_SERVE_API_KEY": "a key for all"}
    options = ("--continuation", str(model), *OPTIONS)
    with Serving(tmp_path / "learned", *options, verb=("evict", "serve"), environment=keys) as service:
        with ContinuationClient(service.url, api_key="a key for all", timeout_s=LONG_S) as client:
            bye = [{"role": "user", "content": "no, that is all"}]
            wish = [{"role": "user", "content": "find me a table 7"}]
            assert client.probability(bye) < 0.5 < client.probability(wish)
            assert client.probabilities([bye, wish]) == [client.probability(bye), client.probability(wish)]
            with pytest.raises(RequestError, match="has no message of a user.*status 422"):
                client.probability([])
        with (
            ContinuationClient(service.url, timeout_s=LONG_S) as stranger,
            pytest.raises(RequestError, match="status 401"),
        ):
            stranger.probability(bye)
    with (
        ContinuationClient(service.url) as client,
        pytest.raises(UnavailableError, match="no eviction service"),
    ):
        client.probability(bye)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param(["--continuation", "nowhere"], "nowhere has no continuation.json", id="no model"),
        pytest.param(
            ["--host", "0.0.0.0"], "without a key only this machine has access", id="open to others"
        ),
        pytest.param(["--first-fit", "0"], "first_fit: ", id="setting"),
        pytest.param(["--log-limit", "many"], "many", id="size"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert run(["evict", "serve", str(tmp_path), "--port", "0", *options]) == 2
    said = capsys.readouterr().err
    assert says in said and said.startswith("error: ") and len(said.splitlines()) == 1


def test_where_the_file_system_has_no_locks_it_fits_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended at every start."""

    def refused(file: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refused)
    with caplog.at_level(logging.WARNING):
        fitter._alone(tmp_path / "cache").close()
    [record] = caplog.records
    assert vars(record)["reason"] == f"cannot lock {tmp_path / 'cache' / 'lock'} (No locks available)"


def test_threads_of_an_encoder_sleep_while_they_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two busy cores, a prediction took 0.7 s instead of 0.03."""
    found = []
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(server, "serve_eviction", lambda *_: found.append(os.environ["OMP_WAIT_POLICY"]))
    assert run(["evict", "serve", str(tmp_path)]) == 0
    assert found == ["passive"] and "OMP_WAIT_POLICY" not in os.environ
