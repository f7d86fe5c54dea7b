"""How servers end: what signals do, and in which order a server lets its clients go."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gati.errors import ConfigError, UnavailableError
from services import process
from services.config import read_config
from services.inference.settings import InferenceSettings
from services.listening import listen, renew_certificate
from services.process import USAGE, ProcessSettings, ended, on_signals
from services.web import answering
from services.wire.client import connect_to
from services.wire.codec import Service
from services.wire.gen import Inference
from services.wire.handshake import client_tls, read_secret
from tests.conftest import REPOSITORY
from tests.services.certificates import certify
from tests.test_architecture import MODULES, name_of
from tests.waiting import LONG_S


class FakeServer:
    """Tells what happens to it, in order."""

    should_exit = False

    def __init__(self) -> None:
        self.events: list[str] = []
        self.servers = [self]

    def close(self) -> None:
        self.events.append("closed to new connections")

    async def serve(self, sockets: list[socket.socket]) -> None:
        self.events.append("serves")
        while not self.should_exit:
            await asyncio.sleep(0)
        self.events.append("ended")


def served(server: Any, fails: bool = False) -> None:
    async def drain() -> None:
        server.events.append("drained")

    async def main() -> None:
        with socket.socket() as listening:
            async with answering(server, listening, drain) as running:
                await asyncio.sleep(0)
                assert not running.done()
                server.events.append("asked to end")
                if fails:
                    raise OSError("the terminal is gone")

    asyncio.run(main())


def test_a_server_drains_between_its_last_new_connection_and_its_end() -> None:
    server = FakeServer()
    served(server)
    assert server.events == ["serves", "asked to end", "closed to new connections", "drained", "ended"]


def test_an_error_of_the_block_is_raised_at_once() -> None:
    server = FakeServer()
    with pytest.raises(OSError, match="the terminal is gone"):
        served(server, fails=True)
    assert server.events == ["serves", "asked to end"]


def test_each_signal_is_a_call_in_the_event_loop() -> None:
    told: list[str] = []

    async def main() -> None:
        on_signals(lambda: told.append("end"), reload=lambda: told.append("reload"))
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), each)
            count = len(told)
            async with asyncio.timeout(10):
                while len(told) == count:
                    await asyncio.sleep(0.001)

    asyncio.run(main())
    assert told == ["end", "end", "reload"]


IN_TERMINAL = """
import asyncio, fcntl, sys, termios
from services.process import on_signals

async def main() -> None:
    ended = asyncio.Event()
    if sys.argv[1] == "foreground":
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    on_signals(lambda: ended.set() or print("end", flush=True), reload=lambda: print("reload", flush=True))
    print("ready", flush=True)
    await ended.wait()

asyncio.run(main())
"""


@pytest.mark.parametrize(("place", "then"), [("foreground", "end"), ("elsewhere", "reload")])
def test_who_runs_in_a_terminal_ends_when_that_is_closed(place: str, then: str) -> None:
    """It went on without one, and kept its port; who was started there but is detached must not end."""
    terminal, stdin = os.openpty()
    program = [sys.executable, "-c", IN_TERMINAL, place]
    with subprocess.Popen(
        program, stdin=stdin, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, start_new_session=True
    ) as process:
        assert process.stdout is not None
        said = iter(process.stdout)
        os.close(stdin)
        try:
            assert next(said) == "ready\n"
            process.send_signal(signal.SIGHUP)
            assert next(said) == "reload\n"
            os.close(terminal)
            if place == "elsewhere":  # otherwise the system sends it
                process.send_signal(signal.SIGHUP)
            assert next(said) == f"{then}\n"
        finally:  # else a test that fails would wait for it
            process.kill()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            '{"name": "cars", "libary": "runs"}',
            "setting 'libary': there is no such setting; did you mean 'library'?",
        ),
        ('{"name": "cars", "records": 3, "port": 8}', "setting 'records': input should be a valid string"),
        ('{"library": "runs"}', "setting 'name': field required"),
        ("postgresql://me:secret@host", "give the settings as JSON (invalid JSON: "),
        ("", "give the settings as JSON (invalid JSON: "),
    ],
)
def test_settings_that_are_wrong_are_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str, why: str
) -> None:
    async def serve(settings: Any) -> None:
        raise AssertionError("it must not start")

    monkeypatch.setattr(sys, "argv", ["x", given] if given else ["x"])
    assert process.run(InferenceSettings, lambda settings: "x", serve) == process.USAGE
    said = capsys.readouterr().err
    assert said.startswith(f"error: {why}") and said.count("\n") == 1 and "secret" not in said


@pytest.mark.parametrize("with_stdin", [False, True])
def test_a_service_reloads_at_a_hangup_and_does_not_end(
    monkeypatch: pytest.MonkeyPatch, with_stdin: bool
) -> None:
    """It was killed, with its requests, also when the signal was for the server that had started it."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)

        async def main() -> None:
            told = asyncio.Event()
            ending = asyncio.create_task(ended(with_stdin=with_stdin, reload=told.set))
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGHUP)
            await told.wait()
            assert not ending.done()
            if with_stdin:
                os.close(writing)
            else:
                os.kill(os.getpid(), signal.SIGTERM)
            await ending

        asyncio.run(main())
    if not with_stdin:
        os.close(writing)


def test_a_service_reads_its_certificate_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificate, key = certify(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef", encoding="ascii")
    settings = ProcessSettings(secret_file=secret, certificate=certificate, certificate_key=key)

    async def main() -> None:
        server, address = await listen(Service(Inference), {}, settings)

        async def is_trusted() -> bool:
            tls = client_tls(certificate)
            client = connect_to(Service(Inference), address, secret=read_secret(secret), tls=tls)
            try:
                await client.connect()
            except UnavailableError:
                return False
            await client.close()
            return True

        assert await is_trusted()
        certify(tmp_path)
        assert not await is_trusted(), "the file has another one"
        renew_certificate(server, settings)
        assert await is_trusted()
        certificate.write_text("nothing", encoding="ascii")
        renew_certificate(server, settings)
        assert "invalid certificate; the old one stays" in caplog.text
        await server.drain(0.0)

    asyncio.run(main())


def test_signals_of_services_are_handled_in_one_place() -> None:
    handling = [name_of(path) for path in MODULES if "add_signal_handler" in path.read_text(encoding="utf-8")]
    assert handling == ["services.process"]


@pytest.mark.slow
def test_a_service_that_cannot_drain_in_time_says_so_in_one_line(folder: Path) -> None:
    """It ended with a traceback."""
    told = {"name": "m", "library": str(folder / "library"), "threads": 1, "drain_timeout_s": 0.0}
    command = [sys.executable, "-m", "services.inference", json.dumps(told)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    with process:
        assert process.stderr is not None
        while "version activated" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=LONG_S)
    [error] = [line for line in said.splitlines() if not line.startswith("{")]
    assert error.startswith("error: 'm' ends with work unfinished: ") and "drain_timeout_s = 0;" in error
    assert process.returncode not in (0, 2)


def test_a_service_listens_on_ipv6_at_an_address_that_clients_take(tmp_path: Path) -> None:
    """Its address had no brackets, so the configuration of its clients refused it."""

    async def main() -> None:
        try:
            server, address = await listen(Service(Inference), {}, ProcessSettings(host="::1"))
        except ConfigError:
            pytest.skip("this machine has no IPv6")
        file = tmp_path / "serve.toml"
        file.write_text(f'[models.m]\naddress = "{address}"', encoding="utf-8")
        assert read_config(file, {}, {}).config.models["m"].address == address
        client = connect_to(Service(Inference), address)
        await client.connect()
        assert client.connected and client.address == address
        await client.close()
        await server.drain(0.0)

    asyncio.run(main())


HANGING = """
import sys, time
from services.inference import __main__ as service

def build():
    print("hangs", flush=True)
    time.sleep(1e6)

if __name__ == "__main__":
    service._GRACE_S = 0.0
    sys.exit(service.main())
"""


@pytest.mark.slow
def test_a_service_that_hangs_ends_with_the_server_that_started_it(tmp_path: Path) -> None:
    """One that hung while it loaded its model stayed for ever after its server was killed."""
    file = tmp_path / "hanging.py"
    file.write_text(HANGING, encoding="utf-8")
    told = {"name": "m", "model": f"{file}:build", "drain_timeout_s": 0.0, "end_with_stdin": True}
    with subprocess.Popen(
        [sys.executable, str(file), "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(told) + "\n")
            process.stdin.flush()
            while "hangs" not in process.stdout.readline():
                assert process.poll() is None
            process.stdin.close()
            assert process.wait(LONG_S) not in (0, USAGE)
        finally:
            process.kill()
