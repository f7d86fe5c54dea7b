"""A real PostgreSQL for the tests that need one, on a socket of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import LONG_S

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


class Postgres:
    """A server in a folder of its own. It refuses to run as root, so root starts it as `postgres`."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.folder, self.binaries = folder, binaries
        self.user = "postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name

    def run(self, program: str, *arguments: str) -> None:
        command = [str(self.binaries / program), *arguments]
        if os.getuid() == 0:
            command = ["runuser", "-u", self.user, "--", *command]
        log = self.folder / "commands.log"
        with log.open("ab") as said:
            done = subprocess.run(
                command, cwd=self.folder, stdout=said, stderr=said, timeout=LONG_S, check=False
            )
        assert done.returncode == 0, f"{command}: {log.read_text()[-2000:]}"

    def create(self) -> None:
        if os.getuid() == 0:
            shutil.chown(self.folder, self.user)
        self.run("initdb", "-D", "data", "-A", "trust", "-U", "gati", "--no-sync", "-E", "UTF8")
        self.start()

    def start(self) -> None:
        options = f"-k {self.folder} -c listen_addresses='' -c max_connections=20"
        self.run("pg_ctl", "-D", "data", "-w", "-t", "50", "-l", "server.log", "-o", options, "start")

    def stop(self, mode: str = "immediate") -> None:
        self.run("pg_ctl", "-D", "data", "-w", "-m", mode, "stop")

    def database(self, name: str) -> str:
        """The URL of a new, empty database."""
        self.run("createdb", "-h", str(self.folder), "-U", "gati", name)
        return f"postgresql://gati@/{name}?host={self.folder}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if not BINARIES:
        pytest.skip("needs PostgreSQL's server programs in /usr/lib/postgresql (Debian: postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="gati-pg-", dir="/tmp"))  # a socket's path must be short
    server = Postgres(folder, BINARIES[-1].parent)
    try:
        server.create()
        yield server
        server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres: Postgres, request: pytest.FixtureRequest) -> str:
    """A database for one test."""
    return postgres.database(f"t{abs(hash(request.node.nodeid)):x}")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new store of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/records.db"
    url: str = request.getfixturevalue("postgres_url")
    return url
