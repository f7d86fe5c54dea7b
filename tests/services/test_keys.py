"""API keys from a file: names, rights, quotas, reloading; and the audit log."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from gati.errors import ConfigError, OverloadError
from services.config import ServeConfig, validated
from services.scheduler.app import create_app
from services.scheduler.front import Front
from services.scheduler.keys import KeyRing
from services.scheduler.quotas import Quota
from services.scheduler.scheduler import Scheduler
from tests.waiting import Clock

FILE = f"""
[keys.camera]
key = "camera's key"
in_flight = 1
[keys.operator]
sha256 = "{hashlib.sha256(b"operator's key").hexdigest().upper()}"
rights = ["read", "manage"]
[keys.watcher]
key = "watcher's key"
rights = ["read"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "keys.toml"
    found.write_text(FILE, encoding="utf-8")
    return found


def test_rights_are_those_of_the_key(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler(ServeConfig(keys_file=file, api_key="everybody"), {}, {})

    async def main() -> None:
        transport = httpx.ASGITransport(Front(create_app(scheduler)))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:

            async def status(method: str, path: str, key: str) -> int:
                headers = {"X-API-Key": key} if key else {}
                return (await client.request(method, path, headers=headers)).status_code

            read, infer = ("GET", "/v2"), ("POST", "/v2/models/m/infer")
            manage = ("POST", "/v2/repository/models/m/unload")
            let_in = {
                "camera's key": (200, 404, 401),
                "operator's key": (200, 401, 404),
                "watcher's key": (200, 401, 401),
                "everybody": (200, 404, 404),
                "nobody's": (401, 401, 401),
                "": (401, 401, 401),
            }
            for key, expected in let_in.items():
                found = [await status(*each, key) for each in (read, infer, manage)]
                assert tuple(found) == expected, key
            for method in ("GET", "HEAD"):
                assert await status(method, "/v2/health/live", "") == 200

    with caplog.at_level(logging.INFO, "gati"):
        asyncio.run(main())
    lines = [record for record in caplog.records if record.name == "gati.audit"]
    told = [(line.__dict__["key"], line.__dict__["status"]) for line in lines]
    assert ("operator", 404) in told and ("", 401) in told and ("camera", 401) not in told
    requests = [record.__dict__ for record in caplog.records if record.name == "gati.access"]
    assert {"camera", "watcher", "operator", "api"} <= {line["key"] for line in requests}
    assert all(line["path"] in ("/v2", "/v2/models/m/infer") for line in requests)
    everything = str([vars(record) for record in caplog.records])
    assert not any(f"{name}'s key" in everything for name in ("camera", "operator", "watcher", "nobody"))


def test_who_has_used_up_a_quota_is_refused_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[keys.camera]\nkey = "one camera"\nrights = ["read"]\nrequests_per_second = 0.001\n')
    scheduler = Scheduler(ServeConfig(keys_file=file), {}, {})

    async def main() -> None:
        transport = httpx.ASGITransport(Front(create_app(scheduler)))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            found = [await client.get("/v2", headers={"X-API-Key": "one camera"}) for _ in range(4)]
        assert [each.status_code for each in found] == [200, 200, 429, 429]
        page = scheduler.metrics.render({}, {}, {}).decode()
        assert 'gati_rejected_total{model="",pipeline="",reason="quota"} 2.0' in page

    asyncio.run(main())


def test_the_log_can_be_sampled(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler(ServeConfig(log_sampling=0.0), {}, {})

    async def main() -> None:
        transport = httpx.ASGITransport(Front(create_app(scheduler)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.get("/v2")
            await client.post("/v2/repository/index")

    with caplog.at_level(logging.INFO, "gati"):
        asyncio.run(main())
    assert [record.name for record in caplog.records if record.name != "httpx"] == ["gati.audit"]


def test_keys_are_read_again_and_a_wrong_file_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = KeyRing(ServeConfig(keys_file=file))
    camera = ring.find("camera's key")
    assert camera is not None and ring.find("new key 1") is None and ring.find("") is None
    with camera.quota.request():
        file.write_text(FILE.replace("camera's key", "new key 1"), encoding="utf-8")
        ring.reload()
        renewed = ring.find("new key 1")
        assert renewed is not None and renewed.name == "camera" and ring.find("camera's key") is None
        with pytest.raises(OverloadError, match="1 requests in progress"), renewed.quota.request():
            raise AssertionError("its quota goes on")
    file.write_text("[keys", encoding="utf-8")
    ring.reload()
    assert ring.find("new key 1") is renewed
    assert "the keys stay as they were" in caplog.text
    twice = FILE.replace("camera's key", "watcher's key").replace("in_flight = 1", "in_flight = 2")
    file.write_text(twice, encoding="utf-8")  # the first key had its new quota when the second was refused
    ring.reload()
    with renewed.quota.request(), pytest.raises(OverloadError), renewed.quota.request():
        raise AssertionError("its quota stays as it was")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have a table"),
        ("[keys]", "must have a table"),
        ("x = 1\n[keys.a]\nkey='12345678'", "must have a table"),
        ("[keys.a]", "keys.a: give exactly one of `key` and `sha256`"),
        ("[keys.a]\nkey = 'short'", "keys.a.key: string should have at least 8"),
        ("[keys.a]\nkey = 'short   '", "keys.a.key: string should have at least 8"),
        ("[keys.a]\nkey = 'secret-word'\nsha256='0'", "keys.a.sha256: give 64 hexadecimal digits"),
        ("[keys.a]\nkey = 'secret-word'\nrights = ['all']", "keys.a.rights"),
        ("[keys.'a b']\nkey = 'secret-word'", "cannot be a name"),
        ("[keys.a]\nkey = 'secret-word'\n[keys.b]\nkey = 'secret-word'", "'b' has the same key as another"),
        ("[keys.a]\nkey = 'secret-word'\nrequests_per_second = 0", "greater than 0"),
    ],
)
def test_a_file_that_is_wrong_is_told_without_its_keys(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        KeyRing(ServeConfig(keys_file=file))
    assert message in str(refused.value) and "secret-word" not in str(refused.value)


def ask(quota: Quota, count: int = 0) -> bool:
    try:
        with quota.request():
            quota.sent(count)
    except OverloadError as error:
        assert error.retry_after_s is not None and error.retry_after_s > 0.0
        return False
    return True


@pytest.mark.parametrize("rate", [0.5, 3.0, 100.0])
def test_a_quota_lets_its_rate_through(rate: float) -> None:
    clock, quota = Clock(), None
    quota = Quota(clock)
    quota.limit(rate, None, None)
    let = 0
    for _ in range(4000):
        clock.now_s += 0.01
        let += ask(quota)
    assert 40 * rate <= let <= 41 * rate + 2
    clock.now_s += 1e6
    burst = sum(ask(quota) for _ in range(1000))
    assert burst <= rate + 1


def test_bytes_are_paid_for_afterwards() -> None:
    clock = Clock()
    quota = Quota(clock)
    quota.limit(None, 100.0, None)
    assert quota.counts_bytes and ask(quota, 1000) and not ask(quota)
    clock.now_s = 8.9
    assert not ask(quota)
    clock.now_s = 9.1
    assert ask(quota, 1)


def test_what_is_under_way_is_counted_and_given_back() -> None:
    quota = Quota()
    quota.limit(None, None, 2)
    with quota.request(), quota.request():
        assert not ask(quota)
    assert ask(quota) and not quota.counts_bytes
    quota.limit(None, None, None)
    assert all(ask(quota) for _ in range(10))


def test_a_file_with_a_byte_order_mark_is_read(file: Path) -> None:
    """Editors on Windows write one."""
    file.write_text(FILE, encoding="utf-8-sig")
    assert KeyRing(ServeConfig(keys_file=file)).find("camera's key") is not None


def test_keys_may_be_all_that_is_asked_for(file: Path) -> None:
    from services.scheduler.admission import check_exposure

    config: Any = ServeConfig(host="0.0.0.0", keys_file=file)
    check_exposure(config)
    assert KeyRing(config).asks


def test_one_key_for_clients_and_management_has_the_rights_of_both() -> None:
    """It could not manage, and the error asked for the management key that was set."""
    ring = KeyRing(ServeConfig(host="0.0.0.0", api_key="the same", management_key="the same"))
    key = ring.find("the same")
    assert key is not None and key.rights == {"infer", "read", "manage"}
    assert ring.manages


@pytest.mark.parametrize("kind", ["api_key", "management_key"])
def test_the_newline_after_a_secret_is_no_part_of_the_key(kind: str) -> None:
    """Kubernetes passes on that of the file that a secret was made from; no header could match the key."""
    config = ServeConfig.model_validate({kind: " one key\n"})
    assert getattr(config, kind) == "one key"
    assert KeyRing(config).find("one key") is not None


@pytest.mark.parametrize("key", ["", " \n", "sch\u00f6n", "two\nlines", "tab\there"])
def test_a_key_that_no_header_can_carry_is_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api_key: a key has printable ASCII characters") as refused:
        validated(ServeConfig, api_key=key)
    assert not key.strip() or key not in str(refused.value)
    file = tmp_path / "keys.toml"
    file.write_text(f"[keys.a]\nkey = {json.dumps('long enough' + key + 'x')}", encoding="utf-8")
    if key.strip():
        with pytest.raises(ConfigError, match=r"keys\.a\.key: a key has printable ASCII characters"):
            KeyRing(ServeConfig(keys_file=file))
