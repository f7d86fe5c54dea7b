"""Reading traces, and one line for each way in which a file can be wrong."""

from __future__ import annotations

import csv
import gzip
import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.cli import run
from gati.errors import EvictError, TraceError
from gati.evict.replays.page import summary
from gati.evict.replays.replay import replay
from gati.evict.trace.dialogues import read_dialogues
from gati.evict.trace.future import next_uses
from gati.evict.trace.numbering import BlockNumbering, first_places
from gati.evict.trace.read import read_trace
from gati.evict.trace.records import Trace, make_trace
from gati.evict.trace.statistics import statistics
from tests.evict.naive import naive_next_use, tree_trace
from tests.evict.strategies import long_trees

MOONCAKE = [
    {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 900, "output_length": 5, "hash_ids": [0, 3]},
    {"timestamp": 1500, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 4]},
]


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def lines(records: list[dict[str, object]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncakes_json_lines(tmp_path: Path, name: str) -> None:
    trace = read_trace(written(tmp_path, name, lines(MOONCAKE)))
    assert trace.requests == [[0, 1, 2], [0, 3], [0, 1, 4]]
    assert trace.time_s.tolist() == [0.0, 1.5, 1.5]
    assert trace.shared.tolist() == [2, 1, 2]
    found = statistics(trace)
    assert (found["requests"], found["blocks"], found["distinct"]) == (3, 8, 5)
    assert found["most_hits"] == pytest.approx(3 / 8)


@pytest.mark.parametrize(
    ("name", "gzipped"),
    [
        ("t.jsonl", True),
        ("T.JSONL.GZ", True),
        ("t.jsonl.gz", False),
        ("t.jsonl.1", False),
        ("t.jsonl-20261201", False),
        ("t.jsonl-20261201-1764590400.gz", True),
        ("t.jsonl.2.gz", True),
    ],
)
def test_a_file_is_decompressed_if_it_is_gzipped_whatever_its_name(
    tmp_path: Path, name: str, gzipped: bool
) -> None:
    """Servers send traces gzipped under plain names, and browsers decompress them and leave the .gz.

    Rotated logs end with a number.
    """
    content = lines(MOONCAKE).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if gzipped else content)
    assert read_trace(tmp_path / name).requests == [[0, 1, 2], [0, 3], [0, 1, 4]]


def test_bailians_json_lines_have_seconds(tmp_path: Path) -> None:
    records = [
        {"chat_id": 1, "timestamp": 61.114, "turn": 1, "hash_ids": [11, 12]},
        {"chat_id": 2, "timestamp": 62, "turn": 1, "hash_ids": [11]},
    ]
    for first in (61.114, "61.114"):  # numbers in text, too
        records[0]["timestamp"] = first
        assert read_trace(written(tmp_path, "t.jsonl", lines(records))).time_s.tolist() == [61.114, 62.0]


def test_tables_have_the_same_units_as_json_lines(tmp_path: Path) -> None:
    """The table of a trace in seconds was read as if it had lasted a thousandth of that."""
    seconds = read_trace(written(tmp_path, "t.csv", "timestamp,hash_ids\n61.114,11 12\n62,11\n"))
    assert seconds.time_s.tolist() == [61.114, 62.0]
    for whole in ("0,5 6\n1500,5", "0.0,5 6\n1500.0,5"):
        table = read_trace(written(tmp_path, "t.csv", f"timestamp,hash_ids\n{whole}\n"))
        assert table.time_s.tolist() == [0.0, 1.5]


def test_requests_beyond_the_limit_take_no_memory(tmp_path: Path) -> None:
    """The first thousand requests of a log took as much memory as all of it. Its end still says the units."""
    records = [{"timestamp": at, "hash_ids": [*range(50 * at, 50 * at + 50)]} for at in range(300)]
    path = written(tmp_path, "t.jsonl", lines([*records, {"timestamp": 300.5, "hash_ids": [0]}]))
    peaks = []
    for limit in (2, None):
        tracemalloc.start()
        trace = read_trace(path, limit=limit)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(trace) == (limit or 301) and trace.time_s[:2].tolist() == [0.0, 1.0]
    assert peaks[0] < 3 * path.stat().st_size < peaks[1]


@pytest.mark.parametrize(
    ("name", "most"), [("t.jsonl", 12), ("t.jsonl.gz", 12), ("t.csv", 12), ("t.txt", 12), ("t.parquet", 18)]
)
def test_a_trace_whose_blocks_all_differ_takes_few_times_the_memory_of_its_text(
    tmp_path: Path, name: str, most: int
) -> None:
    """With objects for each block, it took 20 to 47 times as much."""
    ids = [[*range(10**8 + 50 * at, 10**8 + 50 * at + 50)] for at in range(400)]
    singles = [each for row in ids for each in row]
    texts = {
        "t.csv": "".join(["time,item\n", *(f"{at},{each}\n" for at, each in enumerate(singles))]),
        "t.txt": "".join(f"{each}\n" for each in singles),
    }
    text = texts.get(name, lines([{"timestamp": at, "hash_ids": row} for at, row in enumerate(ids)]))
    if name == "t.parquet":
        arrow = pytest.importorskip("pyarrow", reason="pyarrow reads Parquet")
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow reads Parquet")
        path, text = tmp_path / name, texts["t.csv"]
        parquet.write_table(arrow.table({"time": [*range(len(singles))], "item": singles}), path)
    else:
        path = written(tmp_path, name, text)
    read_trace(path)  # imports take memory, too
    tracemalloc.start()
    trace = read_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert trace.distinct == len(singles) and trace.blocks.tolist() == [*range(len(singles))]
    assert peak < most * len(text)


@given(
    st.lists(st.lists(st.one_of(st.integers(-3, 3), st.integers(), st.sampled_from("abc")), max_size=5)),
    st.booleans(),
)
def test_blocks_are_numbered_in_the_order_of_their_first_use(rows: list[list[int | str]], flat: bool) -> None:
    """Whole numbers of 64 bits and others, in any order."""
    numbering, numbers = BlockNumbering(flat=flat), dict[int | str, int]()
    kept = [[*dict.fromkeys(row)] if flat else row for row in rows]
    for row in rows:
        numbering.add(row)
    expected = [numbers.setdefault(each, len(numbers)) for row in kept for each in row]
    assert len(numbering) == len(rows)
    blocks, starts, names = numbering.finish()
    assert blocks.tolist() == expected and list(names) == list(numbers)
    assert np.diff(starts).tolist() == [len(row) for row in kept]
    assert first_places(blocks).tolist() == [expected.index(each) for each in range(len(numbers))]


def test_requests_that_can_be_read_only_once_keep_their_first_block() -> None:
    """Whether blocks are whole numbers shows only while they are read."""
    numbering = BlockNumbering(flat=False)
    numbering.add(map(str, [5, 6]))
    assert numbering.finish().names == ["5", "6"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "blocks\na b\na\n"),
        ("t.txt", "a b\na\n"),
        ("t.jsonl", '{"hash_ids": ["a", "b"]}\n{"hash_ids": ["a"]}\n'),
    ],
)
def test_a_mark_of_unicode_belongs_to_no_block(tmp_path: Path, name: str, text: str) -> None:
    """Programs on Windows begin files with it; the first block of a .txt was another one by it."""
    assert read_trace(written(tmp_path, name, "\ufeff" + text)).requests == [[0, 1], [0]]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_blocks_may_hold_any_separator(tmp_path: Path, end: str) -> None:
    """Of JSON, only line feeds and carriage returns end lines; others may be in strings as they are."""
    records = [{"hash_ids": ["a\u2028b", "c\u2029d", "e\x85f"]}, {"hash_ids": ["a\u2028b"]}]
    text = end.join(json.dumps(record, ensure_ascii=False) for record in records)
    assert read_trace(written(tmp_path, "t.jsonl", text)).requests == [[0, 1, 2], [0]]
    damaged = written(tmp_path, "t.jsonl", text + end + end + "{")
    with pytest.raises(TraceError, match="line 4 is not JSON"):
        read_trace(damaged)


def test_csv_and_lines_of_identifiers(tmp_path: Path) -> None:
    table = read_trace(written(tmp_path, "t.csv", 'time_s,blocks\n0.5,a b\n2,"a,c"\n'))
    assert table.requests == [[0, 1], [0, 2]] and table.time_s.tolist() == [0.5, 2.0]
    old = read_trace(written(tmp_path, "t.csv", "blocks\ra b\ra\r"))
    assert old.requests == [[0, 1], [0]], "lines may end as on old machines"
    usual = csv.field_size_limit()
    long = read_trace(written(tmp_path, "t.csv", f"blocks\n{' '.join(map(str, range(50_000)))}\n"))
    assert long.distinct == 50_000
    plain = read_trace(written(tmp_path, "t.txt.gz", "x y x\n\nz x\n"), flat=True)
    assert plain.requests == [[0, 1], [2, 0]] and plain.kind == "flat"
    assert plain.time_s.tolist() == [0.0, 1.0]
    assert csv.field_size_limit() == usual, "it is the whole process's"


def test_an_identifier_is_its_text_however_it_is_written_or_kept(tmp_path: Path) -> None:
    """Those that are written as whole numbers usually are, are kept as numbers; 007 is not 7."""
    kinds = [
        "7",
        "007",
        "-7",
        "-07",
        "+7",
        "7_0",
        "70",
        "\u0667",
        "-",
        "--7",
        "7.0",
        "x7",
        str(10**30),
        "1" * 5_000,
    ]
    rows = [kinds[: number % len(kinds) + 1] for number in range(2 * len(kinds))]
    for name, head in (("t.txt", ""), ("t.csv", "blocks\n")):
        text = head + "".join(" ".join(row) + "\n" for row in rows)
        trace = read_trace(written(tmp_path, name, text))
        assert trace.requests == [[*range(len(row))] for row in rows]
    for name in ("7", str(2**64)):  # the latter is kept in a dictionary
        forms = f'"{name} 007"', f'["{name}", "007"]', f'[{name}, "007"]', f'"[{name}, 007]"'
        text = "".join(f'{{"ids": {form}}}\n' for form in forms)
        assert read_trace(written(tmp_path, "t.jsonl", text)).requests == [[0, 1]] * 4
    wrong = written(tmp_path, "t.txt", "7 8\n9 8\n")
    with pytest.raises(TraceError, match="8 follows 7 in line 1, 9 in line 2"):
        read_trace(wrong)


def test_a_file_that_was_joined_from_many_gzipped_ones_takes_no_time_for_each_rest(tmp_path: Path) -> None:
    """Programs that append, and bgzip, write thousands; what was left was copied after each one."""
    path = tmp_path / "t.txt.gz"
    path.write_bytes(b"".join(gzip.compress(b"%d\n" % at) for at in range(300)) + b"\0" * 200_000)
    tracemalloc.start()
    assert read_trace(path).requests == [[at] for at in range(300)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * path.stat().st_size


def test_parquet_where_pyarrow_is_installed(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow reads Parquet")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow reads Parquet")
    path = tmp_path / "t.parquet"
    parquet.write_table(arrow.table({"timestamp": [0, 1500], "hash_ids": [[5, 6], [5]]}), path)
    trace = read_trace(path)
    assert trace.requests == [[0, 1], [0]] and trace.time_s.tolist() == [0.0, 1.5]


WRONG = [
    ("t.jsonl", '{"hash_ids": [1]}\n{nonsense\n', r"line 2 is not JSON \(.*\): '{nonsense'"),
    ("t.jsonl", "[1, 2]\n", r"line 1 is not a JSON object: '\[1, 2\]'"),
    (
        "t.jsonl",
        '{"hash_ids": [1]}\n{"ids_of": [1]}\n',
        r"line 2 has no blocks: none of hash_ids, .* among ids_of",
    ),
    ("t.jsonl", '{"hash_ids": [1.5]}\n', r"line 1: hash_ids holds 1\.5; blocks are whole numbers or text"),
    ("t.jsonl", '{"hash_ids": 1.5}\n', r"line 1: hash_ids holds 1\.5; blocks are whole numbers or text"),
    ("t.jsonl", '{"hash_ids": {"a": 1}}\n', "line 1: hash_ids holds {'a': 1}; blocks are whole numbers"),
    ("t.jsonl", 100_000 * "[" + "\n", r"line 1 is not JSON \(maximum recursion"),
    (
        "t.jsonl",
        '{"hash_ids": [1], "block_size": 16}\n{"hash_ids": [2], "block_size": 32}\n',
        "line 2: block_size is 32, 16 in line 1; all blocks must be of one size",
    ),
    (
        "t.csv",
        "obj_id,ids,obj_size\n1,a,5\n2,b,6\n",
        "line 3: obj_size is '6', '5' in line 2; all blocks must",
    ),
    ("t.jsonl", "\n\n", "has no requests"),
    ("t.jsonl", '{"hash_ids": []}\n', r"all requests of t\.jsonl are empty"),
    (
        "t.jsonl",
        '{"timestamp": 5, "hash_ids": [1]}\n{"timestamp": 4, "hash_ids": [1]}\n',
        r"line 2: time goes back from 0\.005 to 0\.004 s; sort the requests",
    ),
    (
        "t.jsonl",
        '{"timestamp": 1763840000123, "hash_ids": [1]}\n{"timestamp": 1763840000120, "hash_ids": [1]}\n',
        r"line 2: time goes back from 1763840000\.123 to 1763840000\.12 s; sort the requests",
    ),
    ("t.jsonl", '{"timestamp": NaN, "hash_ids": [1]}\n', "line 1: timestamp is nan; times must be finite"),
    (
        "t.jsonl",
        '{"timestamp": 1%s, "hash_ids": [1]}\n' % (400 * "0"),
        "line 1: timestamp is '10+', not a number",
    ),
    ("t.jsonl", '{"timestamp": "noon", "hash_ids": [1]}\n', "line 1: timestamp is 'noon', not a number"),
    (
        "t.jsonl",
        '{"timestamp": 1, "hash_ids": [1]}\n{"hash_ids": [1]}\n',
        "line 2 has no time, but others have",
    ),
    (
        "t.jsonl",
        '\n{"hash_ids": [12, 57]}\n{"hash_ids": [3]}\n{"hash_ids": [40, 57]}\n',
        r"the blocks do not form a prefix tree: 57 follows 12 in line 2, 40 in line 4; .*--flat",
    ),
    (
        "t.jsonl",
        '{"hash_ids": [1, 2, 1]}\n',
        "the blocks do not form a prefix tree: 1 follows nothing in line 1, 2 in line 1",
    ),
    (
        "t.csv",
        "TIMESTAMP,ContextTokens\n1,2\n",
        "line 2 has no blocks: none of .* among TIMESTAMP, ContextTokens",
    ),
    (
        "t.csv",
        "time_s,blocks\n\n1,a b,c\n",
        "line 3 has more fields than the header: separate blocks by blanks",
    ),
    ("t.parquet", "no parquet", r"is not a Parquet file|needs pyarrow: pip install 'gati\[evict\]'"),
    ("t.xls", "1", r"unknown format \.xls; give JSON lines \(\.jsonl\), CSV"),
]


@pytest.mark.parametrize(("name", "text", "message"), WRONG, ids=[message[:40] for *_, message in WRONG])
def test_what_is_wrong_with_a_file_is_said_in_one_line(
    tmp_path: Path, name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value) and name in str(caught.value)
    assert run(["evict", "inspect", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.jsonl does not exist; give a file with a trace"):
        read_trace(tmp_path / "nowhere.jsonl")
    packed = gzip.compress(b'{"hash_ids": [1]}')
    for damaged in (packed[:12] + b"\xff" * 8 + packed[20:], packed[:-9]):
        (tmp_path / "t.jsonl.gz").write_bytes(damaged)
        with pytest.raises(TraceError, match=r"t\.jsonl\.gz cannot be read: "):
            read_trace(tmp_path / "t.jsonl.gz")
    for damaged, reason in (
        (packed[:-9], "its gzipped content is incomplete"),
        (packed + b"more", "something else follows its gzipped content"),
        (b"\xff" + packed[1:], r"is not UTF-8 text, gzipped or not \(invalid start byte at byte 0\); give"),
    ):
        for read in (read_trace, read_dialogues):
            (tmp_path / "t.jsonl.gz").write_bytes(damaged)
            with pytest.raises(TraceError, match=reason):
                read(tmp_path / "t.jsonl.gz")
    (tmp_path / "t.jsonl.gz").write_bytes(packed + gzip.compress(b'\n{"hash_ids": [2]}') + b"\0" * 100)
    assert len(read_trace(tmp_path / "t.jsonl.gz").requests) == 2
    (tmp_path / "t.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match=r"t\.txt is not UTF-8 text"):
        read_trace(tmp_path / "t.txt")
    with pytest.raises(TraceError, match="--limit is 0; keep at least one request"):
        read_trace(written(tmp_path, "t.txt", "a\n"), limit=0)


@given(long_trees)
@settings(max_examples=50, deadline=None)
def test_the_next_use_is_the_next_request_with_the_block(trace: Trace) -> None:
    after = next_uses(trace)
    at = 0
    for number, row in enumerate(trace.requests):
        for block in row:
            assert after[at] == naive_next_use(trace, number, block)
            at += 1


def test_a_request_longer_than_the_cache_is_counted_and_cut() -> None:
    trace = tree_trace([[1, 2, 3, 4], [1, 2, 3, 4], [1]])
    outcome = replay(trace, [2], ["lru"]).outcomes[0]
    assert (outcome.hits, outcome.truncated) == (3, 2)


@pytest.mark.parametrize("size", [0, -1, 5])
def test_sizes_that_make_no_sense_say_which_would_do(size: int) -> None:
    with pytest.raises(
        EvictError, match=f"the cache size is {size} blocks; give 1 to 4, the number of distinct blocks"
    ):
        replay(tree_trace([[1, 2, 3, 4]]), [size], ["lru"])


def test_hits_beyond_what_everybody_shares() -> None:
    trace = tree_trace([[0, 1], [0, 2], [0, 1], [0, 3]])
    outcome = replay(trace, [4], ["lru"]).outcomes[0]
    assert outcome.hit_rate == pytest.approx(4 / 8)
    assert outcome.hit_rate_beyond_shared == pytest.approx(1 / 4)


def test_a_replay_as_json_is_strict_and_complete() -> None:
    trace = tree_trace([[0, 1], [0, 2], [0, 3], [0, 1]])
    result = replay(trace, [3], ["lru", "gati", "opt-leaf", "opt"], predictor="oracle", seeds=(0, 1))
    document = json.loads(result.to_json(), parse_constant=lambda text: pytest.fail(text))
    assert document["trace"]["distinct"] == 4
    assert [row["policy"] for row in document["outcomes"]] == ["lru", "gati", "gati", "opt-leaf", "opt"]
    gati = document["outcomes"][1]
    assert gati["gap_closed"] == pytest.approx(1.0)
    assert {"excess", "allowance", "alarms", "trials", "share_learned"} == set(gati["guard"])
    assert {"mean", "p50", "p99"} == set(gati["decision_us"])
    assert math.isfinite(gati["blocks_per_s"]) and gati["phases"] >= 1 and gati["caught"] == 0


def test_a_summary_has_the_means_of_all_seeds() -> None:
    """It had the hit rate of all, and the share of the gap of the first alone."""
    trace = tree_trace([[number % 7, number % 5] for number in range(200)])
    result = replay(trace, [6], ["lru", "gati", "opt-leaf"], predictor="noise:0.5", seeds=range(4))
    of_gati = [each for each in result.outcomes if each.policy == "gati"]
    gaps = [each.gap_closed for each in of_gati if each.gap_closed is not None]
    assert len(set(gaps)) > 1, "the seeds differ"
    row = next(row for row in summary(result) if row["policy"] == "gati")
    assert row["gap"] == pytest.approx(np.mean(gaps))
    assert row["blocks_per_s"] == pytest.approx(np.mean([each.blocks_per_s for each in of_gati]))
    assert row["decision_us"]["p99"] == pytest.approx(np.mean([each.decision_us["p99"] for each in of_gati]))


def test_a_head_is_a_trace_of_its_own() -> None:
    trace = make_trace([["a"], ["a", "b"], ["c"]], [0.0, 1.0, 2.0])
    head = trace.head(2)
    assert head.requests == [[0], [0, 1]] and head.distinct == 2
    assert np.array_equal(trace.head(9).blocks, trace.blocks)
