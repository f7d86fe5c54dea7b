"""What an operator does to a running server: keys, certificates, signals. Real processes."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.services.certificates import certify
from tests.services.running import Serving, request
from tests.waiting import LONG_S, until

pytestmark = pytest.mark.slow

KEY = "[keys.a]\nkey = '{}'\nrights = ['infer', 'read', 'manage']\n"


def test_keys_certificates_and_a_notice_before_it_goes(folder: Path, tmp_path: Path) -> None:
    certificate, key = certify(tmp_path)
    keys = tmp_path / "keys.toml"
    keys.write_text(KEY.format("first key"), encoding="utf-8")
    options = ("--certificate", certificate, "--certificate-key", key, "--keys", keys)
    with Serving(
        folder / "library",
        *map(str, options),
        *("--drain", f"{LONG_S:g}s", "--composition", "other"),
        environment={"GATI_SERVE_HEAD_TIMEOUT_S": "2"},
    ) as running:
        assert running.url.startswith("https://127.0.0.1:")
        address = urlsplit(running.url)
        with socket.create_connection((address.hostname, address.port)) as silent:
            silent.sendall(b"\x16\x03")  # begins to speak TLS, and says no more
            assert silent.recv(1) == b""
        trusting = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=running.url, verify=trusting, timeout=LONG_S) as client:

            def status(key: str, path: str = "/v2/models/library/infer") -> int:
                return client.post(path, json=request(), headers={"X-API-Key": key}).status_code

            assert (status("first key"), status("other key")) == (200, 401)
            keys.write_text(KEY.format("other key"), encoding="utf-8")
            running.process.send_signal(signal.SIGHUP)
            until(lambda: status("other key") == 200)
            assert status("first key") == 401
            children = list(running.processes().values())
            for child in children:
                os.kill(child, signal.SIGTERM)  # as systemd does; they are not to go before their server
            running.process.send_signal(signal.SIGTERM)
            until(lambda: client.get("/v2/health/ready").status_code == 503)
            reply = client.post(
                "/v2/models/library/infer", json=request(), headers={"X-API-Key": "other key"}
            )
            assert (reply.status_code, reply.json()["model_version"]) == (200, "other")
            assert list(running.processes().values()) == children
        assert running.stop() == 0  # told twice, it goes now
    assert not any("process died" in line for line in running.said)
    lines = [line for line in running.said if '"message": "http"' in line]
    assert any('"key": "a"' in line for line in lines)
    assert not any("first key" in line for line in running.said)


def test_nothing_is_offered_to_others_without_a_key(folder: Path, repository: Path) -> None:
    command = [sys.executable, "-m", "gati", "serve", str(folder / "library"), "--host", "0.0.0.0"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=repository, check=False, timeout=LONG_S
    )
    assert done.returncode == 2 and done.stderr.startswith("error: without a key only this machine may ask")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_process_that_hangs_is_replaced(folder: Path) -> None:
    file = folder / "hanging.toml"
    text = "hang_timeout_s = 4\n[models.small]\nlibrary = 'library'\nthreads = 1\n"
    file.write_text(text, encoding="utf-8")
    with Serving(file) as running:
        hung = running.processes()["small"]
        os.kill(hung, signal.SIGSTOP)
        until(lambda: running.client.get("/v2/health/ready").status_code == 503, every_s=0.05)
        until(lambda: running.processes().get("small", hung) != hung, every_s=0.2)
        running.wait_until_ready()
        assert running.infer("small").status_code == 200
        assert any("model hangs" in line for line in running.said)
