"""Tables of `gati evict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gati.cli.tables import new_table, show
from gati.units import percent


def print_fields(found: Mapping[str, Any]) -> None:
    """Print names and values; a mapping takes one line."""
    table = new_table("", "", left=(0, 1))
    table.show_header = False
    for name, value in found.items():
        if isinstance(value, Mapping):
            text = ", ".join(f"{key} {_number(each)}" for key, each in value.items())
        else:
            text = (
                _number(value)
                if isinstance(value, (int, float))
                else str(value if value is not None else "-")
            )
        table.add_row(name.replace("_", " "), text)
    show(table)


def print_outcomes(rows: Sequence[Mapping[str, Any]], *, timed: bool = False) -> None:
    """Print each policy's hit rate at each size; `timed`: also what time hits saved."""
    saved = ("time saved",) if timed else ()
    table = new_table(
        "size",
        "policy",
        "hit rate",
        *saved,
        "beyond shared",
        "gap closed",
        "evicting, p99",
        "blocks/s",
        left=(1,),
    )
    for row in sorted(rows, key=lambda each: int(each["size"])):
        table.add_row(
            f"{row['size']:,}",
            row["policy"],
            row["hit"],
            *([_share(row["time"])] if timed else []),
            row["beyond"],
            _share(row["gap"]),
            f"{row['decision_us']['p99']:.0f} us",
            f"{row['blocks_per_s']:,.0f}",
        )
    show(table, "evicting, p99", "blocks/s", "beyond shared")
    truncated = {row["size"]: row["truncated"] for row in rows if row["truncated"]}
    if truncated:
        size, count = min(truncated.items())
        print(f"note: {count} requests are longer than {size:,} blocks; their later blocks always miss")


def _share(value: float | None) -> str:
    return "-" if value is None else percent(value)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
