"""The inference service in this process: admission, loading, and an unreachable store or repository."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gati.errors import CancelledError, CompositionError, OverloadError, RequestError
from gati.guard import standing_file
from gati.samples.store import Record, RecordStore
from gati.versions.lineage import Lineage
from gati.versions.repository import ModelRepository
from services.inference import service as module
from services.inference.counts import Counts
from services.inference.followed import Followed
from services.inference.following import Answering
from services.inference.loaded import LoadedVersion, TooManyVersionsError
from services.inference.service import InferenceService
from services.pausing import Takes
from services.scratch import Scratch
from services.wire.gen.ttypes import InferRequest, VersionSource
from services.wire.tensors import to_tensor
from tests.engine.served import images
from tests.services.in_process import run
from tests.services.running import LITTLE, certify, make_folder
from tests.starting import heavy_imports_of
from tests.waiting import LONG_S, in_the_end


def request(name: str, inputs: int = 1, priority: int = 2) -> Any:
    time_ms = int(1e3 * LONG_S)
    return InferRequest(name, to_tensor(images(inputs)), time_ms, "0" * 32, priority=priority)


def prepared_slowly(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[int]]:
    """Let preparing wait for the event; returns it, and the number of inputs of each request that began."""
    go, begun = threading.Event(), list[int]()
    original = module.rows_of

    def slow(engine: Any, given: Any) -> Any:
        begun.append(len(given))
        go.wait()
        return original(engine, given)

    monkeypatch.setattr(module, "LARGE_INPUT_BYTES", 0)
    monkeypatch.setattr(module, "rows_of", slow)
    return go, begun


@pytest.mark.slow
def test_requests_keep_their_places_while_they_are_resized(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue of 4 let 39 in, and forgot who had gone meanwhile."""
    go, begun = prepared_slowly(monkeypatch)

    async def test(service: InferenceService) -> None:
        first = asyncio.create_task(service.infer(request("first", 2)))
        second = asyncio.create_task(service.infer(request("second", 2)))
        await in_the_end(lambda: begun == [2, 2])
        with pytest.raises(OverloadError, match="4 inputs go first"):
            await service.infer(request("third"))
        with pytest.raises(RequestError, match="the id 'first' is running"):
            await service.infer(request("first"))
        assert (await service.statistics()).waiting == 4
        await service.cancel("first")
        await service.cancel("never heard of")
        go.set()
        with pytest.raises(CancelledError):
            await first
        assert len((await second).answers) == 2
        assert (await service.statistics()).waiting == 0
        assert len((await service.infer(request("first", 4))).answers) == 4

    run(folder, test, queue_capacity=4)


@pytest.mark.slow
def test_a_request_that_is_prepared_while_its_version_is_unloaded_is_answered_by_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then its caches were stopped, and the base model's queue, in which it had no place, was closed."""
    go, begun = prepared_slowly(monkeypatch)

    async def test(service: InferenceService) -> None:
        await service.load(VersionSource("plain"))
        asked = asyncio.create_task(service.infer(request("asked")))
        await in_the_end(lambda: len(begun) == 1)
        version = service._versions.active
        while version.post.watch.may_hit:
            version.post.watch.audited(agreed=[False] * version.post.watch.settings)
        await service.activate("plain")
        await service.unload(version.name)
        for _ in range(100):  # by then, the queues of a version that is not in use are closed
            await asyncio.sleep(0.002)
        go.set()
        answered = await asked
        assert (answered.version, answered.answers[0].exit) == (version.name, "base")
        await in_the_end(lambda: version.answering.gone)

    run(folder, test, workers=2, state=tmp_path)


@pytest.mark.slow
def test_a_stop_is_written_before_an_answer_tells_of_it_while_the_event_loop_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request waited for the disk, and so did deadlines and health checks."""
    go, writers = threading.Event(), []
    original = standing_file.atomic_write_text

    def slow(path: Path, text: str) -> None:
        writers.append(threading.current_thread())
        if writers[-1] is not threading.main_thread():
            go.wait()
        original(path, text)

    async def test(service: InferenceService) -> None:
        monkeypatch.setattr(standing_file, "atomic_write_text", slow)
        watch = service._versions.active.post.watch
        while watch.may_hit:
            watch.audited(agreed=[False] * watch.settings)
        asked = asyncio.create_task(service.infer(request("asked")))
        try:
            await in_the_end(lambda: bool(writers))
            for _ in range(100):
                await asyncio.sleep(0.002)
            assert not asked.done() and (await service.health()).ready
        finally:
            go.set()
        assert (await asked).state == "stopped"
        [kept] = json.loads((tmp_path / "m.json").read_text())["versions"].values()
        assert kept["state"] == "stopped" and threading.main_thread() not in writers

    run(folder, test, state=tmp_path)


@pytest.mark.parametrize(
    ("workers", "takes"), [(1, Takes(2, 2)), pytest.param(2, Takes(1, 2), marks=pytest.mark.slow)]
)
def test_while_a_request_is_answered_it_takes_the_cores_of_its_engine(
    workers: int, takes: Takes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Takes | None] = []

    @contextmanager
    def answering(takes: Takes) -> Iterator[None]:
        told.append(takes)
        yield
        told.append(None)

    async def test(service: InferenceService) -> None:
        monkeypatch.setattr(service._pausing, "answering", answering)
        await service.infer(request("asked", 2))
        assert told == [takes, None]

    run(folder, test, workers=workers, threads=2, threads_given=True)


def test_statistics_have_what_older_schedulers_require(folder: Path) -> None:
    """`expected_wait_ms` was required, and was taken away: they refused the answer."""

    async def test(service: InferenceService) -> None:
        statistics = await service.statistics()
        statistics.validate()
        assert statistics.expected_wait_ms == 0.0

    run(folder, test)


def test_statistics_tell_of_inputs_that_wait_for_the_base_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None waited or ran in `/metrics` while caches were stopped or unproven, however long the queue was."""

    async def test(service: InferenceService) -> None:
        version = service._versions.active
        while version.post.watch.may_hit:
            version.post.watch.audited(agreed=[False] * version.post.watch.settings)
        assert version.base is not None
        with monkeypatch.context() as patched:
            patched.setattr(version.base._runner, "submit", lambda x: Future())
            asked = [asyncio.create_task(service.infer(request(str(number)))) for number in range(3)]
            await asyncio.sleep(0)
            statistics = await service.statistics()
        assert (statistics.waiting, statistics.running) == (2, 1)
        for each in asked:
            each.cancel()
        await asyncio.wait(asked)

    run(folder, test, state=tmp_path)


def test_versions_are_few_and_folders_are_those_of_the_repository(folder: Path, tmp_path: Path) -> None:
    async def test(service: InferenceService) -> None:
        for outside in ("/etc", str(folder), str(tmp_path / "versions" / ".." / "x"), "a\0b", "x" * 5000):
            with pytest.raises(RequestError, match="not in the repository of this model") as refused:
                await service.load(VersionSource("x", folder=outside))
            assert outside not in str(refused.value)
        loading = [service.load(VersionSource(name, composition="other")) for name in ("a", "b", "c")]
        found = await asyncio.gather(*loading, return_exceptions=True)
        refused_too = [each for each in found if isinstance(each, CompositionError)]
        assert len(refused_too) == 1 and "most_versions" in str(refused_too[0])
        await service.load(VersionSource("a", composition="other"))  # in place of the one of that name
        await service.unload("b")
        await service.load(VersionSource("c", composition="other"))

    (tmp_path / "versions").mkdir()
    run(folder, test, most_versions=3, repository=str(tmp_path / "versions"))


def test_an_answer_names_the_certificate_of_the_composition_that_gave_it(tmp_path: Path) -> None:
    """Also where another composition has taken the place of the one of that name."""
    library = make_folder(tmp_path) / "library"

    async def test(service: InferenceService) -> None:
        found = []
        for accuracy in (LITTLE, 2 * LITTLE):
            certify(library, accuracy)
            await service.load(VersionSource("default", composition="default"))
            (described,) = (await service.describe()).versions
            certificate = json.loads(described.certificate_json)
            assert certificate["accuracy"] == accuracy
            response = await service.infer(request("asked", 1))
            assert response.certificate_id == described.certificate_id
            found.append(response.certificate_id)
        assert len(set(found)) == 2

    run(tmp_path, test)


def test_versions_that_come_and_go_leave_few_labels_in_the_metrics() -> None:
    counts = Counts()
    for number in range(100):
        counts.answered(f"v{number}", "base", 0.0, 0.0, exits=("base",))
    versions = [row.version for row in counts.exits_on_the_wire()]
    assert len(versions) <= 32 and versions[-1] == "v99" and counts.inputs == 100


def test_the_exits_of_a_version_are_those_of_all_its_open_settings() -> None:
    nothing: Any = None

    def setting(*blocks: int) -> Answering:
        exits = [SimpleNamespace(block=f"block{index}", block_index=index) for index in blocks]
        composition: Any = SimpleNamespace(exits=exits)
        return Answering("v", nothing, nothing, composition)

    published = setting(1, 3)
    post: Any = SimpleNamespace(open={2: published})
    version = LoadedVersion(published, post, nothing, None, False, nothing)
    assert version.exits == ("block1", "block3", "base") and version.exits is version.exits
    post.open[1] = setting(2, 3)
    assert version.exits == ("block1", "block2", "block3", "base")


def test_counters_of_exits_do_not_fall_when_a_version_is_unloaded_or_another_one_gets_its_name() -> None:
    """What had left by the exits of the one before was counted as lookups of the next one that missed."""

    def rows() -> dict[tuple[str, str], tuple[int, int]]:
        return {(row.version, row.exit): (row.queries, row.hits) for row in counts.exits_on_the_wire()}

    counts, exits = Counts(), ("early", "late", "base")
    for exit in ("late", "base", "early", "base", "late", "base"):
        counts.answered("v1", exit, 0.0, 0.0, exits=exits)
    for _ in range(4):  # caches rest
        counts.answered("v1", "base", 0.0, 0.0, exits=exits, looked_up=False)
    counts.answered("v1", "recall", 0.0, 0.0, exits=exits)
    before = {("v1", "early"): (6, 1), ("v1", "late"): (5, 2), ("v1", "base"): (7, 7)}
    assert rows() == before and list(rows()) == list(before)
    counts.answered("v2", "base", 0.0, 0.0, exits=("base",))
    assert rows() == {**before, ("v2", "base"): (1, 1)}
    counts.answered("v1", "middle", 0.0, 0.0, exits=("middle", "base"))
    assert rows() == {**before, ("v2", "base"): (1, 1), ("v1", "middle"): (1, 1)}


def test_a_store_that_is_away_keeps_nobody_from_answering(folder: Path, tmp_path: Path) -> None:
    away = tmp_path / "records"
    away.write_text("no folder", encoding="utf-8")
    url = f"sqlite:///{away}/records.db"

    async def test(service: InferenceService) -> None:
        assert len((await service.infer(request("a"))).answers) == 1
        away.unlink()  # the store comes back
        kept = 0
        while not kept:
            await service.infer(request("b"))
            if (away / "records.db").exists():
                kept = await asyncio.to_thread(RecordStore.open(url).count)
        assert (away / "records.db").stat().st_mode & 0o777 == 0o600

    run(folder, test, records=url, sampling=1.0)


class Loads:
    """Stands for the versions of a service: counts what is loaded, and refuses it."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.loaded: list[str] = []
        self.last_run = SimpleNamespace(served=None, goes_on=lambda post: post == "the same")
        self.post = "the same"
        self.activated: list[str] = []
        self.active = SimpleNamespace(name="default")
        self.pending: Any = None

    async def load(self, name: str, folder: Path) -> Any:
        assert (folder / "composition.json").is_file()
        self.loaded.append(name)
        if self.error is not None:
            raise self.error
        return SimpleNamespace(post=self.post)

    def activate(self, name: str) -> None:
        self.activated.append(name)
        self.active = SimpleNamespace(name=name)

    def unload(self, name: str) -> None:
        raise AssertionError("nothing is to be unloaded")


def publish(folder: Path) -> int:
    repository = ModelRepository(folder)
    number = repository.publish("m", {"composition.json": b"{}"}, Lineage("0" * 64))
    repository.activate("m", number)
    return number


def test_a_version_that_cannot_serve_is_fetched_once(tmp_path: Path) -> None:
    """It was fetched and opened at every poll."""

    async def main() -> None:
        versions: Any = Loads(CompositionError("of another base model"))
        followed = Followed(str(tmp_path), "m", versions)
        for _ in range(3):
            publish(tmp_path)
            for _ in range(4):
                await followed.look()
        assert versions.loaded == ["1", "2", "3"]
        versions.error = None
        publish(tmp_path)
        await followed.look()
        assert versions.active.name == "4"

    asyncio.run(main())


def test_a_version_without_room_is_served_once_another_is_unloaded(tmp_path: Path) -> None:
    async def main() -> None:
        versions: Any = Loads(TooManyVersionsError("8 versions are loaded"))
        followed = Followed(str(tmp_path), "m", versions)
        publish(tmp_path)
        for _ in range(2):
            await followed.look()
        assert versions.active.name == "default"
        versions.error = None
        await followed.look()
        assert versions.loaded == ["1"] * 3 and versions.active.name == "1"

    asyncio.run(main())


class HasOnePlace(Loads):
    """What it is to activate waits to be proven."""

    damaged: tuple[str, ...] = ()

    async def load(self, name: str, folder: Path) -> Any:
        if self.loaded:
            raise TooManyVersionsError("3 versions are loaded")
        if name in self.damaged:
            raise CompositionError(f"{name} is of another base model")
        return await super().load(name, folder)

    def activate(self, name: str) -> None:
        self.activated.append(name)
        self.pending = SimpleNamespace(name=name)

    def unload(self, name: str) -> None:
        self.loaded.remove(name)
        if self.pending is not None and self.pending.name == name:
            self.pending = None


async def with_a_trial(folder: Path) -> tuple[Any, Followed]:
    """Versions, the first of which is on trial, and what follows the repository in `folder`."""
    versions: Any = HasOnePlace(None)
    followed = Followed(str(folder), "m", versions)
    publish(folder)
    await followed.look()
    return versions, followed


def test_what_an_operator_activates_while_a_trial_is_loaded_again_stays(tmp_path: Path) -> None:
    class Operated(HasOnePlace):
        async def load(self, name: str, folder: Path) -> Any:
            if self.activated and name == "1":
                self.active = SimpleNamespace(name="operator's")
            return await super().load(name, folder)

    async def main() -> None:
        versions: Any = Operated(None)
        followed = Followed(str(tmp_path), "m", versions)
        versions.damaged = ("2",)
        for _ in range(2):
            publish(tmp_path)
            await followed.look()
        assert versions.activated == ["1"] and versions.active.name == "operator's"
        assert versions.loaded == []

    asyncio.run(main())


def test_a_version_on_trial_goes_on_if_a_newer_one_cannot_be_loaded_in_its_place(tmp_path: Path) -> None:
    async def main() -> None:
        versions: Any = HasOnePlace(None)
        followed = Followed(str(tmp_path), "m", versions)
        versions.damaged = ("2",)
        for _ in range(2):
            publish(tmp_path)
            await followed.look()
        assert versions.activated == ["1", "1"] and versions.loaded == ["1"]
        await followed.look()
        assert versions.activated == ["1", "1"], "once"
        publish(tmp_path)
        await followed.look()
        assert versions.activated == ["1", "1", "3"] and versions.loaded == ["3"]

    asyncio.run(main())


@pytest.mark.parametrize("pending", [None, "another"])
def test_a_newer_version_that_cannot_be_loaded_begins_no_trial_that_had_ended(
    tmp_path: Path, pending: str | None
) -> None:
    """It undid what an operator had activated meanwhile, and had a version proven anew that was given up."""

    async def main() -> None:
        versions, followed = await with_a_trial(tmp_path)
        versions.pending = None if pending is None else SimpleNamespace(name=pending)
        versions.damaged = ("2",)
        publish(tmp_path)
        await followed.look()
        assert versions.activated == ["1"] and versions.loaded == []
        publish(tmp_path)
        await followed.look()
        assert versions.activated == ["1", "3"] and versions.loaded == ["3"]

    asyncio.run(main())


def test_why_a_newer_version_cannot_be_loaded_is_told_though_the_one_on_trial_is_gone_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        versions, followed = await with_a_trial(tmp_path)
        versions.damaged = ("1", "2")
        publish(tmp_path)
        await followed.look()
        assert [each.__dict__["reason"][:1] for each in caplog.records] == ["1", "2"]
        publish(tmp_path)
        await followed.look()
        assert versions.activated == ["1", "3"] and versions.loaded == ["3"]

    caplog.set_level("WARNING", logger="gati.inference")
    asyncio.run(main())


def test_a_newer_version_takes_the_place_of_one_on_trial(tmp_path: Path) -> None:
    """With as many versions as are allowed, one whose proof had failed kept all later ones out for good."""

    async def main() -> None:
        versions: Any = HasOnePlace(None)
        followed = Followed(str(tmp_path), "m", versions)
        for _ in range(2):
            publish(tmp_path)
            await followed.look()
        assert versions.activated == ["1", "2"] and versions.loaded == ["2"]
        versions.active = SimpleNamespace(name="2")
        publish(tmp_path)
        await followed.look()
        assert versions.activated == ["1", "2"] and versions.loaded == ["2"], "what serves keeps its place"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("served", "post", "activated"),
    [
        (None, "the same", ["2"]),
        ("default", "the same", ["2"]),
        ("1", "the same", ["1", "2"]),
        ("1", "of another repository", ["2"]),
        ("2", "the same", ["2"]),
        ("9", "the same", ["2"]),
    ],
)
def test_what_served_last_goes_on_before_the_active_version(
    tmp_path: Path, served: str | None, post: str, activated: list[str]
) -> None:
    """The active one may wait for its proof; what served was forgotten. Version 9 is not there any more."""
    publish(tmp_path)
    publish(tmp_path)

    async def main() -> None:
        versions: Any = Loads(None)
        versions.last_run.served, versions.post, versions.unload = served, post, lambda name: None
        await Followed(str(tmp_path), "m", versions).look()
        assert versions.activated == activated

    asyncio.run(main())


@pytest.mark.parametrize("error", [TooManyVersionsError("8 are loaded"), MemoryError("it is too large")])
def test_the_active_version_serves_though_what_served_last_cannot_be_loaded(
    tmp_path: Path, error: Exception
) -> None:
    publish(tmp_path)
    publish(tmp_path)

    class LoadsOne(Loads):
        async def load(self, name: str, folder: Path) -> Any:
            if name == "1":
                raise error
            return await super().load(name, folder)

    async def main() -> None:
        versions: Any = LoadsOne(None)
        versions.last_run.served = "1"
        await Followed(str(tmp_path), "m", versions).look()
        assert versions.activated == ["2"]

    asyncio.run(main())


def test_a_version_is_not_unloaded_before_it_is_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One on trial took over while the files of the next one were removed; that one never served."""
    publish(tmp_path)

    async def main() -> None:
        versions: Any = Loads(None)
        followed, loop = Followed(str(tmp_path), "m", versions), asyncio.get_running_loop()
        removed = Scratch.close

        async def take_over() -> None:
            followed.tidy()

        def close(scratch: Scratch) -> None:
            asyncio.run_coroutine_threadsafe(take_over(), loop).result()
            removed(scratch)

        monkeypatch.setattr(Scratch, "close", close)
        await followed.look()
        assert versions.activated == ["1"]

    asyncio.run(main())


@pytest.mark.parametrize("error", [OSError(116, "Stale file handle"), ValueError("a surprise")])
def test_a_repository_that_fails_for_a_moment_is_followed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """One ESTALE ended it without a word."""
    original, failures = ModelRepository.active_token, [error, error]

    def failing(self: ModelRepository, model: str) -> str:
        if failures:
            raise failures.pop()
        return original(self, model)

    monkeypatch.setattr(ModelRepository, "active_token", failing)

    async def main() -> None:
        versions: Any = Loads(None)
        followed = Followed(str(tmp_path), "m", versions)
        await followed.look()
        following = asyncio.create_task(followed.keep_looking(0.01))
        publish(tmp_path)
        await in_the_end(lambda: versions.active.name == "1")
        following.cancel()

    asyncio.run(main())


def test_samples_are_kept_for_as_long_as_the_window_says(folder: Path, tmp_path: Path) -> None:
    """An hour was all there was, whatever the window."""
    url, window_s = f"sqlite:///{tmp_path}/records.db", 3 * 3600.0
    store = RecordStore.open(url, max_age_s=window_s)
    store.add([Record(images(1)[0], "image", 1, time.time() - 2 * 3600.0, "m", source="old")])

    async def test(service: InferenceService) -> None:
        while await asyncio.to_thread(store.count, "m") < 2:
            await service.infer(request("a"))
        assert store.window("m")[0].source == "old"

    run(folder, test, records=url, sampling=1.0, records_max_age_s=window_s)


STARTED = """
import sys
import services.inference.__main__
from services.inference.opening import Opener
from services.inference.settings import InferenceSettings

settings = InferenceSettings(name="m", library=sys.argv[1], threads=1, workers=1)
assert Opener(settings).open("default", None).engine.exits
"""


@pytest.mark.slow
def test_a_service_that_starts_imports_nothing_that_it_does_not_need(directory: Path) -> None:
    assert not heavy_imports_of(STARTED, str(directory))
