"""Fuzzing: schemathesis over the OpenAPI document, malformed requests and frames."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings

from tests.services.fuzzing import frame_case, fuzz_frames, fuzz_http, http_case
from tests.services.running import Serving, make_folder
from tests.waiting import LONG_S

pytestmark = pytest.mark.slow

CASES = 250  # `python -m benchmarks.fuzz` sends more

CAREFUL = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Path]]:
    """A server, and the folder of its temporary files."""
    folder = make_folder(tmp_path_factory.mktemp("fuzz"))
    with tempfile.TemporaryDirectory(prefix="gati-fuzz-") as short:  # a socket's path must be short
        with Serving(folder / "serve.toml", environment={"TMPDIR": short}) as running:
            yield running, Path(short)
        assert not [line for line in running.said if "Traceback" in line]


def test_no_case_of_schemathesis_is_the_servers_fault(attacked: tuple[Serving, Path]) -> None:
    import schemathesis  # takes seconds, and every process of the tests collects this file

    running, _ = attacked
    with requests.Session() as session:
        session.trust_env = False  # to look for proxies takes longer than a request
        schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
        cases = 0
        for result in schema.get_all_operations():
            operation = result.ok()

            def check(case: Any) -> None:
                nonlocal cases
                cases += 1
                reply = case.call(session=session, timeout=LONG_S)
                assert reply.status_code < 500, f"{case.method} {case.path}: {reply.status_code} {reply.text}"

            CAREFUL(given(case=operation.as_strategy())(check))()
        assert cases >= 350
        running.wait_until_ready()
        assert running.infer().status_code == 200


def test_bent_requests_and_frames_leave_the_server_answering(attacked: tuple[Serving, Path]) -> None:
    """No status blames the server, no connection hangs, no process ends, and no mistake is logged."""
    running, folder = attacked
    for model in ("small", "other"):  # the test before this one may have unloaded them
        assert running.client.post(f"/v2/repository/models/{model}/load", json={}).status_code == 200
    processes = running.processes()
    address = urlsplit(running.url)
    assert address.hostname is not None and address.port is not None
    statuses = fuzz_http((address.hostname, address.port), CASES)
    assert {200, 400} <= statuses.keys() and statuses[200] < CASES, statuses
    (socket, *_) = folder.glob("gati-socket-*/s")
    outcomes = fuzz_frames(socket, CASES)
    assert {"health answered", "infer refused", "hung up"} <= outcomes.keys(), outcomes
    assert running.infer("small").status_code == running.infer("other").status_code == 200
    assert running.processes() == processes


def test_the_same_seed_makes_the_same_cases() -> None:
    for seed in range(50):
        assert http_case(seed) == http_case(seed) and frame_case(seed) == frame_case(seed)
    assert len({http_case(seed) for seed in range(200)}) > 150
