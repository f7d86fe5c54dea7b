"""Access logs: what engines write is read as it was, and what is cut short costs itself alone."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gati.evict import read_trace
from gati.evict.learn.following import LearningLink, following
from gati.evict.learn.log import AccessLog, name_number, segment_path
from gati.evict.learn.reading import AccessReader
from gati.evict.replays.replay import build
from gati.versions.repository import ModelRepository
from tests.waiting import LONG_S, until


@pytest.fixture(autouse=True)
def no_log_is_closed_before_all_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what a slow machine could not write in two seconds is not there to be read."""
    monkeypatch.setattr("gati.evict.learn.log._CLOSE_S", LONG_S)


def written(folder: Path, count: int, **settings: int) -> AccessLog:
    """A log of `count` requests, closed."""
    log = AccessLog(folder, 100, lambda: {"caught": 3}, **settings)
    for number in range(count):
        log.requested([0, number + 1], 1, 5.0 + number)
    log.close()
    return log


def test_what_is_written_is_read_once_in_order(tmp_path: Path) -> None:
    log = written(tmp_path, 130)
    reader = AccessReader(tmp_path)
    found = list(reader.read())
    assert [record.ids for record in found] == [[0, number + 1] for number in range(130)]
    assert {(record.engine, record.hits, record.capacity_blocks) for record in found} == {
        (log.folder.name, 1, 100)
    }
    assert found[129].time_s - found[0].time_s == pytest.approx(129.0, abs=2e-3)
    assert [number for number, record in enumerate(found) if record.figures] == [63, 127]
    assert list(reader.read()) == [] and log.left_out == 0
    assert len(list(AccessReader(tmp_path).read())) == 130


def test_a_segment_is_a_trace(tmp_path: Path) -> None:
    log = written(tmp_path, 20)
    trace = read_trace(segment_path(log.folder, 1))
    assert (len(trace), trace.distinct) == (20, 21)
    assert trace.time_s[-1] - trace.time_s[0] == pytest.approx(19.0, abs=2e-3)


def test_old_segments_go_and_who_comes_late_reads_the_others(tmp_path: Path) -> None:
    log = written(tmp_path, 400, segment_bytes=1000, segments=3)
    numbers = sorted(int(path.stem) for path in log.folder.iterdir())
    assert len(numbers) <= 3 and numbers[-1] > 20
    reader = AccessReader(tmp_path)
    found = [record.ids[1] for record in reader.read()]
    assert found == list(range(found[0], 401)) and found[0] > 300
    assert (reader.lost, reader.damaged) == (0, 0)


def test_segments_that_went_unread_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    line = b'{"timestamp": 1, "hash_ids": [1], "hits": 0, "capacity_blocks": 5}\n'
    segment_path(folder, 1).write_bytes(line)
    reader = AccessReader(tmp_path)
    assert len(list(reader.read())) == 1
    segment_path(folder, 1).unlink()
    segment_path(folder, 4).write_bytes(line * 2)
    assert len(list(reader.read())) == 2
    assert reader.lost == 2  # 2 and 3


def test_requests_of_several_engines_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    for engine, times in (("b", (1, 4, 5)), ("a", (2, 3, 9)), ("c", (7,))):
        path = segment_path(tmp_path / engine, 1)
        path.parent.mkdir()
        rows = [{"timestamp": 1000 * t, "hash_ids": [t], "hits": 0, "capacity_blocks": 5} for t in times]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [record.ids[0] for record in AccessReader(tmp_path).read()] == [1, 2, 3, 4, 5, 7, 9]


@pytest.mark.parametrize("bytes_lost", [1, 20, 60])
def test_a_line_that_was_cut_short_costs_itself_alone(tmp_path: Path, bytes_lost: int) -> None:
    log = written(tmp_path, 10)
    first = segment_path(log.folder, 1)
    whole = first.read_bytes()
    first.write_bytes(whole[:-bytes_lost])
    reader = AccessReader(tmp_path)
    assert len(list(reader.read())) == 9
    assert reader.damaged == 0  # the rest of it may still come
    segment_path(log.folder, 2).write_bytes(whole.splitlines(keepends=True)[0])
    assert len(list(reader.read())) == 1
    assert reader.damaged == 1


def test_a_line_is_read_when_all_of_it_has_come(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    line = json.dumps({"timestamp": 1, "hash_ids": [1, 2], "hits": 0, "capacity_blocks": 5}).encode() + b"\n"
    reader, found = AccessReader(tmp_path), []
    for place in range(0, len(line), 7):
        with segment_path(folder, 1).open("ab") as file:
            file.write(line[place : place + 7])
        found += reader.read()
    assert [record.ids for record in found] == [[1, 2]]


@pytest.mark.parametrize(
    "line",
    [
        b"", b"[]", b"7", b"\xff", b"{}", b'{"hash_ids": [1]}', b"[" * 100_000,
        b'{"timestamp": 1, "hash_ids": [], "hits": 0, "capacity_blocks": 5}',
        b'{"timestamp": 1, "hash_ids": ["a"], "hits": 0, "capacity_blocks": 5}',
        b'{"timestamp": 1, "hash_ids": [true], "hits": 0, "capacity_blocks": 5}',
        b'{"timestamp": NaN, "hash_ids": [1], "hits": 0, "capacity_blocks": 5}',
        b'{"timestamp": 1, "hash_ids": [1], "hits": 2, "capacity_blocks": 5}',
        b'{"timestamp": 1, "hash_ids": [1], "hits": 0, "capacity_blocks": 0}',
        b'{"timestamp": 1, "hash_ids": [1], "hits": 0, "capacity_blocks": 5, "figures": 3}',
    ],
)  # fmt: skip
def test_lines_that_are_no_requests_are_passed_over(tmp_path: Path, line: bytes) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    good = b'{"timestamp": 1, "hash_ids": [1], "hits": 0, "capacity_blocks": 5}'
    segment_path(folder, 1).write_bytes(b"\n".join((good, line, good, b"")))
    reader = AccessReader(tmp_path)
    assert len(list(reader.read())) == 2
    assert reader.damaged == 1


def test_a_place_that_cannot_be_written_costs_only_the_log(tmp_path: Path) -> None:
    """Nothing is raised; once there is room, a new segment begins."""
    place = tmp_path / "access"
    place.write_text("no folder")
    log = AccessLog(place, 100, dict)
    log.requested([1], 0, 0.0)
    until(lambda: log.failures == 1)
    log.requested([2], 0, 1.0)
    until(lambda: log.left_out == 2)
    place.unlink()

    def tries() -> bool:
        log.requested([3], 0, 2.0)
        return segment_path(log.folder, 1).exists()

    until(tries, every_s=0.05)
    log.close()
    assert {tuple(record.ids) for record in AccessReader(place).read()} == {(3,)}


def test_sweeping_removes_the_oldest_and_folders_that_are_empty(tmp_path: Path) -> None:
    for age, (engine, segment) in enumerate([("new", 2), ("new", 1), ("old", 2), ("old", 1)]):
        path = segment_path(tmp_path / engine, segment)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 1000)
        os.utime(path, (1e9 - age, 1e9 - age))
    reader = AccessReader(tmp_path)
    reader.sweep(4000)
    assert len(list(tmp_path.glob("*/*"))) == 4
    reader.sweep(1500)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*")] == ["new/00000002.jsonl"]
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@given(st.lists(st.integers(-(2**70), 2**70) | st.binary(max_size=40) | st.text(max_size=8), unique=True))
def test_names_become_numbers_that_tell_them_apart(names: list[int | bytes | str]) -> None:
    numbers = [name_number(name) for name in names]
    assert numbers == [name_number(name) for name in names]
    assert len(
        {number for name, number in zip(names, numbers, strict=True) if not isinstance(name, int)}
    ) == sum(not isinstance(name, int) for name in names)
    assert all(
        number == name
        for name, number in zip(names, numbers, strict=True)
        if isinstance(name, int) and abs(name) < 2**63
    )
    assert json.loads(json.dumps(numbers)) == numbers


def test_whatever_goes_wrong_it_goes_on_to_look_for_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Any error but a few ended its thread: the cache kept its version for good, and no one was told."""
    pytest.importorskip("lightgbm")
    looks = []

    def looked(repository: ModelRepository, model: str) -> str:
        looks.append(model)
        raise RuntimeError if len(looks) < 3 else AttributeError("of something else")

    monkeypatch.setattr(ModelRepository, "active_token", looked)
    with caplog.at_level(logging.WARNING, logger="gati.evict"):
        link = LearningLink(build("gati", 8, following), tmp_path, look_every_s=0.001)
        until(lambda: len(looks) > 5)
        link.close()
    said = [record for record in caplog.records if "cannot be loaded" in record.message]
    assert len(said) == 2 and all(record.exc_info for record in said), "each error once"
