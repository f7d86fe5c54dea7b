"""The lower bounds that SECURITY.md names are those that are installed with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path


def test_lower_bounds_are_those_of_the_advisories(repository: Path) -> None:
    """Whoever adds a dependency looks it up, and says so."""
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    bounds = dict(re.findall(r"^([\w.-]+)(?:\[\w+\])?>=([\d.]+)", "\n".join(wanted), re.MULTILINE))
    told = (repository / "SECURITY.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([\w.-]+) \| ([\d.]+) \|", told, re.MULTILINE))
    (others,) = re.findall(r"affects the others at the versions allowed: ([^.]+)\.", told)
    assert len(rows) >= 14
    assert {name: bounds.get(name) for name in rows} == rows
    assert sorted(bounds.keys() - rows.keys()) == re.split(r",\s+", others)
