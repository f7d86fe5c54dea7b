"""`gati evict` from a terminal: what it says, what it writes, and how it fails."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from gati.cli import run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Conversations of two to five turns, a few at a time."""
    chance = random.Random(0)
    path = tmp_path / "talks.jsonl"
    talks: list[list[int]] = []
    fresh = 1
    with path.open("w") as file:
        for number in range(400):
            goes_on = talks and chance.random() < 0.6
            before = talks.pop(chance.randrange(len(talks))) if goes_on else [0]
            added = chance.randint(1, 4)
            row = before + list(range(fresh, fresh + added))
            fresh += added
            talks = [*talks, row][-8:]
            file.write(json.dumps({"timestamp": 1000 * number, "hash_ids": row}) + "\n")
    return path


def test_inspect_says_what_is_in_it(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = trace.with_suffix(".json")
    assert run(["evict", "inspect", str(trace), "--json", str(target)]) == 0
    said = capsys.readouterr().out
    assert "requests" in said and "400" in said and "gati evict replay" in said
    assert json.loads(target.read_text())["most_hits"] > 0.3


def test_replay_shows_and_writes_hit_rates(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = trace.with_suffix(".json")
    arguments = ["--size", "20,60", "--policy", "lru,gati,opt-leaf,opt", "--predictor", "oracle"]
    assert run(["evict", "replay", str(trace), *arguments, "--json", str(target)]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("lru", "gati", "opt-leaf", "100.0 %"))
    rates = {(row["policy"], row["capacity_blocks"]): row["hit_rate"] for row in _outcomes(target)}
    assert rates["lru", 20] < rates["gati", 20] == rates["opt-leaf", 20] <= rates["opt", 20]


def test_train_then_replay_another_with_it(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trace.parent / "predictor"
    assert run(["evict", "train", str(trace), "--out", str(folder)]) == 0
    assert f"wrote {folder}, trained on 400 requests" in capsys.readouterr().out
    arguments = ["--size", "40", "--policy", "lru,gati", "--predictor", str(folder), "--limit", "200"]
    assert run(["evict", "replay", str(trace), *arguments]) == 0


def test_compare_writes_one_page_that_needs_nothing_else(trace: Path) -> None:
    page = trace.with_suffix(".html")
    arguments = ["--size", "20,40", "--predictor", "noise:0.3", "--seeds", "2", "--limit", "200"]
    assert run(["evict", "compare", str(trace), "--out", str(page), *arguments]) == 0
    html = page.read_text()
    assert html.count("<svg") == 3 and "talks.jsonl" in html
    assert "http://" not in html.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "src=" not in html and "https://" not in html
    assert "points" in html and "opt-leaf" in html and "Not replayed" not in html


def test_compare_without_noise_or_gati_says_so(trace: Path) -> None:
    page = trace.with_suffix(".html")
    arguments = ["--size", "20", "--policy", "lru,opt", "--no-noise", "--limit", "100"]
    assert run(["evict", "compare", str(trace), "--out", str(page), *arguments]) == 0
    assert "Not replayed: leave out --no-noise" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--size", "0"], "a cache of 0 blocks: sizes go from 1 to", id="no size"),
        pytest.param(["--size", "999999"], "a cache of 999999 blocks: sizes go from 1 to", id="all fits"),
        pytest.param(["--size", "many"], "--size 'many' is not a number of blocks", id="no number"),
        pytest.param(["--size", ","], "--size names no size", id="no sizes"),
        pytest.param(["--policy", "mru"], "unknown policy 'mru'; there are lru, fifo", id="policy"),
        pytest.param(
            ["--policy", "lmarker"], "policy lmarker is defined for blocks without parents", id="tree"
        ),
        pytest.param(["--predictor", "magic"], "unknown predictor 'magic'; there are reuse", id="predictor"),
        pytest.param(["--seeds", "0"], "--seeds is 0; replay at least once", id="seeds"),
    ],
)
def test_what_cannot_be_replayed_is_one_line_and_status_2(
    trace: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evict", "replay", str(trace), *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1


@pytest.mark.parametrize("verb", ["inspect", "replay", "train", "compare"])
def test_a_file_that_is_no_trace_leaves_nothing_behind(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("no\n")
    out = ["--out", str(tmp_path / "out")] if verb in ("train", "compare") else []
    assert run(["evict", verb, str(path), *out]) == 2
    assert "line 1 is not JSON" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_to_learn_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.txt"
    path.write_text("a\nb\nc\n")
    assert run(["evict", "train", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "too few blocks that are requested again to learn from" in capsys.readouterr().err


def test_marker_policies_replay_flat_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "clicks.txt"
    chance = random.Random(1)
    path.write_text("".join(f"{int(chance.expovariate(0.1))}\n" for _ in range(600)))
    names = "lru,predictive-marker,lmarker,guard,blindoracle+lru,gati,opt"
    assert (
        run(["evict", "replay", str(path), "--flat", "--size", "8", "--policy", names, "--seeds", "2"]) == 0
    )
    said = capsys.readouterr().out
    assert all(name in said for name in names.split(","))


def _outcomes(path: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(path.read_text())["outcomes"]
    return found
