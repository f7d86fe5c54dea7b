"""`gati evict` from a terminal: what it says, what it writes, and how it fails."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from gati.cli import run
from gati.evict.trace.dialogues import halves
from tests.evict.talking import talks, write

pytestmark = pytest.mark.slow


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
    assert "─" not in said  # no line below a header without words
    assert json.loads(target.read_text())["most_hits"] > 0.3


def test_replay_shows_and_writes_hit_rates(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = trace.with_suffix(".json")
    arguments = ["--size", "20,60", "--policy", "lru,gati,opt-leaf,opt", "--predictor", "oracle"]
    assert run(["evict", "replay", str(trace), *arguments, "--json", str(target)]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("lru", "gati", "opt-leaf", "100.0 %"))
    rates = {(row["policy"], row["capacity_blocks"]): row["hit_rate"] for row in _outcomes(target)}
    assert rates["lru", 20] < rates["gati", 20] == rates["opt-leaf", 20] <= rates["opt", 20]
    assert "time saved" not in said


def test_replay_says_what_time_was_saved_if_blocks_differ_in_cost(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = trace.with_suffix(".json")
    arguments = ["--size", "20", "--policy", "lru,gati,opt", "--predictor", "oracle", "--cost-growth", "0.5"]
    assert run(["evict", "replay", str(trace), *arguments, "--json", str(target)]) == 0
    assert "time saved" in capsys.readouterr().out
    saved = {str(row["policy"]): row["time_saved"] for row in _outcomes(target)}
    assert saved["lru"] < saved["gati"] and saved["opt"] is None  # type: ignore[operator]


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
        pytest.param(["--size", "0"], "the cache size is 0 blocks; give 1 to", id="no size"),
        pytest.param(["--size", "999999"], "the cache size is 999999 blocks; give 1 to", id="all fits"),
        pytest.param(["--size", "many"], "--size 'many' is not a number of blocks", id="no number"),
        pytest.param(["--size", ","], "--size is empty", id="no sizes"),
        pytest.param(["--policy", ","], "--policy is empty", id="no policies"),
        pytest.param(["--policy", "mru"], "unknown policy 'mru'; choose one of lru, fifo", id="policy"),
        pytest.param(["--policy", "lmarker"], "policy lmarker supports only independent blocks", id="tree"),
        pytest.param(
            ["--predictor", "magic"], "unknown predictor 'magic'; choose one of reuse", id="predictor"
        ),
        pytest.param(["--seeds", "0"], "--seeds is 0; give at least 1", id="seeds"),
        pytest.param(["--cost-growth", "-1"], "cost_growth is -1.0; give a number from 0", id="cost"),
        pytest.param(["--cost-growth", "1", "--flat"], "cost_growth needs paths", id="cost of rows"),
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


@pytest.mark.parametrize("seed", [-1, 2**32])
@pytest.mark.parametrize("arguments", [["train", "--out", "out"], ["train", "--dialogues", "--out", "out"]])
def test_a_seed_that_cannot_be_used_to_train_is_one_line_and_status_2(
    trace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], seed: int
) -> None:
    assert run(["evict", *arguments, str(trace), "--seed", str(seed)]) == 2
    assert capsys.readouterr().err == f"error: --seed is {seed}; give a number from 0 to {2**32 - 1}\n"


@pytest.mark.parametrize("policy", ["gati", "lru"])
def test_a_seed_that_cannot_be_used_to_serve_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    assert run(["evict", "engine", "--policy", policy, "--seed", "-1"]) == 2
    assert capsys.readouterr().err == "error: --seed is -1; give a number from 0 to 4294967295\n"


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


def test_from_dialogues_to_a_replay_of_lpc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dialogues = write(tmp_path / "talks.jsonl", talks(300))
    folder, stream = tmp_path / "continuation", tmp_path / "stream.jsonl.gz"
    assert run(["evict", "train", str(dialogues), "--dialogues", "--out", str(folder)]) == 0
    assert "dialogues; Matthews' correlation on the others 0." in capsys.readouterr().out
    shape = ["--active", "60", "--gap", "100s", "--for", "30m", "--block", "4"]
    assert run(["evict", "synthesise", str(dialogues), *shape, "--out", str(stream)]) == 0
    assert f"wrote {stream}:" in capsys.readouterr().out
    target = tmp_path / "out.json"
    arguments = ["--size", "150", "--policy", "lru,lpc,lpc-oracle", "--gap", "100s", "--json", str(target)]
    assert run(["evict", "replay", str(stream), *arguments, "--continuation", str(folder)]) == 0
    rates = {row["policy"]: row["hit_rate"] for row in _outcomes(target)}
    assert rates["lru"] < rates["lpc"]
    assert {row["predictor"] for row in _outcomes(target)} == {None, str(folder)}


def test_streams_are_of_the_half_held_out_unless_asked_for_all(tmp_path: Path) -> None:
    dialogues = write(tmp_path / "talks.jsonl", talks(100))
    held_out = {message.text for each in halves(talks(100))[1] for message in each.messages}
    texts = []
    for extra in ([], ["--all"]):
        stream = tmp_path / "stream.jsonl"
        assert (
            run(
                [
                    "evict",
                    "synthesise",
                    str(dialogues),
                    "--block",
                    "4",
                    "--for",
                    "5m",
                    *extra,
                    "--out",
                    str(stream),
                ]
            )
            == 0
        )
        rows = [json.loads(line) for line in stream.read_text().splitlines()]
        texts.append({text for row in rows for text in row["prompts"]})
    assert texts[0] <= held_out
    assert not texts[1] <= held_out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["synthesise", "FILE", "--out", "a.csv"], "ends in .jsonl or .jsonl.gz", id="suffix"),
        pytest.param(["synthesise", "FILE", "--active", "0", "--out", "a.jsonl"], "active is 0", id="active"),
        pytest.param(["synthesise", "FILE", "--gap", "soon", "--out", "a.jsonl"], "'soon'", id="gap"),
        pytest.param(
            ["synthesise", "FILE", "--block", "0", "--out", "a.jsonl"],
            "the block size is 0 tokens",
            id="block",
        ),
        pytest.param(["synthesise", "none", "--out", "a.jsonl"], "none does not exist", id="no file"),
        pytest.param(["train", "FILE", "--dialogues", "--flat", "--out", "a"], "are for traces", id="flat"),
        pytest.param(["train", "ONE", "--dialogues", "--out", "a"], "examples of both cases", id="one class"),
        pytest.param(["train", "FILE", "--out", "a"], "line 1 has no blocks", id="dialogues as a trace"),
    ],
)
def test_what_cannot_be_done_with_dialogues_is_one_line_and_status_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "FILE.jsonl", talks(20))
    write(tmp_path / "ONE.jsonl", talks(20, longest=1))
    named = {"FILE": "FILE.jsonl", "ONE": "ONE.jsonl"}
    assert run(["evict", *(named.get(each, each) for each in arguments)]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said and "\n" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["FILE.jsonl", "ONE.jsonl"]


def test_a_size_or_policy_that_is_named_twice_is_replayed_once(trace: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    arguments = ["--size", "20,10,20", "--policy", "lru,fpb,lru", "--seeds", "2", "--json", str(target)]
    assert run(["evict", "replay", str(trace), *arguments]) == 0
    found = [(row["capacity_blocks"], row["policy"], row["seed"]) for row in _outcomes(target)]
    assert found == [(size, *each) for size in (20, 10) for each in (("lru", 0), ("fpb", 0), ("fpb", 1))]


def test_lpc_without_a_model_is_refused(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evict", "replay", str(trace), "--size", "20", "--policy", "lpc"]) == 2
    assert "--continuation DIR" in capsys.readouterr().err
