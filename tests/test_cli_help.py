"""What `--help` shows of every verb is what was written: square brackets are no markup there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_args

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from gati.cli import app, run
from gati.cli.options import JsonFile

MARKUP = re.compile(r"\[/?bold\]")  # the only markup that help texts use
FRAME = re.compile(r"[\s│╭╮╰╯─]+")


def verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below, with the words that call it."""
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from verbs(each, (*path, name))


def texts(command: Any) -> Iterator[str]:
    """What the code says of a command: its help, its epilog, and those of its options and arguments."""
    for text in (command.help, command.epilog, *(getattr(each, "help", None) for each in command.params)):
        yield from re.split(r"\n\s*\n", text or "")
    yield from (each.metavar or "" for each in command.params)


def bare(text: str) -> str:
    """Without white space and frames: lines may be broken anywhere."""
    return FRAME.sub("", MARKUP.sub("", text).replace("\b", "").replace(r"\[", "["))


VERBS = dict(verbs(get_command(app)))


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_no_help_text_loses_a_character(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 1000)  # nothing is cut, and no column is broken
    done = CliRunner().invoke(app, [*path, "--help"], terminal_width=1000)
    assert done.exit_code == 0, done.output
    shown = bare(done.output)
    lost = [text for text in texts(VERBS[path]) if bare(text) not in shown]
    assert not lost


def test_some_help_text_has_brackets() -> None:
    """Else the test above would show nothing."""
    assert any("[" in MARKUP.sub("", text) for command in VERBS.values() for text in texts(command))


def test_names_with_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Class names and options are the user's words."""
    from gati.cli.query import _show_answer
    from gati.cli.tables import console

    stage = {"stage": "one [a]", "label": "cat [b]", "probability": 1.0, "exit": "base", "from_cache": False}
    stage |= {"option": "big [c]", "model": "m [d]", "version": "v [e]", "latency_ms": 1.0, "budget_ms": 2.0}
    answer = {"label": "cat [b]", "latency_ms": 1.0, "latency_slo_ms": None, "slo_met": None}
    _show_answer({**answer, "stages": [stage], "skipped": ["two [f]"]})
    console().print("blocks [g]")
    said = capsys.readouterr().out
    assert all(f"[{letter}]" in said for letter in "abcdefg"), said


@pytest.mark.parametrize("columns", [60, 80, 110])
def test_paragraphs_fill_the_width(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line ends early only where its next word would not fit, or with its paragraph."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", columns)
    assert run(["explore", "--help"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.split("╭")[0].splitlines()]
    pairs = [(line, after) for line, after in pairwise(lines) if line and after]
    assert len(pairs) > 5
    assert not [line for line, after in pairs if len(line) + 1 + len(after.split()[0]) < columns - 1]


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_flags_show_no_value(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*path, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "<bool>" not in shown
    assert re.search(r"--help\s+-h|-h\s*,\s*--help", shown)


@pytest.mark.parametrize("path", [path for path in VERBS if path], ids=" ".join)
def test_each_help_shows_an_example(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*path, "--help"]) == 0
    assert f"gati {' '.join(path)}" in capsys.readouterr().out.split("Examples:", 1)[1]


def test_every_json_file_may_be_standard_output() -> None:
    """One option of all verbs, so that tables are never in the way of a program that reads JSON."""
    found = {
        path: each for path, command in VERBS.items() for each in command.params if "--json" in each.opts
    }
    assert len(found) > 5
    own = {("stream",), ("adapt", "status")}  # results one by one, and nothing but the document
    shared = get_args(JsonFile)[1].help
    assert not [path for path, option in found.items() if path not in own and option.help != shared]
