"""Tables for the terminal, also for one that is narrow."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPE_WIDTH = 160  # most columns without a terminal
_ANY_WIDTH = 10_000


def console() -> Console:
    """The console that prints tables."""
    from rich.console import Console

    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def new_table(*columns: str, left: Iterable[int]) -> Table:
    """An empty table; the columns numbered in `left` are aligned left, the others right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index in left else "right", overflow="fold")
    return table


def show(table: Table, *details: str) -> None:
    """Print a table; while it is wider than the terminal, leave out the next of the columns `details`.

    Otherwise cells would be broken: a number would end on another line than it begins. A line says which
    columns were left out. A pipe or a file gets them all.
    """
    from rich.table import Table

    screen = console()
    left_out: list[str] = []
    for header in details if sys.stdout.isatty() else ():
        if screen.measure(table, options=screen.options.update_width(_ANY_WIDTH)).maximum <= screen.width:
            break
        kept = [column for column in table.columns if column.header != header]
        rows = table.rows
        table = Table(*kept, box=table.box, pad_edge=False, show_header=table.show_header)
        table.rows = rows
        left_out.append(header)
    screen.print(table)
    if left_out:
        print(f"left out, as the terminal is narrow: {'; '.join(left_out)}")
