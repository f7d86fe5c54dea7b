"""Access logs: what engines write is read as it was, and what is cut short costs itself alone."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gati.evict import read_trace
from gati.evict.learn.following import LearningLink, following
from gati.evict.learn.log import AccessLog, name_number, segment_path
from gati.evict.learn.reading import AccessReader
from gati.versions.repository import ModelRepository
from tests.evict.naive import build
from tests.full_disk import full_at
from tests.waiting import LONG_S, Clock, until


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


class Slow(int):
    """A count that takes its time."""

    def __add__(self, other: int) -> Slow:
        time.sleep(0.05)
        return Slow(int(self) + other)


def test_what_callers_and_the_writing_thread_leave_out_at_once_is_all_counted(tmp_path: Path) -> None:
    log = AccessLog(tmp_path, 100, dict)
    log.close()
    for _ in range(1024):
        log.requested([1], 0, 5.0)  # no one writes any more
    log._again_s = float("inf")
    log.left_out = Slow()
    asking = threading.Thread(target=log.requested, args=([1], 0, 5.0))
    writing = threading.Thread(target=log._write, args=([b"{}", b"{}"],))
    for thread in (asking, writing):
        thread.start()
    for thread in (asking, writing):
        thread.join()
    assert log.left_out == 3


def test_requests_without_blocks_leave_no_line(tmp_path: Path) -> None:
    """Prompts shorter than a block had lines that counted as damaged, and that replay could not read."""
    log = AccessLog(tmp_path, 100, dict)
    for ids in ([], [1, 2], []):
        log.requested(ids, 0, 5.0)
    log.close()
    reader = AccessReader(tmp_path)
    assert [record.ids for record in reader.read()] == [[1, 2]] and reader.damaged == 0


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
        b'{"timestamp": 1, "hash_ids": [1], "hits": 0, "capacity_blocks": 5, "figures": {"evicted": null}}',
        b'{"timestamp": 1, "hash_ids": [1], "hits": 0, "capacity_blocks": 5, "figures": {"caught": NaN}}',
        b'{"timestamp": 1, "hash_ids": [1], "hits": 0, "capacity_blocks": 1%s}' % (b"0" * 400),
        b'{"timestamp": 1, "hash_ids": [5, 6, 5], "hits": 0, "capacity_blocks": 5}',
        b'{"timestamp": 1, "hash_ids": [[5], [5]], "hits": 0, "capacity_blocks": 5}',
        b'{"timestamp": 1e15, "hash_ids": [1], "hits": 0, "capacity_blocks": 5}',
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


def test_clocks_of_engines_may_be_hours_ahead(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    rows = [
        {"timestamp": 1000 * time_s, "hash_ids": [time_s], "hits": 0, "capacity_blocks": 5}
        for time_s in (700, 500_000, 80_000, 90_000)
    ]
    segment_path(tmp_path / "engine", 1).write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = AccessReader(tmp_path, clock=Clock(1000.0))
    assert [record.time_s for record in reader.read()] == [700.0, 80_000.0]
    assert reader.damaged == 2


@pytest.mark.parametrize("place", [1, 3, 4, 7])
def test_who_stops_reading_goes_on_after_the_last_request(tmp_path: Path, place: int) -> None:
    """The rest of what had been read, and the next requests of other engines, were lost without a word."""
    for name, times in (("a", range(0, 20, 2)), ("b", range(1, 20, 2))):
        (tmp_path / name).mkdir()
        lines = [
            f'{{"timestamp": {1000 * time_s}, "hash_ids": [{time_s}], "hits": 0, "capacity_blocks": 5}}\n'
            for time_s in times
        ]
        lines.insert(3, "damaged\n")
        segment_path(tmp_path / name, 1).write_text("".join(lines))
    reader = AccessReader(tmp_path)
    found = []
    with pytest.raises(ZeroDivisionError):
        for record in reader.read():
            found.append(record.ids[0])
            if len(found) == place:
                raise ZeroDivisionError
    assert found + [record.ids[0] for record in reader.read()] == list(range(20))
    assert (reader.damaged, reader.lost) == (2, 0)


def test_a_line_that_is_written_in_part_is_left_out_and_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk takes a part of it without an error. The next request was appended to that part."""
    monkeypatch.setattr("gati.evict.learn.log._AGAIN_S", 0.0)
    log = AccessLog(tmp_path, 100, dict)
    log.requested([1, 2], 0, 0.0)
    path = segment_path(log.folder, 1)
    until(lambda: path.exists() and path.read_bytes().endswith(b"\n"))
    with full_at(path.stat().st_size + 30):
        log.requested([3, 4], 0, 1.0)
        until(lambda: log.failures == 1)
    log.requested([5, 6], 0, 2.0)
    log.close()
    reader = AccessReader(tmp_path)
    assert [record.ids for record in reader.read()] == [[1, 2], [5, 6]]
    assert (log.left_out, log.failures, reader.damaged) == (1, 1, 1)


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


def test_an_engine_whose_newest_segment_was_removed_begins_another(tmp_path: Path) -> None:
    """It wrote on to a file that was never read."""
    log = AccessLog(tmp_path, 100, dict)
    reader = AccessReader(tmp_path)
    found: list[int] = []

    def read() -> bool:
        found.extend(record.ids[0] for record in reader.read())
        return len(found) == number

    for number in (1, 2, 3):
        log.requested([number], 0, float(number))
        until(read)
        reader.sweep(0)
        assert list(tmp_path.iterdir()) == []
    log.close()
    assert found == [1, 2, 3] and reader.lost == log.left_out == 0


def test_a_segment_may_begin_while_a_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = segment_path(tmp_path / "engine", 1)
    old.parent.mkdir()
    old.write_bytes(b"x" * 1000)
    remove = Path.unlink

    def slow(path: Path, missing_ok: bool = False) -> None:
        remove(path, missing_ok)
        path.with_name("00000002.jsonl").write_bytes(b"new")

    monkeypatch.setattr(Path, "unlink", slow)
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(()))  # as it was a moment before
    AccessReader(tmp_path).sweep(0)
    assert old.with_name("00000002.jsonl").exists()


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


def test_a_segment_that_cannot_be_read_keeps_no_other_engine_from_being_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As one on a network that fails: nothing was learned from any engine until it was gone."""
    for engine in ("bad", "good"):
        log = AccessLog(tmp_path, 100, dict)
        log.requested([1], 0, 0.0)
        log.close()
        log.folder.rename(tmp_path / engine)
    blocked = segment_path(tmp_path / "bad", 2)
    blocked.mkdir()
    later = segment_path(tmp_path / "bad", 3)
    later.write_bytes(segment_path(tmp_path / "bad", 1).read_bytes())
    reader = AccessReader(tmp_path)
    assert sorted(record.engine for record in reader.read()) == ["bad", "good"]
    assert list(reader.read()) == []
    assert len(caplog.messages) == 1 and "00000002.jsonl cannot be read (" in caplog.messages[0]
    blocked.rmdir()
    assert [record.engine for record in reader.read()] == ["bad"], "what follows is read as soon as it can be"


def test_segments_that_cannot_be_removed_keep_no_other_from_being_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines of another user: each look at the logs failed before versions and the status were written."""
    for engine in ("own", "theirs"):
        for segment in (1, 2, 3):
            path = segment_path(tmp_path / engine, segment)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"x" * 1000)
            os.utime(path, (1e9 + segment, 1e9 + segment))
    remove = Path.unlink

    def removed(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "theirs":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        remove(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", removed)
    reader = AccessReader(tmp_path)
    for _ in range(2):
        reader.sweep(4000)
    assert len(caplog.messages) == 1 and "cannot be removed (Permission denied)" in caplog.messages[0]
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*"))
    assert left == [
        "own/00000002.jsonl",
        "own/00000003.jsonl",
        *(f"theirs/0000000{n}.jsonl" for n in (1, 2, 3)),
    ]
