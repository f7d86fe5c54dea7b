"""The record store gives back what it was given, keeps to its bounds, and survives being killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gati.errors import AdaptError, StorageError
from gati.samples.record import OVERHEAD_BYTES, decode, encode
from gati.samples.store import Batch, Record, RecordStore

NOW = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def record(number: int = 0, *, time_s: float = NOW, model: str = "m", side: int = 8, **more: Any) -> Record:
    image = np.full((side, side, 3), number % 256, dtype=np.uint8)
    return Record(image, **{"kind": "image", "base_class": number, "time_s": time_s, "model": model} | more)


def classes(records: list[Record]) -> list[int]:
    return [each.base_class for each in records]


def test_a_record_comes_back_as_it_was(store_url: str) -> None:
    kept = Record(
        np.arange(24, dtype=">f4").reshape(2, 3, 4)[:, ::-1],
        "input",
        base_class=7,
        time_s=NOW - 1.5,
        model="ResNet ü",
        source="rtsp://camera/1",
        exit="layer1.0",
        agreed=False,
        probabilities=np.array([0.25, 0.75], dtype=np.float16),
    )
    with RecordStore.open(store_url, clock=Clock()) as store:
        store.add([kept])
    with RecordStore.open(store_url, clock=Clock()) as store:
        (back,) = store.window("ResNet ü")
    for name in ("kind", "base_class", "time_s", "model", "source", "exit", "agreed"):
        assert getattr(back, name) == getattr(kept, name)
    for array, wanted in ((back.input, kept.input), (back.probabilities, kept.probabilities)):
        assert array is not None and wanted is not None
        assert array.dtype == wanted.dtype and array.flags.writeable
        np.testing.assert_array_equal(array, wanted)


@settings(max_examples=200, deadline=None)
@given(
    array=arrays.arrays(
        st.one_of(
            arrays.boolean_dtypes(),
            arrays.integer_dtypes(endianness="?"),
            arrays.unsigned_integer_dtypes(endianness="?"),
            arrays.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
        ),
        arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    agreed=st.sampled_from([None, True, False]),
)
def test_any_array_of_numbers_survives_its_form_at_rest(array: Any, agreed: bool | None) -> None:
    """Bit for bit, NaNs, empty arrays and arrays without axes included."""
    kept = Record(array, "input", base_class=0, time_s=0.0, model="m", agreed=agreed)
    back = decode(encode(kept))
    assert back.input.dtype == array.dtype and back.input.shape == array.shape
    assert back.input.tobytes() == array.tobytes()
    assert back.agreed is agreed and back.nbytes == kept.nbytes == encode(kept)["bytes"]


def test_the_window_is_the_newest_records_oldest_first(store_url: str) -> None:
    with RecordStore.open(store_url, clock=Clock()) as store:
        store.add([record(n, time_s=NOW - 100 + n) for n in (1, 3, 5)])
        store.add([record(50, model="other"), record(7, time_s=NOW - 93, kind="input")])
        store.add([record(9, time_s=NOW - 91)])
        assert classes(store.window("m")) == [1, 3, 5, 7, 9]
        assert classes(store.window("m", since_s=NOW - 95)) == [5, 7, 9]
        assert classes(store.window("m", limit=2)) == [7, 9]
        assert classes(store.window("m", kind="image", limit=2)) == [5, 9]
        assert classes(store.window("m", since_s=NOW - 97, limit=9, kind="image")) == [3, 5, 9]
        assert store.window("nobody") == []
        assert (store.count(), store.count("m")) == (6, 5)


def test_outcomes_are_those_of_the_window(store_url: str) -> None:
    with RecordStore.open(store_url, clock=Clock(), max_age_s=60.0) as store:
        store.add([record(0, time_s=NOW - 61), record(1, model="other")])
        store.add([record(2, source="v2"), record(3, time_s=NOW - 5, exit="layer1", agreed=False)])
        store.add([record(4, exit="layer2", agreed=True), record(5, exit="layer2")])
        assert store.outcomes("m") == [
            (NOW, "v2", None, None),
            (NOW - 5, "", "layer1", False),
            (NOW, "", "layer2", True),
            (NOW, "", "layer2", None),
        ]
        assert store.outcomes("m")[1].agreed is False, "not 0"
        assert store.outcomes("m", 2) == store.outcomes("m")[2:] and store.outcomes("unknown") == []


def test_the_oldest_go_when_bytes_run_out(store_url: str) -> None:
    each = record().nbytes
    with RecordStore.open(store_url, limit_bytes=5 * each + 1, clock=Clock()) as store:
        for n in range(12):
            store.add([record(n, time_s=NOW - 100 + n)])
            assert store.size_bytes() == each * min(n + 1, 5)
        assert classes(store.window("m")) == [7, 8, 9, 10, 11]
        store.add([record(n) for n in range(20, 40)])
        assert classes(store.window("m")) == [35, 36, 37, 38, 39], "a batch larger than the store: its newest"


def test_after_the_clock_was_set_back_what_comes_is_newer_than_what_was_there(store_url: str) -> None:
    """For as long as the clock was set back, new records were the first to go, and old ones the window."""
    clock = Clock()
    with RecordStore.open(store_url, limit_bytes=4 * record().nbytes, clock=clock) as store:
        store.add([record(n, time_s=clock.now - 10 + n) for n in range(4)])
        clock.now -= 1800.0
        for n in (4, 5):
            clock.now += 1.0
            store.add([record(n, time_s=clock.now)])
        assert classes(store.window("m")) == [2, 3, 4, 5]
        assert classes(store.window("m", limit=2)) == [4, 5]


def test_the_oldest_go_by_age_and_are_not_shown_before(store_url: str) -> None:
    clock = Clock()
    with RecordStore.open(store_url, max_age_s=60.0, clock=clock) as store:
        store.add([record(1, time_s=NOW - 59), record(2, time_s=NOW - 10)])
        clock.now += 5.0
        assert classes(store.window("m")) == [2] and store.count() == 1
        assert store.size_bytes() == 2 * record().nbytes, "still there: nothing was added since"
        store.add([record(3, time_s=clock.now)])
        assert classes(store.window("m")) == [2, 3]
        assert store.size_bytes() == 2 * record().nbytes
        clock.now += 1000.0
        store.add([])
        assert store.size_bytes() == 0 and store.count() == 0


def test_a_time_in_the_future_does_not_push_out_what_comes_later(store_url: str) -> None:
    with RecordStore.open(store_url, limit_bytes=2 * record().nbytes, clock=Clock()) as store:
        store.add([record(1, time_s=NOW + 1e6), record(2, time_s=NOW + 1e6)])
        store.add([record(3), record(4)])
        assert classes(store.window("m")) == [3, 4]


def test_a_lower_limit_is_kept_from_the_next_addition(store_url: str) -> None:
    with RecordStore.open(store_url, clock=Clock()) as store:
        store.add([record(n, time_s=NOW - 50 + n) for n in range(20)])
    with RecordStore.open(store_url, limit_bytes=3 * record().nbytes, clock=Clock()) as store:
        store.add([record(30)])
        assert classes(store.window("m")) == [18, 19, 30]


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 120), st.integers(0, 12)), max_size=6), min_size=1, max_size=8
    ),
    limit=st.integers(1_000, 6_000),
)
def test_the_store_is_the_newest_that_fit_whatever_comes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[tuple[int, int]]], limit: int
) -> None:
    """Against a list kept in memory: without what is too old, cut at the front."""
    clock, model, arrival = Clock(), [], 0
    folder = tmp_path_factory.mktemp("store")
    with RecordStore.open(f"sqlite:///{folder}/r.db", limit_bytes=limit, max_age_s=60, clock=clock) as store:
        for step in steps:
            clock.now += 7.0
            batch = []
            for age, side in step:
                batch.append(record(arrival, time_s=clock.now - age, side=side))
                model.append((clock.now - age, arrival, batch[-1].nbytes))
                arrival += 1
            store.add(batch)
            model = [each for each in model if each[0] >= clock.now - 60]
            while sum(size for *_, size in model) > limit:
                model.pop(0)
            assert classes(store.window("m")) == [number for _, number, _ in model]
            assert store.size_bytes() == sum(size for *_, size in model) <= limit


def test_a_batch_sent_twice_is_kept_once(store_url: str) -> None:
    with RecordStore.open(store_url, clock=Clock()) as store:
        for number in (1, 1, 2, 1, 2):
            store.add([record(number)], batch=Batch("writer", number))
        store.add([record(3)], batch=Batch("another", 1))
        assert sorted(classes(store.window("m"))) == [1, 2, 3]


def test_a_record_larger_than_the_store_is_refused_and_nothing_is_kept(store_url: str) -> None:
    with RecordStore.open(store_url, limit_bytes=2000, clock=Clock()) as store:
        with pytest.raises(AdaptError, match="larger than the whole store"):
            store.add([record(1), record(2, side=30)])
        assert store.count() == 0 and store.size_bytes() == 0


def test_several_threads_write_and_the_counts_are_right(store_url: str) -> None:
    with RecordStore.open(store_url, limit_bytes=40 * record(model="m0").nbytes) as store:
        failed: list[BaseException] = []

        def write(name: str) -> None:
            try:
                for n in range(25):
                    store.add([record(n, time_s=time.time(), model=name)])
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=write, args=(f"m{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert store.count() == 40
        assert store.size_bytes() == sum(each.nbytes for n in range(4) for each in store.window(f"m{n}"))


@pytest.mark.slow
def test_several_processes_make_the_tables_of_one_database_at_once(postgres_url: str) -> None:
    program = (
        "import sys; from gati.samples.store import RecordStore; sys.stdin.read(1);"
        "print(RecordStore.open(sys.argv[1]).count())"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, postgres_url],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    said = [process.communicate("go")[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4 and said == ["0\n"] * 4


def test_a_new_file_that_another_process_is_making_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "records.db"
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.2, other.rollback)
    release.start()
    assert RecordStore.open(f"sqlite:///{file}").count() == 0
    release.join()
    other.close()


KILLED = """
import sys, time
import numpy as np
from gati.samples.store import Batch, Record, RecordStore
store = RecordStore.open(sys.argv[1], limit_bytes=int(sys.argv[3]))
first = int(sys.argv[2])
for batch in range(first, 10**9):
    image = np.full((40, 40, 3), batch % 251, dtype=np.uint8)
    store.add([Record(image, "image", batch, time.time(), "m", source=str(n)) for n in range(5)])
    print(batch, flush=True)
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_whole_batches_and_loses_none_it_told_of(store_url: str) -> None:
    random, started, limit = np.random.default_rng(0), 0, 400 * (4800 + OVERHEAD_BYTES)
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, store_url, str(started), str(limit)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(int(random.integers(1, 9)))]
        time.sleep(float(random.uniform(0.0, 0.02)))  # anywhere in the batch that follows
        os.kill(process.pid, signal.SIGKILL)
        told += process.stdout.read().split()
        process.wait()
        last = int(told[-1])
        with RecordStore.open(store_url, limit_bytes=limit) as store:
            store.add([])  # takes its turn: a server may still commit what the dead had sent it
            kept = store.window("m")
            size = store.size_bytes()
        numbers = classes(kept)
        newest = numbers[-1]
        assert newest in (last, last + 1), "all that was told of, and at most the one under way"
        whole = [number for number in range(numbers[0] + 1, newest + 1) for _ in range(5)]
        oldest = numbers.count(numbers[0])  # of which some may have had to go
        assert 1 <= oldest <= 5 and numbers[oldest:] == whole, "no batch but the oldest lacks any"
        assert all((each.input == each.base_class % 251).all() for each in kept), "no half record"
        assert size == sum(each.nbytes for each in kept) <= limit
        started = newest + 1
    assert started > 24, "there were batches to be lost"


def test_a_full_disk_is_said_and_leaves_what_was_there(tmp_path: Path) -> None:
    with RecordStore.open(f"sqlite:///{tmp_path}/r.db", clock=Clock()) as store:
        store.add([record(1)])
        with store._engine.connect() as connection:  # as many pages as there are now, for this connection
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
        with pytest.raises(StorageError, match="full"):
            store.add([record(n, side=64) for n in range(2, 5)])
        assert classes(store.window("m")) == [1] and store.size_bytes() == record().nbytes


def test_tables_of_a_newer_version_are_refused_and_left_alone(store_url: str) -> None:
    from gati.samples.sql import SCHEMA, sa

    with RecordStore.open(store_url, clock=Clock()) as store:
        store.add([record(1)])
        with store._engine.begin() as connection:
            connection.execute(sa.text(f"UPDATE gati_store SET schema_version = {SCHEMA + 1}"))
        with pytest.raises(AdaptError, match=f"version {SCHEMA + 1}, newer than this Gati reads"):
            RecordStore.open(store_url)
        assert classes(store.window("m")) == [1], "one that is open goes on"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("dtype", "'|O'"),
        ("dtype", "'<f8'"),
        ("shape", "'[8, 8]'"),
        ("shape", "'[-1, 3]'"),
        ("input", "x'00'"),
    ],
)
def test_a_record_that_was_tampered_with_is_refused(tmp_path: Path, column: str, value: str) -> None:
    with RecordStore.open(f"sqlite:///{tmp_path}/r.db", clock=Clock()) as store:
        store.add([record(1)])
        with sqlite3.connect(tmp_path / "r.db") as connection:
            connection.execute(f"UPDATE gati_records SET {column} = {value}")
        with pytest.raises(AdaptError, match="damaged"):
            store.window("m")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.db").write_text("something else, longer than a header is" * 100)
    with pytest.raises(AdaptError, match="not a database"):
        RecordStore.open(f"sqlite:///{tmp_path}/r.db")
    assert (tmp_path / "r.db").read_text().startswith("something else")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://host/name", "not supported"),
        ("sqlite://", "needs a file"),
        ("sqlite:///:memory:", "needs a file"),
        ("nonsense", "is invalid"),
    ],
)
def test_urls_that_name_no_store_are_refused(url: str, said: str) -> None:
    with pytest.raises(AdaptError, match=said):
        RecordStore.open(url)


def test_a_database_that_is_away_is_said_without_its_password() -> None:
    with pytest.raises(StorageError, match="cannot be used now") as raised:
        RecordStore.open("postgresql://user:secret@127.0.0.1:1/name")
    assert "secret" not in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("limits", [{"limit_bytes": 0}, {"max_age_s": 0.0}, {"max_age_s": float("nan")}])
def test_limits_that_are_none_are_refused(tmp_path: Path, limits: dict[str, Any]) -> None:
    with pytest.raises(AdaptError, match="above 0"):
        RecordStore.open(f"sqlite:///{tmp_path}/r.db", **limits)


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": np.array([object()])},
        {"input": np.array(["text"])},
        {"input": [1, 2]},
        {"probabilities": np.zeros(2, dtype=np.complex64)},
        {"kind": "video"},
        {"base_class": -1},
        {"time_s": float("nan")},
        {"model": ""},
        {"source": "a\0b"},
        {"exit": "\udc80"},
    ],
)
def test_records_that_no_store_can_hold_are_refused(wrong: dict[str, Any]) -> None:
    good = {"input": np.zeros(3), "kind": "input", "base_class": 0, "time_s": NOW, "model": "m"}
    Record(**good)
    with pytest.raises(AdaptError):
        Record(**good | wrong)


@pytest.mark.parametrize(
    ("package", "module", "extra"),
    [("sqlalchemy", "gati.samples.store", "stream"), ("psycopg", "gati.samples.store", "postgresql")],
)
def test_a_missing_package_is_named(package: str, module: str, extra: str) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from gati.errors import GatiError\n"
        f"try:\n import {module} as m; m.RecordStore.open('postgresql://127.0.0.1:1/n')\n"
        "except GatiError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert f'pip install "gati[{extra}]"' in done.stdout


def test_a_clock_that_jumps_ahead_empties_nothing(tmp_path: Path) -> None:
    clock, elapsed = Clock(), Clock()
    url = f"sqlite:///{tmp_path}/r.db"
    with RecordStore.open(url, max_age_s=60.0, clock=clock, elapsed=elapsed) as store:
        store.add([record(1, time_s=clock.now)])
        right = clock.now
        clock.now += 1e6  # somebody set it wrong
        store.add([record(2, time_s=clock.now)])
        clock.now = right  # and right again
        assert [each.base_class for each in store.window("m")][:1] == [1]
        for _ in range(100):  # slow corrections are followed, and nothing is kept for ever
            clock.now += 1.0
            elapsed.now += 0.9
        store.add([])
        assert 1 not in [each.base_class for each in store.window("m", since_s=0.0)]


def test_a_store_is_opened_by_the_first_call_that_needs_it(tmp_path: Path) -> None:
    away = tmp_path / "folder"
    away.write_text("no folder", encoding="utf-8")
    store = RecordStore.open(f"sqlite:///{away}/r.db", connect=False)
    with pytest.raises(StorageError, match="cannot write"):
        store.add([record(1, time_s=0.0)])
    away.unlink()
    store.add([record(1, time_s=0.0)])
    assert (away / "r.db").stat().st_mode & 0o777 == 0o600
    with pytest.raises(AdaptError):
        RecordStore.open("mysql://host/name", connect=False)
