"""What the HTTP server of `gati serve` may open, and what it logs."""

from __future__ import annotations

import logging
import resource
import subprocess
from pathlib import Path

import pytest

from gati.errors import ConfigError
from gati.hosts import check_listening
from services import web
from services.config import ModelConfig, ServeConfig
from tests.services.certificates import certify


@pytest.mark.parametrize(("hard", "connections"), [(100_000, 1000), (1000, 372)])
def test_processes_of_replicas_have_files_next_to_connections(
    monkeypatch: pytest.MonkeyPatch, hard: int, connections: int
) -> None:
    """With many replicas and clients, no process could be started any more."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: given.append(limits))
    models = {"a": ModelConfig(model="x:y", replicas_max=40), "b": ModelConfig(model="x:y")}
    config = ServeConfig(models=models, replicas=10)
    assert web._limits(config).connections == connections
    assert given == [(min(hard, 1000 + 128 + 500), hard)]
    assert web._limits(config.model_copy(update={"ray": "auto"})).connections == min(1000, hard - 128 - 50)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    with pytest.raises(ConfigError, match="only 256 files may be open, 629 are needed"):
        web._limits(config)


def test_models_that_run_elsewhere_take_one_file_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """They counted as processes, each for all replicas of the others: with many, the server did not start."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    models = {f"m{number}": ModelConfig(address="cars.example:9000") for number in range(60)}
    config = ServeConfig(models=models, replicas=4)
    assert web._limits(config).connections == 1024 - 128 - 60


@pytest.mark.parametrize("host", ["192.0.2.1", "fe80::1"])
def test_an_address_of_another_machine_is_told_as_such(host: str) -> None:
    """The advice was to choose another port."""
    with pytest.raises(ConfigError, match=r"^cannot listen on [^ ]+:0 \([^()]+\); --host must be an address"):
        web.listen(ServeConfig(host=host, port=0))


def test_a_port_in_use_is_told_as_such() -> None:
    with web.listen(ServeConfig(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf":{port} \(Address already in use\); choose another --port$"):
            web.listen(ServeConfig(port=port))


def test_only_what_can_be_an_address_is_tried() -> None:
    """A port with too many digits was an OverflowError, which no caller expects."""
    with web.listen(ServeConfig(port=0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        check_listening(address)
    with pytest.raises(OSError, match="refused"):
        check_listening(address)
    for other in ("auto", "local", "127.0.0.1:" + 20 * "9", "127.0.0.1:70000", "127.0.0.1:0"):
        check_listening(other)


def test_a_key_with_a_passphrase_is_refused(tmp_path: Path) -> None:
    """OpenSSL asked for it on the terminal: a server that read its certificate again stood still."""
    certificate, key = certify(tmp_path)
    locked = tmp_path / "locked.pem"
    command = ("openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:word", "-out", str(locked))
    subprocess.run(command, check=True, capture_output=True)
    config = ServeConfig(certificate=certificate, certificate_key=locked)
    with pytest.raises(ConfigError, match=r"the key in .*locked\.pem has a passphrase; write one without"):
        web.web_server(config, lambda *_: None)  # type: ignore[arg-type]


def test_clients_that_do_not_speak_http_cannot_fill_the_log() -> None:
    """Each cost a line, without a key."""
    for _ in range(2):
        web.web_server(ServeConfig(), lambda *_: None)  # type: ignore[arg-type]
    logger = logging.getLogger("uvicorn.error")

    def logged(level: int, at_s: float) -> bool:
        record = logger.makeRecord(logger.name, level, "", 0, "Invalid HTTP request received.", (), None)
        record.created = at_s
        return bool(logger.filter(record))

    found = [logged(logging.WARNING, at_s) for at_s in (100.0, 100.5, 100.9, 101.0, 101.5, 7.0, 7.5)]
    assert found == [True, False, False, True, False, True, False]
    assert all(logged(logging.ERROR, 7.6) for _ in range(3))
