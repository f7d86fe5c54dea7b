"""Versions loaded over REST are restored after a restart of the server, where possible."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gati.errors import CompositionError, NotFoundError, StorageError
from services.scheduler import replicas, restoring
from services.scheduler.kept import KeptVersions
from services.scheduler.models import Model
from services.wire.gen.ttypes import VersionInfo, VersionSource
from services.wire.server import WireServer
from tests.services.engines import SERVICE, Engine
from tests.services.inside import Inside
from tests.services.running import Serving, make_folder
from tests.waiting import LONG_S, in_the_end, until

Act = Callable[[Model], Awaitable[None]]


async def nothing(model: Model) -> None:
    """Only start and stop."""


def server(folder: Path | None, engine: Engine, act: Act = nothing) -> None:
    """A server of one model, from its start to its end."""

    async def main() -> None:
        wire = WireServer(SERVICE, engine.handlers())
        port = await wire.start("127.0.0.1", 0)
        model = Model("m", address=f"127.0.0.1:{port}", kept=KeptVersions("m", folder))
        try:
            await model.start()
            await model.wait_until_ready(LONG_S)
            await act(model)
        finally:
            await model.stop(LONG_S)
            await wire.drain(0.0)

    asyncio.run(main())


async def load_three(model: Model) -> None:
    for version, composition in (("a", "fast"), ("b", None), ("c", "small")):
        await model.load(version, composition)
    await model.unload("b")


def begun(*versions: str) -> Engine:
    """A service that has just begun with these; the last answers."""
    engine = Engine()
    engine.versions, engine.active = ["first", *versions], versions[-1] if versions else "first"
    return engine


def test_they_are_loaded_again_and_what_answered_answers(tmp_path: Path) -> None:
    server(tmp_path, begun(), load_three)
    document = json.loads((tmp_path / "m.versions.json").read_text())
    assert {row["version"]: row["composition"] for row in document["versions"]} == {"a": "fast", "c": "small"}
    for _ in range(2):
        engine = begun()
        server(tmp_path, engine)
        assert engine.calls == ["load c small", "load a fast"]
        assert engine.active == "c"


def test_a_library_that_was_removed_does_not_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = tmp_path / "library"

    async def remove(model: Model) -> None:
        shutil.rmtree(library)
        await load_three(model)

    server(library / "standing", begun(), remove)
    assert not library.exists()
    assert {vars(each)["reason"] for each in caplog.records if "will be lost" in each.message} == {
        "its folder is gone"
    }


def test_what_a_library_that_was_moved_there_loads_stays(tmp_path: Path) -> None:
    library, other = tmp_path / "library", tmp_path / "other"
    server(other / "standing", begun(), load_three)
    there = (other / "standing" / "m.versions.json").read_bytes()

    async def swap(model: Model) -> None:
        library.rename(tmp_path / "before")
        other.rename(library)
        await model.load("d", "fast")

    server(library / "standing", begun(), swap)
    assert (library / "standing" / "m.versions.json").read_bytes() == there


def test_without_a_folder_they_end_with_the_server_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server(None, begun(), load_three)
    assert "versions loaded over REST will be lost" in caplog.text
    engine = begun()
    server(None, engine)
    assert engine.calls == [] and not list(tmp_path.iterdir())


def test_nothing_is_written_until_something_is_loaded(tmp_path: Path) -> None:
    server(tmp_path, begun())
    assert [path.name for path in tmp_path.iterdir()] == ["m.versions.lock"]


def test_what_serves_by_itself_and_was_not_there_before_goes_on(tmp_path: Path) -> None:
    """The operator configured another composition, or activated another version in the repository."""
    server(tmp_path, begun(), load_three)
    engine = begun("8")
    server(tmp_path, engine)
    assert engine.active == "8" and engine.calls == ["load c small", "load a fast"]
    engine = begun("8")
    server(tmp_path, engine)
    assert engine.active == "8"


def test_what_the_server_begins_with_may_have_been_unloaded(tmp_path: Path) -> None:
    async def only_ours(model: Model) -> None:
        await model.load("a", "fast")
        await model.unload("first")

    server(tmp_path, begun(), only_ours)
    engine = begun()
    server(tmp_path, engine)
    assert engine.active == "a"


def test_a_name_that_was_given_to_another_composition_is_loaded_again(tmp_path: Path) -> None:
    server(tmp_path, begun(), lambda model: model.load("first", "fast"))
    engine = begun()
    server(tmp_path, engine)
    assert engine.calls == ["load first fast"]


@pytest.mark.parametrize("tells_sources", [True, False])
def test_what_is_there_is_not_loaded_again(tmp_path: Path, tells_sources: bool) -> None:
    """Versions called otherwise than their compositions were, after every lost connection."""
    engine = begun()
    engine.tells_sources = tells_sources
    server(tmp_path, engine, load_three)
    engine.calls.clear()
    server(tmp_path, engine)
    assert engine.calls == ([] if tells_sources else ["load c small", "load a fast"])
    assert engine.active == "c"
    asyncio.run(engine.load(VersionSource("a", "large")))
    engine.calls.clear()
    server(tmp_path, engine)
    assert "load a fast" in engine.calls


def test_what_cannot_be_loaded_any_more_is_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server(tmp_path, begun(), load_three)
    engine = begun()
    engine.refused = "c"
    server(tmp_path, engine)
    assert engine.active == "first" and "not loaded again" in caplog.text
    engine = begun()
    server(tmp_path, engine)
    assert engine.calls == ["load a fast"]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["load", "activate"])
def test_a_version_at_which_every_process_ends_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    server(tmp_path, begun(), load_three)

    class Dying(Engine):
        dead = 0

        def die(self, at: str, version: str) -> None:
            if (at, version) == (call, "c"):
                self.dead += 1
                for transport in self.transports:
                    transport.abort()
                raise CompositionError("nobody hears this")

        async def load(self, source: Any) -> Any:
            self.die("load", source.version)
            return await super().load(source)

        async def activate(self, version: str) -> None:
            self.die("activate", version)
            await super().activate(version)

    engine = Dying()
    engine.transports = []

    async def main() -> None:
        wire = WireServer(SERVICE, engine.handlers())
        port = await wire.start("127.0.0.1", 0)

        async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            engine.transports = [writer.transport]
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_copy(reader, back), _copy(there, writer), return_exceptions=True)

        proxy = await asyncio.start_server(through, "127.0.0.1", 0)
        place = "{}:{}".format(*proxy.sockets[0].getsockname()[:2])
        model = Model("m", address=place, kept=KeptVersions("m", tmp_path))
        await model.start()
        await in_the_end(lambda: model.ready)
        await model.stop(LONG_S)
        proxy.close()
        await wire.drain(0.0)

    asyncio.run(main())
    assert engine.dead == 3 and engine.calls[-1] == "load a fast"
    assert "each attempt crashed or hung the process" in caplog.text
    engine = begun()
    server(tmp_path, engine)
    assert engine.calls == ["load a fast"]


def test_a_version_that_is_activated_late_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk was slow three times, what had been loaded was given up as if it had crashed."""
    monkeypatch.setattr(replicas, "_POLL_S", 0.001)
    monkeypatch.setattr(restoring, "CONTROL_TIMEOUT_S", 0.05)
    server(tmp_path, begun(), load_three)

    class Slow(Engine):
        late = 0

        async def activate(self, version: str) -> None:
            await super().activate(version)
            if self.late < 4:
                self.late += 1
                await asyncio.Event().wait()

    engine = Slow()
    server(tmp_path, engine)
    assert engine.late == 4 and engine.calls == ["load c small", "load a fast"]
    engine = begun()
    server(tmp_path, engine)
    assert engine.calls == ["load c small", "load a fast"] and engine.active == "c"


def test_a_version_whose_activation_hangs_the_process_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was loaded for ever, and meanwhile no version of the model answered."""
    monkeypatch.setattr(replicas, "_POLL_S", 0.001)
    monkeypatch.setattr(restoring, "CONTROL_TIMEOUT_S", 0.05)
    server(tmp_path, begun(), load_three)

    class Hanging(Engine):
        hung, hangs = False, 0

        async def activate(self, version: str) -> None:
            if self.hangs < 5:
                self.hangs += 1
                self.hung = True
                try:
                    await asyncio.Event().wait()
                finally:  # the connection has ended, as it does when the process is replaced
                    self.hung = False
            await super().activate(version)

        async def health(self) -> Any:
            if self.hung:
                await asyncio.Event().wait()
            return await super().health()

    engine = Hanging()
    server(tmp_path, engine)
    assert engine.hangs == 3 and engine.active == "first" and engine.calls[-1] == "load a fast"


class Full(Engine):
    """A service whose disk has no space for version `c`."""

    full = True

    async def load(self, source: Any) -> Any:
        if source.version == "c" and self.full:
            self.calls.append("load c")
            raise StorageError("disk full while writing the network of c")
        return await super().load(source)

    async def unload(self, version: str) -> None:
        if version not in self.versions:
            raise NotFoundError(f"no version '{version}' is loaded")
        await super().unload(version)


def test_a_version_for_which_the_disk_is_full_is_loaded_once_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was tried for ever, and meanwhile no version of the model answered; then it was forgotten."""
    monkeypatch.setattr(replicas, "_POLL_S", 0.001)
    server(tmp_path, begun(), load_three)
    engine = Full()
    server(tmp_path, engine)
    assert engine.calls == ["load c", "load c", "load c", "load a fast"] and engine.active == "first"
    assert "not loaded again yet" in caplog.text

    async def space(model: Model) -> None:
        await in_the_end(lambda: "load a fast" in engine.calls and model.version("a"))
        assert engine.active == "first"
        engine.full = False
        await in_the_end(lambda: engine.active == "c" and model.active.version == "c")

    monkeypatch.setattr(replicas, "_LATER_S", 0.001)
    engine = Full()
    server(tmp_path, engine, space)
    engine = begun()
    server(tmp_path, engine)
    assert engine.calls == ["load c small", "load a fast"] and engine.active == "c"


@pytest.mark.parametrize("chosen", ["another", "to unload it"])
def test_what_is_chosen_while_the_disk_is_full_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.setattr(replicas, "_POLL_S", 0.001)
    monkeypatch.setattr(replicas, "_LATER_S", 0.001)
    server(tmp_path, begun(), load_three)
    engine = Full()

    async def choose(model: Model) -> None:
        if chosen == "another":
            await model.load("d", "large")
            engine.full = False
            await in_the_end(lambda: "load c small" in engine.calls)
            await in_the_end(lambda: any(each.version == "c" for each in model.info.versions))
        else:
            with pytest.raises(NotFoundError):
                await model.unload("c")

    server(tmp_path, engine, choose)
    assert engine.active == ("d" if chosen == "another" else "first")
    engine = begun()
    server(tmp_path, engine)
    assert engine.active == ("d" if chosen == "another" else "first")
    assert ("load c small" in engine.calls) is (chosen == "another")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()


def test_a_version_is_given_up_though_another_replica_answers() -> None:
    version = VersionInfo("c", True, "torch", exits=["base"], memory_bytes=0)

    async def main() -> None:
        kept = KeptVersions("m")
        kept.loaded("c", "small")
        for crashes in (2, 3):
            for number in range(crashes):
                assert kept.failed("c", replica=1) is (number == 2)
                await kept.told([version])  # the other replica has it, and says so each second
                kept.caught_up(0)
            kept.caught_up(1)
            assert kept.in_turn() == ([("c", "small")] if crashes == 2 else [])

    asyncio.run(main())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"format": 9}',
        b'{"format": 1, "versions": [{"version": "../x", "composition": null}], "answering": [], "seen": []}',
        b'{"format": 1, "versions": [{"version": "x", "composition": 3}], "answering": [], "seen": []}',
        b" " * 2**21,
    ],
)
def test_a_damaged_file_is_told_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (tmp_path / "m.versions.json").write_bytes(content)
    engine = begun()
    server(tmp_path, engine)
    assert engine.calls == [] and "versions from before the restart cannot be loaded again" in caplog.text
    server(tmp_path, begun(), load_three)
    engine = begun()
    server(tmp_path, engine)
    assert engine.active == "c"


def test_of_two_servers_one_keeps_the_file(tmp_path: Path) -> None:
    server(tmp_path, begun(), load_three)
    first = KeptVersions("m", tmp_path)
    first.open()
    engine = begun()
    server(tmp_path, engine)
    assert engine.calls == []
    first.close()
    server(tmp_path, engine)
    assert engine.calls == ["load c small", "load a fast"]


def test_a_full_disk_refuses_no_version_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    async def act(model: Model) -> None:
        monkeypatch.setattr("os.replace", full)
        await model.load("a", "fast")
        monkeypatch.undo()
        await model.load("b", "fast")

    caplog.set_level(logging.ERROR, "gati.scheduler")
    engine = begun()
    server(tmp_path, engine, act)
    assert engine.active == "b" and caplog.text.count("the loaded versions could not be saved") == 1
    engine = begun()
    server(tmp_path, engine)
    assert sorted(engine.calls) == ["load a fast", "load b fast"]
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".part"]


def test_a_refused_version_is_not_kept(tmp_path: Path) -> None:
    engine = begun()
    engine.refused = "a"

    async def act(model: Model) -> None:
        with pytest.raises(CompositionError):
            await model.load("a", "fast")

    server(tmp_path, engine, act)
    assert not (tmp_path / "m.versions.json").exists()


@pytest.mark.slow
def test_the_processes_of_a_killed_server_end_and_the_next_one_begins_with_what_was_loaded(
    tmp_path: Path,
) -> None:
    folder = make_folder(tmp_path)
    load = "/v2/repository/models/library/load"
    with Serving(folder / "library") as running:
        done = running.client.post(load, json={"parameters": {"composition": "other", "version": "mine"}})
        assert done.status_code == 200, done.text
        assert running.infer("library").json()["model_version"] == "mine"
        (child,) = running.processes().values()
        running.process.send_signal(signal.SIGKILL)
        running.process.wait(LONG_S)
        until(lambda: not Path(f"/proc/{child}/cmdline").exists())
    with Inside(folder / "library") as again:
        assert again.client.get("/v2/models/library").json()["versions"] == ["default", "mine"]
        assert again.infer("library").json()["model_version"] == "mine"
