"""Operations on a running server: keys, certificates, signals. Real processes."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from services import serve
from services.scheduler.models import Model
from tests.services.certificates import RSA, certify
from tests.services.engines import served
from tests.services.running import Serving, request
from tests.waiting import LONG_S, in_the_end, until

KEY = "[keys.a]\nkey = '{}'\nrights = ['infer', 'read', 'manage']\n"


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A configuration with one model, which runs elsewhere: nothing has to be loaded."""
    found = tmp_path / "serve.toml"
    with served() as address:
        found.write_text(f'[models.m]\naddress = "{address}"\n', encoding="utf-8")
        yield found


INFER = "/v2/models/m/infer"
BODY = {"inputs": [{"name": "input", "shape": [1], "datatype": "FP32", "data": [1]}]}


@pytest.mark.slow
def test_keys_certificates_and_a_notice_before_it_goes(file: Path, tmp_path: Path) -> None:
    certificate, key = certify(tmp_path)
    keys = tmp_path / "keys.toml"
    keys.write_text(KEY.format("first key"), encoding="utf-8")
    options = ("--certificate", certificate, "--certificate-key", key, "--keys", keys)
    environment = {"GATI_SERVE_HEAD_TIMEOUT_S": "2"}
    with Serving(file, *map(str, options), "--drain", f"{LONG_S:g}s", environment=environment) as running:
        assert running.url.startswith("https://127.0.0.1:")
        address = urlsplit(running.url)
        with socket.create_connection((address.hostname, address.port)) as silent:
            silent.sendall(b"\x16\x03")  # begins to speak TLS, and says no more
            assert silent.recv(1) == b""
        trusting = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=running.url, verify=trusting, timeout=LONG_S) as client:

            def status(key: str, path: str = INFER) -> int:
                return client.post(path, json=BODY, headers={"X-API-Key": key}).status_code

            assert (status("first key"), status("other key")) == (200, 401)
            keys.write_text(KEY.format("other key"), encoding="utf-8")
            running.process.send_signal(signal.SIGHUP)
            until(lambda: status("other key") == 200)
            assert status("first key") == 401

            def shown() -> bytes:
                return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((address.hostname, address.port)))

            before, own = shown(), certificate.read_text(encoding="ascii")
            certificate.write_text("not a certificate", encoding="ascii")
            running.process.send_signal(signal.SIGHUP)
            until(lambda: any("invalid certificate" in line for line in running.said))
            assert shown() == before == ssl.PEM_cert_to_DER_cert(own)
            certify(tmp_path, kind=RSA)  # the same files; OpenSSL would prefer the old key, had it both
            running.process.send_signal(signal.SIGHUP)
            until(lambda: shown() == ssl.PEM_cert_to_DER_cert(certificate.read_text(encoding="ascii")))
        trusting = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=running.url, verify=trusting, timeout=LONG_S) as client:
            running.process.send_signal(signal.SIGTERM)
            until(lambda: client.get("/v2/health/ready").status_code == 503)
            assert client.get("/v2/health/ready").headers["Connection"] == "close"
            assert status("other key") == 200
        assert running.stop() == 0  # told twice, it goes now
    lines = [line for line in running.said if '"message": "http"' in line]
    assert any('"key": "a"' in line for line in lines)
    assert not any("first key" in line for line in running.said)


def test_who_starts_a_server_is_told_for_which_model_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where nothing answered at an `address`, it said nothing at all."""
    monkeypatch.setattr(serve, "_SAY_AGAIN_S", 0.001)
    caplog.set_level("INFO")

    def is_told(model: str, reason: str) -> bool:
        said = [vars(each) for each in caplog.records if each.message == "still waiting"]
        return any(each["model"] == model and each["reason"] == reason for each in said)

    async def main() -> None:
        model = Model("cars", address="127.0.0.1:1")
        await model.start()
        waiting = asyncio.create_task(serve._first_ready(model))
        await in_the_end(lambda: is_told("cars", "nothing answers at 127.0.0.1:1"))
        await model.stop(0.0)
        await waiting

    asyncio.run(main())


@pytest.mark.slow
def test_hostile_requests_cost_little_memory(file: Path) -> None:
    """Each of them took gigabytes, or hours, and kept everybody waiting."""
    with Serving(file) as running:
        assert running.client.post(INFER, json=BODY).status_code == 200
        before = _largest_bytes(running)
        head = b'{"inputs":[{"name":"input","datatype":"FP32","shape":['
        bodies = [
            (head + b"9," * 30_000_000 + b"9]}]}", {}, 413),
            (head + b"9," * 300_000 + b"9]}]}", {}, 400),
            (b"[" + b"[]," * 20_000_000 + b"[]]", {}, 413),
            (b"[" * 60_000_000, {}, 413),
            (gzip.compress(b" " * (65 * 2**20), 1), {"Content-Encoding": "gzip"}, 413),
        ]
        for body, headers, expected in bodies:
            reply = running.client.post(INFER, content=body, headers=headers)
            assert reply.status_code == expected, reply.text
        assert _largest_bytes(running) - before < 400 * 2**20
        assert running.client.post(INFER, json=BODY).status_code == 200


def _largest_bytes(running: Serving) -> int:
    """The most memory that the server has held so far."""
    status = Path(f"/proc/{running.process.pid}/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


@pytest.mark.slow
def test_what_the_unit_says_is_run_and_the_containers_check_sees_it_go(file: Path, repository: Path) -> None:
    unit = (repository / "examples" / "deploy" / "gati.service").read_text(encoding="utf-8")
    container = (repository / "examples" / "deploy" / "Containerfile").read_text(encoding="utf-8")
    options = _said(unit, r"^ExecStart=\S+/gati serve \S+ (.+)$").split()
    reloading = _said(unit, r"^ExecReload=(.+)$").split()
    checking = json.loads(_said(container, r"^HEALTHCHECK [^\[]+(\[.+\])$"))
    with Serving(file, *options, environment={"GATI_SERVE_API_KEY": "a key"}) as running:
        port, pid = str(urlsplit(running.url).port), str(running.process.pid)

        def status(**headers: str) -> int:
            return running.client.post(INFER, json=BODY, headers=headers).status_code

        def healthy() -> bool:
            command = [sys.executable, *(word.replace("8000", port) for word in checking[1:])]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        subprocess.run([word.replace("$MAINPID", pid) for word in reloading], check=True)
        assert healthy()
        assert (status(), status(**{"X-API-Key": "a key"})) == (401, 200)
        running.process.send_signal(signal.SIGTERM)
        until(lambda: not healthy())
        assert running.stop() == 0


def _said(text: str, pattern: str) -> str:
    (found,) = re.findall(pattern, text, re.MULTILINE)
    return str(found)


@pytest.mark.slow
def test_nothing_is_offered_to_others_without_a_key(file: Path, repository: Path) -> None:
    command = [sys.executable, "-m", "gati", "serve", str(file), "--host", "0.0.0.0"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=repository, check=False, timeout=LONG_S
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: without a key only this machine has access")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_process_that_hangs_is_replaced_and_a_signal_for_all_is_for_the_server(folder: Path) -> None:
    options = ("--drain", f"{LONG_S:g}s", "--composition", "other")
    with Serving(folder / "library", *options, environment={"GATI_SERVE_HANG_TIMEOUT_S": "4"}) as running:
        hung = running.processes()["library"]
        os.kill(hung, signal.SIGSTOP)
        until(lambda: running.client.get("/v2/health/ready").status_code == 503, every_s=0.05)
        until(lambda: running.processes().get("library", hung) != hung, every_s=0.2)
        running.wait_until_ready()
        assert running.infer("library").status_code == 200
        assert any("model is replaced" in line for line in running.said)
        (child,) = running.processes().values()
        os.kill(child, signal.SIGTERM)  # as systemd does; it is not to go before its server
        running.process.send_signal(signal.SIGTERM)
        until(lambda: running.client.get("/v2/health/ready").status_code == 503)
        reply = running.client.post("/v2/models/library/infer", json=request())
        assert (reply.status_code, reply.json()["model_version"]) == (200, "other")
        assert list(running.processes().values()) == [child]
        assert running.stop() == 0
    assert sum("process died" in line for line in running.said) == 1
