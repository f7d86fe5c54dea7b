"""Tables of `gati evict` on a terminal."""

from __future__ import annotations

import pytest

from gati.cli.evict_tables import print_outcomes
from tests.test_cli_tables import with_columns


@pytest.mark.parametrize("timed", [False, True], ids=["hits", "hits and time"])
def test_hit_rates_fit_a_terminal_of_80_columns(
    timed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight columns were broken over two lines."""
    with_columns(80, monkeypatch)
    row = {"size": 20000, "policy": "blindoracle+lru", "hit": "11.0 % (10.90 to 11.10)", "beyond": "12.1 %"}
    row |= {"time": 0.1, "gap": 0.2, "decision_us": {"p99": 12.0}, "blocks_per_s": 1e5, "truncated": 0}
    print_outcomes([row], timed=timed)
    header, _, shown, told = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert header.split()[:4] == ["size", "policy", "hit", "rate"]
    assert shown.split()[:3] == ["20,000", "blindoracle+lru", "11.0"] and shown.split()[-2:] == ["20.0", "%"]
    assert told.startswith("left out, as the terminal is narrow: evicting, p99; blocks/s")
