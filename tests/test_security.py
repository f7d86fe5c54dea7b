"""The lower bounds that SECURITY.md names are those that are installed with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path


def test_lower_bounds_are_those_of_the_advisories(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    bounds = dict(re.findall(r"^([\w.-]+)>=([\d.]+)", "\n".join(wanted), re.MULTILINE))
    told = (repository / "SECURITY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w.-]+) \| ([\d.]+) \|", told, re.MULTILINE)
    assert len(rows) >= 9
    assert {name: bounds.get(name) for name, _ in rows} == dict(rows)
