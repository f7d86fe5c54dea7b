"""Processes that die, drain, swap and are overloaded; real ones, under load."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.running import Serving, make_folder, request
from tests.waiting import LONG_S, until

pytestmark = pytest.mark.slow


class Load:
    """Clients that ask again and again; every reply is counted, and nothing may hang."""

    def __init__(self, url: str, path: str, clients: int, *, body: Any = None, pause_s: float = 0.0) -> None:
        self.statuses: Counter[int] = Counter()
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._body = body or request()
        self._pause_s = pause_s
        self._threads = [threading.Thread(target=self._ask, args=(url + path,)) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * LONG_S)
            assert not thread.is_alive(), "a request hangs"

    def _ask(self, url: str) -> None:
        with httpx.Client(timeout=LONG_S) as client:
            while not self._stop.is_set():
                try:
                    reply = client.post(url, json=self._body)
                except httpx.HTTPError as error:
                    self.errors.append(repr(error))
                    continue
                self.statuses[reply.status_code] += 1
                time.sleep(self._pause_s)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Starting it takes seconds, so it goes through one thing after the other; the last test ends it."""
    with Serving(make_folder(tmp_path_factory.mktemp("lifecycle")) / "serve.toml") as found:
        yield found


def test_a_killed_process_comes_back_and_the_others_do_not_notice(running: Serving) -> None:
    small, other = "/v2/models/small/infer", "/v2/models/other/infer"
    with (
        Load(running.url, small, 2, pause_s=0.02) as hit,
        Load(running.url, other, 2, pause_s=0.02) as spared,
    ):
        until(lambda: hit.statuses[200] > 20 and spared.statuses[200] > 20)
        victim = running.processes()["small"]
        os.kill(victim, signal.SIGKILL)
        until(lambda: hit.statuses[503] > 0)
        reply = running.infer("small")
        if reply.status_code == 503:
            assert "Retry-After" in reply.headers and "small" in reply.json()["error"]
        before = hit.statuses[200]
        until(lambda: hit.statuses[200] > before + 20)
    assert set(hit.statuses) <= {200, 503} and set(spared.statuses) == {200}
    assert not hit.errors and not spared.errors
    assert running.processes()["small"] != victim
    assert 'gati_restarts_total{model="small"} 1.0' in running.client.get("/metrics").text


def test_a_model_that_can_never_load_ends_the_server_and_says_why(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        f'[models.good]\nlibrary = "{folder}/library"\n[models.bad]\nlibrary = "{folder}/library"\n'
        'composition = "missing"\n',
        encoding="utf-8",
    )
    running = Serving(file)
    assert running.process.wait(LONG_S) == 2
    running.stop()
    said = [line for line in running.said if line.startswith("error: model 'bad' cannot be served: ")]
    assert len(said) == 1 and "no composition 'missing'" in said[0]
    assert sum("process died" in line for line in running.said) == 1


def test_a_hundred_swaps_under_load_lose_nothing_and_keep_the_memory(running: Serving) -> None:
    url = "/v2/repository/models/small/load"

    def resident_bytes() -> float:
        page = running.client.get("/metrics").text
        found = re.search(r'^gati_resident_bytes\{model="small"\} (\S+)', page, re.MULTILINE)
        assert found is not None
        return float(found[1])

    with Load(running.url, "/v2/models/small/infer", 2, pause_s=0.005) as load:
        settled = 0.0
        for number in range(130):
            if number == 30:  # allocators keep some of what the first ones gave back
                settled = resident_bytes()
            name = ("default", "other")[number % 2]
            reply = running.client.post(url, json={"parameters": {"composition": name}})
            assert reply.status_code == 200, reply.text
            until(lambda answered=load.statuses[200]: load.statuses[200] > answered)  # type: ignore[misc]
        grown = resident_bytes() / settled - 1.0
    assert set(load.statuses) == {200} and not load.errors
    assert grown < 0.025, f"memory grew by {grown:.1%} over 100 swaps"


def test_overload_is_refused_and_what_is_accepted_is_in_time(running: Serving) -> None:
    """Sixteen clients on a queue of sixteen: some are refused, nobody waits long; then it is over."""
    slo_ms = 500.0
    running.infer()
    body = request(8, latency_slo_ms=slo_ms)
    with Load(running.url, "/v2/models/small/infer", 16, body=body) as load:
        until(lambda: load.statuses[200] > 300 and load.statuses[429] > 100)
    # Who is kept off the cores by other programs for four times the SLO may be given up: two seconds.
    late = load.statuses.pop(504, 0)
    assert late <= 0.01 * sum(load.statuses.values())
    assert set(load.statuses) <= {200, 429}, load.statuses
    assert load.statuses[200] > 50 and load.statuses[429] > 10, load.statuses
    until(lambda: all(running.infer(latency_slo_ms=slo_ms).status_code == 200 for _ in range(20)))


def test_a_full_stage_of_a_pipeline_hangs_nobody(running: Serving) -> None:
    """Whichever stage is full, its queries are refused or answered; none waits for ever."""
    burst = request(16)
    with (
        Load(running.url, "/v2/models/small/infer", 8, body=burst),
        Load(running.url, "/v2/models/other/infer", 8, body=burst),
        Load(running.url, "/v1/pipelines/sides/query", 4) as queries,
    ):
        until(lambda: queries.statuses.total() >= 40)
    assert set(queries.statuses) <= {200, 429, 503, 504} and not queries.errors

    def answered() -> bool:
        return running.client.post("/v1/pipelines/sides/query", json=request()).status_code == 200

    until(answered)


def test_sigterm_answers_what_is_under_way_and_leaves_no_process(running: Serving) -> None:
    with Load(running.url, "/v2/models/small/infer", 4, body=request(8)) as load:
        until(lambda: load.statuses[200] > 20)
        children = list(running.processes().values())
        assert len(children) == 2
        assert running.stop() == 0
    assert set(load.statuses) <= {200, 429, 503}
    cut = [error for error in load.errors if "ConnectError" not in error]
    assert not cut, cut[:3]
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
