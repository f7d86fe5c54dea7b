"""Tables on terminals of any width: what is left out is least important, and no number is broken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gati.cli import render
from gati.cli.tables import new_table, show
from tests.test_cli import composition


def with_columns(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gati.cli.tables.console", lambda: Console(width=columns))


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
    header, _, row = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    values = {"name": "one", "a": "1.0 ms", "b": "2.0 ms"}
    assert header.split() == headers.split()
    assert row.split() == " ".join(values[each] for each in headers.split()).split()


def test_a_composition_fits_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Variants, latencies and sizes were broken over two lines."""
    with_columns(80, monkeypatch)
    chosen = composition()
    exits = (replace(chosen.exits[0], block="layer2.10", variant="pyramid(64)", exit_ms=11.9), *chosen.exits)
    render.composition(replace(chosen, exits=exits), tmp_path)
    table = [line for line in capsys.readouterr().out.split("expected:")[0].splitlines() if line.strip()]
    assert len(table) == 2 + len(exits)
    assert "pyramid(64)" in table[2] and "11.900 ms" in table[2]
