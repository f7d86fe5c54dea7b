"""Access control: cross-origin pages, foreign hosts, form content; and listening on public addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from gati.errors import ConfigError, ForbiddenError, MediaTypeError, NotAllowedError
from services.config import ServeConfig
from services.scheduler.admission import admit as admit_with
from services.scheduler.admission import check_exposure
from services.scheduler.keys import KeyRing
from services.serve import serve
from tests.services.running import Serving, request

INFER = "/v2/models/m/infer"
LOAD = "/v2/repository/models/m/load"


def asked(path: str = INFER, method: str = "POST", **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": method, "path": path, "headers": raw})


def admit(request: Request, config: ServeConfig) -> None:
    admit_with(request, config, KeyRing(config))


OPEN = ServeConfig()
KEYED = ServeConfig(api_key="one", management_key="two")


@pytest.mark.parametrize(
    "headers",
    [
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"origin": "https://elsewhere.example", "host": "127.0.0.1:8000"},
        {"origin": "http://127.0.0.1:8001", "host": "127.0.0.1:8000"},
        {"origin": "null", "host": "127.0.0.1:8000"},
        {"origin": "http://[", "host": "127.0.0.1:8000"},
    ],
)
@pytest.mark.parametrize("path", [INFER, LOAD, "/v1/pipelines/p/query"])
def test_pages_of_other_sites_make_nobody_do_anything(headers: dict[str, str], path: str) -> None:
    for config, key in ((OPEN, ""), (KEYED, "two" if path == LOAD else "one")):
        with pytest.raises(ForbiddenError, match="a page of another site"):
            admit(asked(path, x_api_key=key, **headers), config)
    admit(asked("/v2", "GET", **headers), OPEN)  # of which they are not shown the answer


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "localhost:8000"},
        {"host": "LOCALHOST."},
        {"host": "[::1]:8000"},
        {"host": "127.8.0.1"},
        {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"},
        {"host": "127.0.0.1:8000", "sec_fetch_site": "same-origin", "origin": "https://proxy.example"},
        {"sec_fetch_site": "none"},
    ],
)
def test_programs_and_our_own_pages_pass(headers: dict[str, str]) -> None:
    admit(asked(**headers), OPEN)
    admit(asked("/docs", "GET", **headers), OPEN)


@pytest.mark.parametrize("host", ["rebound.example", "localhost.example:8000", "10.0.0.1", "", "[", "a b"])
def test_foreign_names_are_refused_where_no_key_is_asked_for(host: str) -> None:
    for method in ("GET", "POST"):
        with pytest.raises(ForbiddenError, match="host name .* is not allowed"):
            admit(asked("/v2", method, host=host), OPEN)
    admit(asked(host=host, x_api_key="one"), KEYED)


def test_names_can_be_allowed() -> None:
    config = ServeConfig(hosts=("models.example", "::2"))
    for host in ("models.example", "Models.Example:80", "[::2]:1", "127.0.0.1"):
        admit(asked(host=host), config)
    keyed = ServeConfig(api_key="one", hosts=("models.example",))
    with pytest.raises(ForbiddenError):
        admit(asked(host="other.example", x_api_key="one"), keyed)


def test_probes_and_prometheus_may_name_a_server_with_keys_by_its_address() -> None:
    """A pod whose `hosts` named the public name was never ready: the probe of its node got 403."""
    keyed = ServeConfig(host="0.0.0.0", api_key="one", hosts=("models.example",))
    for path in ("/v2/health/ready", "/v2/health/live", "/metrics"):
        admit(asked(path, "GET", host="10.0.0.1:8000"), keyed)
        with pytest.raises(ForbiddenError):
            admit(asked(path, "GET", host="10.0.0.1:8000"), OPEN)
    with pytest.raises(ForbiddenError):
        admit(asked(host="10.0.0.1:8000", x_api_key="one"), keyed)


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded"])
def test_management_takes_no_content_that_a_form_can_send(kind: str) -> None:
    with pytest.raises(MediaTypeError):
        admit(asked(LOAD, content_type=kind), OPEN)
    admit(asked(content_type=kind), OPEN)


def test_management_from_a_browser_says_that_it_is_json() -> None:
    own: dict[str, Any] = {"host": "127.0.0.1", "origin": "http://127.0.0.1"}
    with pytest.raises(MediaTypeError):
        admit(asked(LOAD, **own), OPEN)
    admit(asked(LOAD, content_type="application/json; charset=utf-8", **own), OPEN)
    admit(asked(LOAD), OPEN)  # a program


def test_keys_come_before_what_content_is() -> None:
    with pytest.raises(NotAllowedError):
        admit(asked(LOAD, content_type="text/plain", x_api_key="one"), KEYED)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "models.example"])
def test_without_keys_others_cannot_reach_it(host: str) -> None:
    for config in (ServeConfig(host=host), ServeConfig(host=host, management_key="two")):
        with pytest.raises(ConfigError, match=f"without a key .*{host}"):
            serve(config, print)
    check_exposure(ServeConfig(host=host, api_key="one"))
    for loopback in ("127.0.0.1", "::1", "localhost"):
        check_exposure(ServeConfig(host=loopback))


def test_where_others_can_reach_it_only_a_key_with_the_right_manages(tmp_path: Path) -> None:
    """The one key for all stopped models from anywhere."""
    keys = tmp_path / "keys.toml"
    keys.write_text("[keys.camera]\nkey = 'key of a camera'\n", encoding="utf-8")
    outside: Any = {"host": "0.0.0.0"}
    for config, key in (
        (ServeConfig(**outside, api_key="one"), "one"),
        (ServeConfig(**outside, keys_file=keys), "key of a camera"),
        (ServeConfig(**outside, api_key="one", keys_file=keys), "one"),
        (ServeConfig(keys_file=keys), "key of a camera"),
    ):
        admit(asked(x_api_key=key), config)
        for path in (LOAD, "/v2/repository/index"):
            with pytest.raises(
                NotAllowedError, match="no key of this server may manage; set GATI_SERVE_MANA"
            ):
                admit(asked(path, x_api_key=key), config)
    admit(asked(LOAD, x_api_key="one"), ServeConfig(api_key="one"))  # nobody else can ask
    admit(asked(LOAD, x_api_key="two"), ServeConfig(**outside, api_key="one", management_key="two"))
    keys.write_text(keys.read_text() + "rights = ['manage']\n", encoding="utf-8")
    for config in (
        ServeConfig(**outside, keys_file=keys),
        ServeConfig(**outside, api_key="one", keys_file=keys),
    ):
        admit(asked(LOAD, x_api_key="key of a camera"), config)
    with pytest.raises(NotAllowedError, match="the key 'api' may not manage; send another"):
        admit(asked(LOAD, x_api_key="one"), config)


@pytest.mark.slow
def test_a_page_of_another_site_stops_no_model(serving: Serving, folder: Path) -> None:
    unload = "/v2/repository/models/small/unload"
    elsewhere = {"Origin": "https://elsewhere.example", "Content-Type": "text/plain"}
    assert serving.client.post(unload, content=b"", headers=elsewhere).status_code == 403
    assert serving.client.post(unload, content=b"", headers={"Content-Type": "text/plain"}).status_code == 415
    foreign = serving.client.get("/v2/models/small", headers={"Host": "rebound.example"})
    assert (foreign.status_code, list(foreign.json())) == (403, ["error"])
    assert serving.client.post("/v2/models/small/infer", json=request()).status_code == 200
    assert (
        'gati_rejected_total{model="",pipeline="",reason="forbidden"}' in serving.client.get("/metrics").text
    )
