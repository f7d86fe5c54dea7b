"""Tables on terminals of any width: what is left out is least important, and no number is broken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gati.cli import render
from gati.cli.tables import new_table, show
from gati.exploration.library import Library
from tests.composition.libraries import make_library
from tests.test_cli import composition


def with_columns(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gati.cli.tables.console", lambda: Console(width=columns, color_system=None))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)


@pytest.mark.parametrize(
    ("columns", "headers"),
    [(80, "name a b"), (24, "name a b"), (23, "name b"), (15, "name b"), (14, "name")],
    ids=["all fit", "all just fit", "one less", "two just fit", "two less"],
)
def test_a_table_loses_details_until_it_fits(
    columns: int, headers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_columns(columns, monkeypatch)
    table = new_table("name", "a", "b", left=(0,))
    table.add_row("one", "1.0 ms", "2.0 ms")
    show(table, "a", "b")
    header, _, row, *told = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    values = {"name": "one", "a": "1.0 ms", "b": "2.0 ms"}
    assert header.split() == headers.split()
    assert row.split() == " ".join(values[each] for each in headers.split()).split()
    missing = "; ".join(each for each in ("a", "b") if each not in headers.split())
    assert told == ([f"left out, as the terminal is narrow: {missing}"] if missing else [])


def test_a_pipe_gets_every_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is read by programs, for which no column may come and go with the length of a name."""
    with_columns(20, monkeypatch)
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    table = new_table("name", "a", "b", left=(0,))
    table.add_row("one", "1.0 ms", "2.0 ms")
    show(table, "a", "b")
    out = capsys.readouterr().out
    assert out.splitlines()[1].split() == ["name", "a", "b"] and "left out" not in out


def test_a_composition_fits_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Variants, latencies and sizes were broken over two lines."""
    with_columns(80, monkeypatch)
    chosen = composition()
    exits = (replace(chosen.exits[0], block="layer2.10", variant="pyramid(64)", exit_ms=11.9), *chosen.exits)
    render.composition(replace(chosen, exits=exits), tmp_path)
    table = [line for line in capsys.readouterr().out.split("left out,")[0].splitlines() if line.strip()]
    assert len(table) == 2 + len(exits)
    assert "pyramid(64)" in table[2] and "11.900 ms" in table[2]


@pytest.mark.parametrize(
    ("statuses", "sentence"),
    [
        (["trained"], "1 variant (1 trained); all of them"),
        (["skipped", "trained", "skipped"], "3 variants (2 skipped, 1 trained); all of them"),
    ],
)
def test_a_library_says_how_many_variants_it_has(
    statuses: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    explored = make_library(tmp_path / "library", blocks=len(statuses), variants=1, outcomes=False)
    trials = [replace(each, status=status) for each, status in zip(explored.trials, statuses, strict=True)]
    explored.write_trials(trials, [])
    render.library(Library.open(explored.directory))
    assert sentence in capsys.readouterr().out
