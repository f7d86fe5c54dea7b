"""Offering never waits, nothing is kept twice or by half, and what is lost is counted."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from gati.errors import AdaptError, StorageError
from gati.samples.store import Batch, Record, RecordStore
from gati.samples.writer import BackgroundWriter, WriterStatistics
from tests.samples.conftest import Postgres
from tests.waiting import LONG_S, returns, until

QUICK = (0.01, 0.05)


def record(number: int, side: int = 8) -> Record:
    image = np.full((side, side, 3), number % 251, dtype=np.uint8)
    return Record(image, "image", base_class=number, time_s=time.time(), model="m")


def numbers(store: RecordStore) -> list[int]:
    kept = store.window("m")
    assert all((each.input == each.base_class % 251).all() for each in kept), "no half record"
    return sorted(each.base_class for each in kept)


def balanced(counts: WriterStatistics) -> bool:
    return counts.offered == counts.written + counts.dropped + counts.waiting


class Wrapped(RecordStore):
    """A store whose `add` can be made to misbehave."""

    def __init__(self, store: RecordStore) -> None:
        super().__init__(
            store._engine, where=store.where, limit_bytes=store.limit_bytes, max_age_s=store.max_age_s
        )
        self.before: Callable[[Sequence[Record]], None] = lambda _: None
        self.after: Callable[[Sequence[Record]], None] = lambda _: None
        self.batches: list[int] = []

    def add(self, records: Sequence[Record], *, batch: Batch | None = None) -> None:
        self.before(records)
        super().add(records, batch=batch)
        self.batches.append(len(records))
        self.after(records)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Wrapped]:
    with RecordStore.open(f"sqlite:///{tmp_path}/r.db") as opened:
        yield Wrapped(opened)


def test_what_is_offered_is_written_in_batches(store: Wrapped) -> None:
    with BackgroundWriter(store, batch_records=50, gather_s=LONG_S) as writer:
        assert all(writer.offer(record(n)) for n in range(220))
        until(lambda: writer.statistics().written == 200)
        counts = writer.close(deadline_s=LONG_S)
        assert (counts.offered, counts.written, counts.dropped, counts.waiting) == (220, 220, 0, 0)
    assert numbers(store) == list(range(220))
    assert store.batches == [50, 50, 50, 50, 20]


def test_a_lone_record_is_written_soon(store: Wrapped) -> None:
    with BackgroundWriter(store, gather_s=0.01) as writer:
        for n in range(3):
            writer.offer(record(n))
            until(lambda n=n: store.count() == n + 1)  # type: ignore[misc]


def test_offering_never_waits_though_the_store_does_not_answer(store: Wrapped) -> None:
    answer = threading.Event()
    store.before = lambda _: answer.wait() and None
    with BackgroundWriter(store, queue_records=500, gather_s=0.0) as writer:
        kept = returns(lambda: [writer.offer(record(n)) for n in range(2000)])
        assert kept == [True] * 500 + [False] * 1500, "the bound counts the batch under way, too"
        assert writer.statistics().dropped == 1500 and balanced(writer.statistics())
        answer.set()
        assert writer.flush(LONG_S)
    assert numbers(store) == list(range(500))


def test_the_queue_is_bounded_in_bytes_too(store: Wrapped) -> None:
    answer = threading.Event()
    store.before = lambda _: answer.wait() and None
    with BackgroundWriter(store, queue_bytes=10 * record(0, side=32).nbytes) as writer:
        assert [writer.offer(record(n, side=32)) for n in range(12)] == [True] * 10 + [False] * 2
        answer.set()
        assert writer.flush(LONG_S)
        assert writer.offer(record(12, side=32)), "there is room again"
        assert writer.flush(LONG_S)
    assert numbers(store) == [*range(10), 12]


def test_a_record_larger_than_the_store_is_dropped_at_once(tmp_path: Path) -> None:
    with (
        RecordStore.open(f"sqlite:///{tmp_path}/r.db", limit_bytes=2000) as small,
        BackgroundWriter(small) as writer,
    ):
        assert not writer.offer(record(1, side=64))
        assert writer.offer(record(2))
        assert writer.flush(LONG_S)
        assert numbers(small) == [2] and writer.statistics().failures == 0


def test_a_commit_that_was_not_heard_of_is_not_kept_twice(store: Wrapped) -> None:
    """The records offered meanwhile are not taken for kept either."""
    deaf = iter([True, True])
    offered = iter(range(10, 16))

    def lose(_: Sequence[Record]) -> None:
        if next(deaf, False):
            for _number in range(3):
                writer.offer(record(next(offered)))
            raise StorageError("the connection was lost during the commit")

    store.after = lose
    writer = BackgroundWriter(store, gather_s=0.0, backoff_s=QUICK)
    for n in range(5):
        writer.offer(record(n))
    assert writer.flush(LONG_S)
    counts = writer.close(LONG_S)
    assert numbers(store) == [*range(5), *range(10, 16)]
    assert (counts.written, counts.failures, counts.dropped, counts.failing) == (11, 2, 0, False)


def test_a_record_that_is_refused_is_dropped_and_the_others_are_kept(store: Wrapped) -> None:
    def refuse(records: Sequence[Record]) -> None:
        if any(each.base_class in (3, 40) for each in records):
            raise AdaptError("never that one")

    store.before = refuse
    with BackgroundWriter(store, batch_records=20, gather_s=LONG_S) as writer:  # so all batches are full
        for n in range(60):
            writer.offer(record(n))
        assert writer.flush(LONG_S)
        counts = writer.statistics()
        assert (counts.written, counts.dropped) == (58, 2)
        assert counts.last_error == "never that one"
    assert numbers(store) == [n for n in range(60) if n not in (3, 40)]
    assert store.batches == [1] * 19 + [20] + [1] * 19, "one by one only where it must be"


def test_an_error_nobody_foresaw_does_not_end_the_thread(store: Wrapped) -> None:
    bugs = iter([ZeroDivisionError(), ZeroDivisionError()])

    def fail(_: Sequence[Record]) -> None:
        if (bug := next(bugs, None)) is not None:
            raise bug

    store.before = fail
    with BackgroundWriter(store, gather_s=0.0) as writer:
        writer.offer(record(1))
        assert writer.flush(LONG_S)
        writer.offer(record(2))
        until(lambda: writer.statistics().waiting == 0)
        writer.offer(record(3))
        assert writer.flush(LONG_S)
        assert numbers(store)[-1] == 3 and balanced(writer.statistics())


def test_failures_are_tried_again_ever_less_often(store: Wrapped) -> None:
    times: list[float] = []

    def away(_: Sequence[Record]) -> None:
        times.append(time.monotonic())
        raise StorageError("away")

    store.before = away
    writer = BackgroundWriter(store, gather_s=0.0, backoff_s=(0.02, 0.2))
    writer.offer(record(0))
    until(lambda: len(times) >= 7)
    waits = np.diff(times[:7])
    assert all(wait >= 0.75 * min(0.2, 0.02 * 2**n) for n, wait in enumerate(waits))
    assert writer.statistics().failing and writer.statistics().last_error == "away"
    store.before = lambda _: None
    assert writer.flush(LONG_S)
    assert not writer.close(LONG_S).failing and numbers(store) == [0]


def test_closing_writes_what_waits_and_takes_no_more(store: Wrapped) -> None:
    writer = BackgroundWriter(store, gather_s=30.0)
    for n in range(300):
        writer.offer(record(n))
    counts = writer.close(LONG_S)
    assert (counts.written, counts.dropped, counts.waiting) == (300, 0, 0)
    assert not writer.offer(record(300)) and writer.close(LONG_S).dropped == 1
    assert numbers(store) == list(range(300))
    assert not writer._thread.is_alive()


def test_closing_keeps_its_deadline_though_the_store_does_not_answer(store: Wrapped) -> None:
    answer = threading.Event()
    store.before = lambda _: answer.wait() and None
    writer = BackgroundWriter(store, gather_s=0.0)
    for n in range(10):
        writer.offer(record(n))
    begin = time.monotonic()
    counts = returns(lambda: writer.close(deadline_s=0.3))
    assert time.monotonic() - begin >= 0.25
    assert (counts.written, counts.dropped, counts.waiting) == (0, 10, 0)
    answer.set()
    writer._thread.join(LONG_S)
    assert not writer._thread.is_alive() and balanced(writer.statistics())


def test_closing_does_not_sit_out_a_long_pause(store: Wrapped) -> None:
    fail = iter([True])

    def away(_: Sequence[Record]) -> None:
        if next(fail, False):
            raise StorageError("away")

    store.before = away
    writer = BackgroundWriter(store, gather_s=0.0, backoff_s=(2 * LONG_S, 2 * LONG_S))
    writer.offer(record(0))
    until(lambda: writer.statistics().failing)
    counts = writer.close(deadline_s=LONG_S)  # within which that pause would not end
    assert (counts.written, counts.dropped) == (1, 0)


def test_a_locked_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gati.samples.sql._BUSY_MS", 50)  # for which SQLite itself waits
    with RecordStore.open(f"sqlite:///{tmp_path}/r.db") as store:
        other = sqlite3.connect(tmp_path / "r.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        with BackgroundWriter(store, gather_s=0.0, backoff_s=QUICK) as writer:
            writer.offer(record(1))
            until(lambda: writer.statistics().failures >= 1)
            assert "locked" in (writer.statistics().last_error or "")
            other.execute("COMMIT")
            assert writer.flush(LONG_S)
        assert numbers(store) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["immediate", "fast"])
def test_records_offered_while_postgresql_is_away_are_kept_up_to_the_bound(
    postgres: Postgres, postgres_url: str, mode: str
) -> None:
    with RecordStore.open(postgres_url) as store:
        writer = BackgroundWriter(store, queue_records=100, gather_s=0.0, backoff_s=QUICK)
        feeding, offered, kept = threading.Event(), [0], set()

        def feed() -> None:
            while not feeding.is_set():
                if writer.offer(record(offered[0])):
                    kept.add(offered[0])
                offered[0] += 1
                time.sleep(0.001)

        thread = threading.Thread(target=feed)
        thread.start()
        try:
            until(lambda: writer.statistics().written > 50)
            postgres.stop(mode)  # while records are being written
            try:
                until(lambda: writer.statistics().failing)  # a slow disk may have dropped some before
                before = writer.statistics().dropped
                until(lambda: writer.statistics().dropped > before + 50)
                counts = writer.statistics()
                assert counts.failing and counts.waiting == 100, "the queue is full and stays so"
                with pytest.raises(StorageError, match="cannot be used now"):
                    store.count()
            finally:
                postgres.start()
            until(lambda: not writer.statistics().failing)
        finally:
            feeding.set()
            thread.join()
        assert writer.flush(LONG_S)
        counts = writer.close(LONG_S)
        assert counts.offered == offered[0] and counts.written == len(kept) and balanced(counts)
        assert counts.dropped == offered[0] - len(kept) > 50
        assert numbers(store) == sorted(kept), "each once, none by half, none lost"
        assert store.size_bytes() == sum(each.nbytes for each in store.window("m"))


@pytest.mark.parametrize("bounds", [{"queue_records": 0}, {"queue_bytes": 0}, {"batch_records": 0}])
def test_bounds_that_are_none_are_refused(store: Wrapped, bounds: dict[str, int]) -> None:
    with pytest.raises(AdaptError, match="at least 1"):
        BackgroundWriter(store, **bounds)  # type: ignore[arg-type]
