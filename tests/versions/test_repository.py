"""Versions are seen whole or not at all, whoever is killed; one serves, and there is a way back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import AdaptError, RepositoryError, StorageError, UnknownVersionError
from gati.versions.lineage import SampleWindow, Version
from gati.versions.repository import Lineage, ModelRepository

SHA = "ab" * 32
LINEAGE = Lineage(SHA)
FILES = {"composition.json": b"{}\n", "caches/layer1.0--fc-64.safetensors": bytes(range(256)) * 9}
HOUR = 3600.0

Make = Callable[..., ModelRepository]


@pytest.fixture(params=["directory", "memory", "folders"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Open the same repository again and again: a directory, an object store, and one with real folders."""
    name = uuid.uuid4().hex

    def opened(**more: Any) -> ModelRepository:
        if request.param == "directory":
            return ModelRepository(tmp_path / "models", **more)
        if request.param == "memory":
            return ModelRepository(f"memory://{name}/models", **more)
        import fsspec

        return ModelRepository(tmp_path / "models", filesystem=fsspec.filesystem("file"), **more)

    return opened


@pytest.fixture
def repository(make: Make) -> ModelRepository:
    return make()


def numbers(repository: ModelRepository, model: str = "cars") -> list[int]:
    return [version.version for version in repository.versions(model)]


def publish(repository: ModelRepository, count: int = 1, model: str = "cars") -> list[int]:
    return [repository.publish(model, FILES, LINEAGE) for _ in range(count)]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def overwrite(repository: ModelRepository, path: str, data: bytes) -> None:
    repository._place.put(path, data)


def test_a_version_comes_back_as_it_was_published(make: Make, tmp_path: Path) -> None:
    lineage = Lineage(
        SHA,
        parent=1,
        window=SampleWindow(1200, 1.5e9, 1.6e9, "camera 1"),
        measurements={"agreement": 0.991, "exits": [{"block": "layer1.0", "hits": 40}]},
        tags={"scene": [0.25, -1.0, 3.5]},
    )
    publish(make())
    assert make(clock=lambda: 1_700_000_000.0).publish("cars", FILES, lineage) == 2
    version = make().fetch("cars", 2, tmp_path / "deep" / "into")
    assert contents(tmp_path / "deep" / "into") == FILES
    assert (version.model, version.version, version.lineage) == ("cars", 2, lineage)
    assert version.created == "2023-11-14T22:13:20.000+00:00"
    assert {name: entry.bytes for name, entry in version.files.items()} == {
        n: len(b) for n, b in FILES.items()
    }
    assert make().version("cars", 2) == version and make().versions("cars")[1] == version
    assert make().models() == ["cars"]
    assert os.listdir(tmp_path / "deep") == ["into"], "nothing temporary is left"


def test_a_folder_can_be_published(repository: ModelRepository, tmp_path: Path) -> None:
    for name, data in FILES.items():
        (tmp_path / "deployed" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "deployed" / name).write_bytes(data)
    repository.publish("cars", tmp_path / "deployed", LINEAGE)
    (tmp_path / "into").mkdir()
    repository.fetch("cars", 1, tmp_path / "into")
    assert contents(tmp_path / "into") == FILES


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(st.text(max_size=5), JSON, max_size=4)


@settings(max_examples=100, deadline=None)
@given(measurements=OBJECT, tags=OBJECT)
def test_any_lineage_survives_the_manifest(measurements: Any, tags: Any) -> None:
    lineage = Lineage(SHA, 3, SampleWindow(1), measurements, tags)
    version = Version("m", 4, "now", lineage, {})
    assert Version.from_json(version.to_json(), where="m") == version


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_manifest_that_was_changed_or_cut_is_refused(data: st.DataObject) -> None:
    document = Version("m", 4, "2023", Lineage(SHA, tags={"scene": [1.0, 2.0]}), {}).to_json()
    at = data.draw(st.integers(0, len(document) - 2))
    put = bytes([data.draw(st.integers(0, 255).filter(lambda byte: byte != document[at]))])
    changed = document[:at] + put + document[at + 1 :]
    for wrong in (changed, document[:at]):
        try:
            unchanged = json.loads(wrong) == json.loads(document)  # white space only
        except ValueError:
            unchanged = False
        if not unchanged:
            with pytest.raises(RepositoryError):
                Version.from_json(wrong, where="m")


def test_activating_going_back_and_the_history(make: Make) -> None:
    repository = make()
    assert repository.active("cars") is None and repository.active_token("cars") == ""
    with pytest.raises(RepositoryError, match="no earlier version"):
        repository.rollback("cars")
    publish(repository, 3)
    assert repository.active("cars") is None, "published is not yet active"
    tokens = [repository.active_token("cars")]
    for number in (1, 2, 3):
        repository.activate("cars", number)
        tokens.append(repository.active_token("cars"))
        assert make().active("cars") == number
    repository.activate("cars", 3)
    assert repository.active_token("cars") == tokens[-1], "nothing changed"
    assert repository.rollback("cars") == 2 and make().active("cars") == 2
    assert repository.rollback("cars") == 1 and make().active("cars") == 1
    with pytest.raises(RepositoryError, match="no earlier version"):
        repository.rollback("cars")
    tokens.append(repository.active_token("cars"))
    assert len(set(tokens)) == len(tokens)
    repository.activate("cars", 3)
    assert repository.rollback("cars") == 1
    told = [(entry.version, entry.action) for entry in make().history("cars")]
    assert told == [
        (1, "activate"),
        (2, "activate"),
        (3, "activate"),
        (2, "rollback"),
        (1, "rollback"),
        (3, "activate"),
        (1, "rollback"),
    ]
    assert repository.active("others") is None


@pytest.mark.parametrize(
    ("entry", "active"),
    [
        (b'{"action": "activate", "time_s": 5.5, "stack": [1, 2]}', 2),  # of a Gati without format numbers
        (b'{"action": "activate", "time_s": 5.5, "stack": [1', 1),
        (b'{"action": "activate", "time_s": 5.5, "stack": []}', 1),
        (b'{"format": 1, "action": "erase", "time_s": 5.5, "stack": [2]}', 1),
        (b"\xff", 1),
    ],
)
def test_entries_of_the_history_that_were_cut_short_do_not_count(
    repository: ModelRepository, entry: bytes, active: int
) -> None:
    publish(repository, 2)
    repository.activate("cars", 1)
    overwrite(repository, f"cars/activations/000000000009-{'0' * 32}.json", entry)
    assert repository.active("cars") == active
    assert [each.version for each in repository.history("cars")] == [1, 2][:active]


def test_unknown_versions_are_said(repository: ModelRepository, tmp_path: Path) -> None:
    publish(repository)
    for ask in (
        lambda: repository.version("cars", 2),
        lambda: repository.activate("cars", 2),
        lambda: repository.pin("nobody", 1),
        lambda: repository.fetch("cars", -1, tmp_path / "into"),
    ):
        with pytest.raises(UnknownVersionError, match="no complete version") as raised:
            ask()
        assert raised.value.http_status == 404
    assert repository.active("cars") is None and not (tmp_path / "into").exists()


WRONG = ["", ".", "..", "../x", "a/b", "/etc", ".hidden", "-x", "a\0", "a\n", "ü", "x" * 129, "a b"]


@pytest.mark.parametrize("name", WRONG)
def test_names_that_could_leave_the_repository_are_refused(repository: ModelRepository, name: str) -> None:
    for ask in (
        lambda: repository.publish(name, FILES, LINEAGE),
        lambda: repository.versions(name),
        lambda: repository.active(name),
        lambda: repository.active_token(name),
        lambda: repository.history(name),
        lambda: repository.activate(name, 1),
        lambda: repository.rollback(name),
        lambda: repository.unpin(name, 1),
        lambda: repository.pinned(name),
        lambda: repository.collect_garbage(name),
        lambda: repository.fetch(name, 1, "into"),
    ):
        with pytest.raises(AdaptError, match="cannot be the name of a model; use letters"):
            ask()


@pytest.mark.parametrize("name", ["", "../x", "a//b", "/a", "a/../../b", "a\\b", "a/.x", "a\0b", "a/"])
def test_files_that_could_leave_the_version_are_refused(repository: ModelRepository, name: str) -> None:
    with pytest.raises(AdaptError, match="cannot hold a file"):
        repository.publish("cars", FILES | {name: b""}, LINEAGE)
    assert repository.versions("cars") == []


def test_what_cannot_be_published_is_refused_before_anything_is_written(
    repository: ModelRepository, tmp_path: Path
) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "passwd").symlink_to("/etc/passwd")
    (tmp_path / "empty").mkdir()
    for files, lineage, said in (
        ({}, LINEAGE, "no files"),
        (tmp_path / "empty", LINEAGE, "no files"),
        (tmp_path / "links", LINEAGE, "link"),
        (tmp_path / "absent", LINEAGE, "not a folder"),
        ({"a": b"", "a/b": b""}, LINEAGE, "the name of another file"),
        (FILES, Lineage(SHA, measurements={"a": float("nan")}), "must be JSON"),
        (FILES, Lineage(SHA, tags={"a": object()}), "must be JSON"),
        (FILES, Lineage(SHA, parent=1), "has only 0 versions"),
    ):
        with pytest.raises(AdaptError, match=said):
            repository.publish("cars", files, lineage)  # type: ignore[arg-type]
    assert repository.versions("cars") == []
    assert not [path for path in repository._place.sizes("cars") if path != "lock"]


def test_a_manifest_that_names_files_outside_of_its_version_is_none(tmp_path: Path) -> None:
    """It would be written anywhere when the version is fetched."""
    repository = ModelRepository(tmp_path / "models")
    publish(repository, 2)
    manifest = tmp_path / "models" / "cars" / "versions" / "00000002" / "manifest.json"
    version = repository.version("cars", 2)
    outside = {f"../../../{name}": entry for name, entry in version.files.items()}
    manifest.write_bytes(replace(version, files=outside).to_json())
    with pytest.raises(UnknownVersionError):
        repository.fetch("cars", 2, tmp_path / "into")
    with pytest.raises(RepositoryError, match="cannot hold a file called"):
        Version.from_json(manifest.read_bytes(), where="there")
    assert numbers(repository) == [1]


def test_a_link_out_of_the_repository_is_not_followed(tmp_path: Path) -> None:
    outside = ModelRepository(tmp_path / "outside")
    publish(outside)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "cars").symlink_to(tmp_path / "outside" / "cars")
    with pytest.raises(AdaptError, match="outside the repository"):
        ModelRepository(tmp_path / "models").versions("cars")


def test_a_changed_file_is_not_fetched(repository: ModelRepository, tmp_path: Path) -> None:
    publish(repository, 2)
    path = "cars/versions/00000001/files/composition.json"
    overwrite(repository, path, b"{}\t")
    assert numbers(repository) == [1, 2], "its size is right"
    with pytest.raises(RepositoryError, match="composition.json of cars version 1 is not what was published"):
        repository.fetch("cars", 1, tmp_path / "into")
    assert not (tmp_path / "into").exists() and not [*tmp_path.glob(".into*")]
    overwrite(repository, path, b"longer than it was")
    assert numbers(repository) == [2]
    repository._place.remove("cars/versions/00000002/files/composition.json")
    assert numbers(repository) == []


def test_a_version_of_a_newer_format_is_not_listed_and_not_removed(make: Make) -> None:
    publish(make(), 2)
    path = "cars/versions/00000001/manifest.json"
    document = json.loads(make()._place.read(path) or b"") | {"format": 99}
    overwrite(make(), path, json.dumps(document).encode())
    assert numbers(make()) == [2]
    make(clock=lambda: time.time() + 9 * HOUR).collect_garbage("cars", keep=1)
    assert make()._place.read(path) is not None


def test_fetching_into_a_folder_with_something_in_it_is_refused(
    repository: ModelRepository, tmp_path: Path
) -> None:
    publish(repository)
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(RepositoryError, match="not empty"):
        repository.fetch("cars", 1, tmp_path)
    assert (tmp_path / "mine").read_text() == "keep"
    with pytest.raises(StorageError, match="failed"):
        repository.fetch("cars", 1, tmp_path / "mine")


def test_garbage_is_collected_but_not_what_is_in_use(make: Make, tmp_path: Path) -> None:
    repository = make()
    publish(repository, 9)
    for number in (1, 2, 4, 3):
        repository.activate("cars", number)
    repository.pin("cars", 5)
    assert repository.pinned("cars") == [5]
    assert repository.collect_garbage("cars", keep=2) == [1, 2, 6, 7]
    assert numbers(repository) == [3, 4, 5, 8, 9], "3 serves, 4 is what a rollback goes to, 5 is pinned"
    assert publish(repository) == [10]
    repository.unpin("cars", 5)
    assert repository.rollback("cars") == 4
    assert repository.collect_garbage("cars", keep=1) == [3, 5, 8, 9]
    with pytest.raises(RepositoryError, match="no earlier version"):
        repository.rollback("cars")
    assert repository.active("cars") == 4 and numbers(repository) == [4, 10]
    assert repository.collect_garbage("cars", keep=1) == []
    repository.fetch("cars", 4, tmp_path / "into")
    assert contents(tmp_path / "into") == FILES
    with pytest.raises(AdaptError, match="at least 1"):
        repository.collect_garbage("cars", keep=0)


def test_a_version_that_is_being_removed_cannot_be_taken_into_use(repository: ModelRepository) -> None:
    """The collector has asked who uses it and is about to remove it."""
    publish(repository, 2)
    repository.activate("cars", 2)
    token = repository.active_token("cars")
    overwrite(repository, "cars/removals/00000001", b"")
    with pytest.raises(UnknownVersionError, match="being removed"):
        repository.activate("cars", 1)
    with pytest.raises(UnknownVersionError, match="being removed"):
        repository.pin("cars", 1)
    assert repository.active_token("cars") == token and repository.pinned("cars") == []
    assert repository.collect_garbage("cars", keep=1) == [1], "another one goes on"
    assert numbers(repository) == [2]
    overwrite(repository, "cars/removals/00000002", b"")
    assert repository.collect_garbage("cars") == [] and repository._place.children("cars/removals") == []


@pytest.mark.slow
def test_publishing_activating_and_collecting_at_once(make: Make, tmp_path: Path) -> None:
    """Every publisher gets a number of its own, and what is active is always there."""
    got: list[int] = []
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        repository = make()
        try:
            for turn in range(6):
                number = repository.publish("cars", {"who": f"{seed} {turn}".encode()}, LINEAGE)
                got.append(number)
                try:
                    repository.activate("cars", number)
                except UnknownVersionError:
                    continue  # it was old enough to be collected, which is said
                repository.collect_garbage("cars", keep=3)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for _ in range(5):  # between the two questions the answer may have changed
            active = make().active("cars")
            if active is None or active in numbers(make()):
                break
        else:
            failed.append(AssertionError(f"version {active} serves and is not there"))
            break
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert len(set(got)) == len(got) == 24
    last = make().active("cars")
    assert last in numbers(make()) and max(got) in numbers(make())


CRASHES = """
import os, shutil, signal, sys, time
from pathlib import Path
import fsspec
from gati.versions.repository import Lineage, ModelRepository

folder, kind, action = Path(sys.argv[1]), *sys.argv[2:]
FILES = {f"part{n}/weights.bin": bytes([n]) * 50_000 for n in range(3)}
CALLS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "fcntl.flock"}
os.fsync = lambda descriptor: None  # what a killed process has written is not lost

def opened(later=0.0):
    return ModelRepository(
        folder / "models",
        filesystem=fsspec.filesystem("file") if kind == "folders" else None,
        clock=lambda: time.time() + later,
    )

def publish():
    return opened().publish("cars", FILES, Lineage("ab" * 32))

def listed():
    return [version.version for version in opened().versions("cars")]

def die_at(step):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        seen += event in CALLS
        if event in CALLS and seen == step:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def act():
    publish() if action == "publish" else opened(4000.0).collect_garbage("cars", keep=1)

def whole(number):
    target = folder / "fetched"
    opened().fetch("cars", number, target)
    found = {p.relative_to(target).as_posix(): p.read_bytes() for p in target.rglob("*.bin")}
    shutil.rmtree(target)
    return found == FILES

kills = appeared = 0
for step in range(1, 1000, 1 if action == "publish" else 3):  # there are many to a collection
    shutil.rmtree(folder / "models", ignore_errors=True)
    before = [publish() for _ in range(3)]
    opened().activate("cars", 1)
    if (child := os.fork()) == 0:
        die_at(step)
        act()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    after = listed()
    assert all(map(whole, after)), (step, after)
    assert opened().active("cars") == 1 and {1, 3} <= set(after), (step, after)
    if action == "publish":
        assert after[:3] == before and len(after) <= 4, (step, after)
        appeared += len(after) > 3
    else:
        assert set(after) <= set(before), (step, after)
    fresh = publish()
    assert fresh > max(after) and listed() == [*after, fresh], (step, after, fresh)
    opened(4000.0).collect_garbage("cars", keep=1)
    assert listed() == [1, fresh] and whole(fresh), (step, listed())
    left = [path.relative_to(folder / "models" / "cars").parts for path in (folder / "models").rglob("*")
            if path.is_file()]
    assert not [parts for parts in left if parts[0] in ("temporary", "claims", "removals")], (step, left)
    assert {parts[1] for parts in left if parts[0] == "versions"} == {"00000001", f"{fresh:08d}"}, step
    if status == 0:
        break
    kills += 1
print(kills, appeared)
"""


@pytest.mark.slow
@pytest.mark.parametrize("action", ["publish", "collect"])
@pytest.mark.parametrize("kind", ["directory", "folders"])
def test_killed_at_every_step_versions_are_whole_and_the_next_one_works(
    tmp_path: Path, kind: str, action: str
) -> None:
    """SIGKILL at the first call to the file system, at the second, and so on until the work is done.

    Each time: what is listed is whole, a new version can be published, and what was left is swept up.
    """
    done = subprocess.run(
        [sys.executable, "-c", CRASHES, str(tmp_path), kind, action],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kills, appeared = map(int, done.stdout.split())
    assert kills >= 20
    assert appeared >= 1 if action == "publish" else appeared == 0, "the last one was not killed"


ENDLESS = """
import sys
from gati.versions.repository import Lineage, ModelRepository
repository = ModelRepository(sys.argv[1])
print("go", flush=True)
while True:
    files = {f"w{n}": bytes([n]) * 200_000 for n in range(5)}
    number = repository.publish("cars", files, Lineage("ab" * 32))
    repository.activate("cars", number)
    repository.collect_garbage("cars", keep=4)
    print(number, flush=True)
"""


@pytest.mark.slow
def test_killed_at_any_moment_of_its_life_the_repository_is_whole(tmp_path: Path) -> None:
    repository, newest = ModelRepository(tmp_path / "models"), 0
    for turn in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, str(tmp_path / "models")], stdout=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline() == b"go\n"
        for _ in range(turn % 5):
            assert process.stdout.readline()
        time.sleep(0.002 * turn)  # anywhere in the work that follows
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        found = numbers(repository)
        for number in found:
            fetched = repository.fetch("cars", number, tmp_path / f"{turn}-{number}")
            assert fetched.version == number and len(fetched.files) == 5
        if found:
            assert found[-1] >= newest and repository.active("cars") in (None, *found)
            newest = found[-1]
        own = repository.publish("cars", {f"w{n}": b"" for n in range(5)}, LINEAGE)
        assert own > newest
        newest = own
    assert newest >= 10 + 2 * (1 + 2 + 3 + 4), "ten of ours, and what was published between the kills"


def test_stale_leftovers_go_after_an_hour_and_younger_ones_stay(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path / "models")
    publish(repository)
    for name in ("young", "old"):
        (tmp_path / "models/cars/temporary" / name / "version/files").mkdir(parents=True)
        (tmp_path / "models/cars/temporary" / name / "version/files/w").write_bytes(b"half")
    for path in [
        tmp_path / "models/cars/temporary/old",
        *(tmp_path / "models/cars/temporary/old").rglob("*"),
    ]:
        os.utime(path, (time.time() - 1.1 * HOUR,) * 2)
    repository.collect_garbage("cars")
    assert os.listdir(tmp_path / "models/cars/temporary") == ["young"]
    assert numbers(repository) == [1]


def test_claims_of_others_are_respected_and_swept_when_stale() -> None:
    repository = ModelRepository(f"memory://{uuid.uuid4().hex}")
    publish(repository)
    claim = "cars/claims/00000002/another"
    overwrite(repository, "cars/versions/00000002/files/w", b"half of it")
    overwrite(repository, claim, json.dumps({"time_s": time.time() - 1.1 * HOUR}).encode())
    repository.collect_garbage("cars")
    assert repository._place.read(claim) is not None, "there is no newer version yet"
    overwrite(repository, claim, json.dumps({"time_s": time.time()}).encode())
    assert publish(repository) == [3]
    repository.collect_garbage("cars")
    assert repository._place.read(claim) is not None, "still being published"
    overwrite(repository, claim, json.dumps({"time_s": time.time() - 1.1 * HOUR}).encode())
    repository.collect_garbage("cars")
    assert repository._place.read(claim) is None
    assert repository._place.sizes("cars/versions/00000002") == {}
    assert numbers(repository) == [1, 3] and publish(repository) == [4]


def test_a_publication_that_ends_between_two_questions_is_noticed() -> None:
    """Another one had claimed the same number; it is done when the second question is asked."""
    url = f"memory://{uuid.uuid4().hex}"
    slow, quick = ModelRepository(url), ModelRepository(url)
    publish(quick)
    children = slow._place.children
    asked: list[str] = []
    put = slow._place.put

    def put_late(path: str, data: bytes) -> None:
        """The claim is written when the other has claimed, too, and uploads."""
        put(path, data)
        if path.startswith("cars/claims/00000002/") and not asked:
            overwrite(quick, "cars/claims/00000002/other", json.dumps({"time_s": time.time()}).encode())
            slow._place.children = finish_after_the_first  # type: ignore[method-assign]

    def finish_after_the_first(path: str) -> list[str]:
        found = children(path)
        if not asked:
            version = Version("cars", 2, "now", LINEAGE, {})
            overwrite(quick, "cars/versions/00000002/manifest.json", version.to_json())
            quick._place.remove("cars/claims/00000002/other")
        asked.append(path)
        return found

    slow._place.put = put_late  # type: ignore[method-assign]
    assert publish(slow) == [3] and numbers(quick) == [1, 2, 3]


def test_a_publisher_that_slept_does_not_reuse_the_number_of_a_collected_version() -> None:
    """It had read which numbers are taken, and then others published and collected several versions."""
    url = f"memory://{uuid.uuid4().hex}"
    slow, quick = ModelRepository(url), ModelRepository(url)
    publish(quick)
    listing = slow._place._numbers  # type: ignore[attr-defined]

    def sleep_after(model: str) -> list[int]:
        slow._place._numbers = listing  # type: ignore[attr-defined]
        taken: list[int] = listing(model)
        assert publish(quick, 4) == [2, 3, 4, 5] and quick.collect_garbage("cars", keep=1) == [1, 2, 3, 4]
        return taken

    slow._place._numbers = sleep_after  # type: ignore[attr-defined]
    assert publish(slow) == [6] and numbers(quick) == [5, 6]


def test_a_publisher_that_slept_while_it_uploaded_shares_its_number_with_no_one() -> None:
    """Its claim is stale, so its files may be removed; then it fails, and removes what it has uploaded."""
    url = f"memory://{uuid.uuid4().hex}"
    slow, quick = ModelRepository(url), ModelRepository(url)
    publish(quick)
    store = slow._place._store  # type: ignore[attr-defined]
    given: list[int] = []

    def sleep_before(path: str, source: Any) -> Any:
        slow._place._store = store  # type: ignore[attr-defined]
        (claim,) = quick._place.children("cars/claims/00000002")
        stale = json.dumps({"time_s": time.time() - 1.1 * HOUR}).encode()
        overwrite(quick, f"cars/claims/00000002/{claim}", stale)
        quick.collect_garbage("cars")
        given.extend(publish(quick))
        quick.collect_garbage("cars")
        return store(path, source)

    slow._place._store = sleep_before  # type: ignore[attr-defined]
    with pytest.raises(RepositoryError, match="took too long, so its files were removed"):
        publish(slow)
    assert numbers(quick) == [1, *given]
    assert quick._place.sizes("cars/versions/00000002") == {} and publish(quick) == [4]


def test_a_failed_upload_leaves_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = make()
    publish(repository)
    before = repository._place.sizes("")
    import gati.versions.objects as objects
    import gati.versions.places as places

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for module in (objects, places):
        monkeypatch.setattr(module, "copy", full)
    with pytest.raises(StorageError, match="No space left"):
        publish(repository)
    monkeypatch.undo()
    assert repository._place.sizes("") == before
    assert publish(repository)[0] > 1 and len(numbers(repository)) == 2


def test_a_url_of_a_directory_is_that_directory(tmp_path: Path) -> None:
    publish(ModelRepository(f"file://{tmp_path}/models"))
    assert numbers(ModelRepository(str(tmp_path / "models"))) == [1]


def test_urls_that_name_no_repository_are_refused() -> None:
    with pytest.raises(AdaptError, match="not supported"):
        ModelRepository("nonsense://bucket/models")


def test_the_package_that_an_object_store_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(AdaptError, match="^a repository at s3:// needs another package: pip install s3fs$"):
        ModelRepository("s3://bucket/models")


def test_a_missing_fsspec_is_named_and_a_directory_needs_none(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['fsspec'] = sys.modules['fsspec.core'] = None\n"
        "from gati.versions.repository import ModelRepository\n"
        "from gati.errors import GatiError\n"
        f"print(ModelRepository({str(tmp_path)!r}).versions('cars'))\n"
        "try: ModelRepository('memory://x')\n"
        "except GatiError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[]\n") and 'pip install "gati[stream]"' in done.stdout
