"""What `gati pipeline` shows of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gati.cli import run


def written(folder: Path, classes: list[str], figures: str = "") -> Path:
    file = folder / "p.toml"
    file.write_text(
        f'class_names = {json.dumps(classes)}\n[stages.only.options]\none = {{ library = "lib"{figures} }}\n'
    )
    return file


def test_a_check_says_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, ["x", "y"])
    assert run(["pipeline", "check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "only: x | y",
        "  one: not measured",
        f"next: gati pipeline measure {file} --data DATA",
    ]
    written(tmp_path, ["x", "y"], ", accuracy = 0.9, latency_ms = 2.0")
    assert run(["pipeline", "check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  one: 90.0 % right, mean 2.00 ms, 95th percentile 2.00 ms",
        f"next: gati serve {file}",
    ]


@pytest.mark.parametrize("verb", [["check"], ["measure", "--data", "x.npz"]])
def test_a_folder_is_not_a_pipeline(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`gati pipeline check .` ended in a report of a defect."""
    assert run(["pipeline", *verb, "."]) == 2
    assert capsys.readouterr().err == "error: . is a folder; give the pipeline's TOML file\n"


@pytest.mark.parametrize(("count", "shown"), [(8, 8), (9, 7), (77, 7)])
def test_of_many_labels_some_are_shown(
    count: int, shown: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stage with 77 intents filled the screen."""
    labels = [f"intent_{number}" for number in range(count)]
    assert run(["pipeline", "check", str(written(tmp_path, labels))]) == 0
    more = [] if shown == count else [f"{count - shown} more"]
    assert capsys.readouterr().out.splitlines()[0] == "only: " + " | ".join([*labels[:shown], *more])


def test_a_check_says_what_the_default_policy_cannot_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`gati serve` refused what `check` had found to be good, after all had been measured."""
    pairs = ("ab", "ac", "ad", "be", "ce", "ef", "df")
    edges = ", ".join(f'{{ from = "{source}", to = "{target}" }}' for source, target in pairs)
    stages = "\n".join(f'[stages.{name}.options]\none = {{ library = "lib" }}' for name in "abcdef")
    file = tmp_path / "p.toml"
    head = f'class_names = ["x", "y"]\nedges = [{edges}]\n'
    file.write_text(f"{head}{stages}\n")
    assert run(["pipeline", "check", str(file)]) == 0
    note, following = capsys.readouterr().out.splitlines()[-2:]
    assert note.startswith("note: the branches b, c, d after stage 'a' share stage 'e' before they meet")
    assert note.endswith("or use policy 'proportional'")
    assert following == f"next: gati pipeline measure {file} --data DATA"
    file.write_text(head + stages.replace('"lib"', '"lib", accuracy = 0.9, latency_ms = 2.0') + "\n")
    assert run(["pipeline", "check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == note  # `gati serve FILE` would refuse it
