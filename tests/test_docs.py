"""The site that `make docs` builds: its pages exist, and the API reference names what there is."""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
HOOKS = (DOCS / "site_hooks.py").read_text(encoding="utf-8")
ELSEWHERE = dict(re.findall(r'^    "([^"]+)": "([^"]+)",$', HOOKS, re.MULTILINE))
REFERENCES = [
    (page.name, name)
    for page in sorted(DOCS.glob("api/*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]


class _Reader(yaml.SafeLoader):
    """Reads `mkdocs.yml`, where functions are named by a tag that only MkDocs knows."""


_Reader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)


def configuration() -> dict[str, Any]:
    read: dict[str, Any] = yaml.load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"), _Reader)
    return read


def pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for entry in nav.values():
            yield from pages_of(entry)
    else:
        for entry in nav:
            yield from pages_of(entry)


def test_the_navigation_has_every_page_once() -> None:
    own = [path.relative_to(DOCS).as_posix() for path in DOCS.glob("**/*.md")]
    assert sorted(pages_of(configuration()["nav"])) == sorted([*own, *ELSEWHERE.values()])


def test_pages_from_elsewhere_exist() -> None:
    assert ELSEWHERE
    assert not [source for source in ELSEWHERE if not (REPOSITORY / source).is_file()]


def test_warnings_are_errors_and_the_site_is_not_committed() -> None:
    settings = configuration()
    assert settings["strict"] is True
    ignored = (REPOSITORY / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert f"{Path(settings['site_dir']).parts[0]}/" in ignored


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "api" / "gati.html").read_text(encoding="utf-8")
    assert 'id="gati.compose"' in reference
    assert 'href="benchmarks.html#video"' in (tmp_path / "results.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "name"), REFERENCES, ids=[name for _, name in REFERENCES])
def test_the_reference_names_what_there_is(page: str, name: str) -> None:
    assert pkgutil.resolve_name(name).__doc__


def test_pre_commit_does_what_make_check_does() -> None:
    settings = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    entries = [hook["entry"] for repo in settings["repos"] for hook in repo["hooks"]]
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = re.search(r"^check: (.*?) ##", makefile, re.MULTILINE)
    assert targets is not None
    assert entries == [f"make {target}" for target in targets[1].split()]
