"""README and guides are run: shell lines fit the command line, Python runs on the demo's files."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from typer.main import get_command

from benchmarks.latency_plot import COLOURS, ENGINES, INKS, measured_points
from gati.cli import app
from tests.conftest import REPOSITORY, Demo

README = REPOSITORY / "README.md"
TEXT = README.read_text(encoding="utf-8")
PAGES = {path: path.read_text(encoding="utf-8") for path in (README, *sorted(REPOSITORY.glob("docs/*.md")))}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = (README, REPOSITORY / "docs" / "python.md")  # their programs need no more than the demo


def shell_lines(text: str) -> list[str]:
    return [
        line.split("  #")[0].strip()
        for language, block in BLOCK.findall(text)
        if language == "sh"
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip()
    ]


SHELL_LINES = sorted({line for text in PAGES.values() for line in shell_lines(text)})
PROGRAMS = [
    (path.stem, block)
    for path in RUN
    for language, block in BLOCK.findall(PAGES[path])
    if language == "python"
]
INLINE = sorted({line for text in PAGES.values() for line in re.findall(r"`(gati [a-z]+[^`\n]*)`", text)})
MEASURED = (REPOSITORY / "benchmarks" / "README.md").read_text(encoding="utf-8")


def test_the_first_screen_has_the_two_commands() -> None:
    start = TEXT.splitlines()[:30]
    assert any(line.startswith("make demo") for line in start)
    assert any(line.startswith("make test") for line in start)


@pytest.mark.parametrize("line", [line for line in SHELL_LINES if line.startswith("make ")])
def test_make_knows_the_target(line: str) -> None:
    target = shlex.split(line)[1]
    assert re.search(rf"^{target}:.*## ", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("line", [line for line in SHELL_LINES + INLINE if line.startswith("gati ")])
def test_gati_knows_the_verb_and_every_option(line: str) -> None:
    verb, *arguments = shlex.split(line)[1:]
    command = get_command(app).commands[verb]  # type: ignore[attr-defined]
    while hasattr(command, "commands") and arguments:  # a group of verbs
        command = command.commands[arguments.pop(0)]
    if arguments == ["--help"]:
        return
    options = {name: one for one in command.params for name in one.opts if name.startswith("--")}
    used = [argument for argument in arguments if argument.startswith("--")]
    assert set(used) <= set(options)
    if line in SHELL_LINES:  # a whole command, so it must parse with everything that is required
        command.make_context(f"gati {verb}", arguments)


def test_what_is_pinned_runs_on_the_oldest_python_that_the_readme_names() -> None:
    """On Debian 12, with Python 3.11.2, `make demo` could not install one that needed 3.11.5."""
    (oldest,) = re.findall(r"Python (\d\.\d+) or newer", TEXT)
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    too_new = {}
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", pins, re.MULTILINE):
        try:
            found = metadata(name)
        except PackageNotFoundError:  # of another platform
            continue
        if found["Version"] == version and f"{oldest}.0" not in SpecifierSet(found["Requires-Python"] or ""):
            too_new[name] = found["Requires-Python"]
    assert not too_new


def test_every_shell_line_of_the_readme_is_one_of_ours() -> None:
    assert all(line.startswith(("make ", "gati ")) for line in shell_lines(TEXT))


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    pattern = r"""\]\(([^)#]+)|(?:src|srcset)="([^"]+)\""""
    links = [markdown or html for markdown, html in re.findall(pattern, PAGES[page])]
    assert not [link for link in links if not link.startswith("http") and not (page.parent / link).exists()]


def test_the_readme_links_to_the_guides() -> None:
    assert set(re.findall(r"\]\(docs/(\w+\.md)\)", TEXT)) == {path.name for path in PAGES if path != README}


@pytest.mark.parametrize("page", [README, REPOSITORY / "docs" / "results.md"], ids=lambda page: page.name)
def test_every_gain_was_measured(page: Path) -> None:
    """A gain on these pages stands in the tables of `benchmarks`, with all its digits."""
    gains = set(re.findall(r"\d\.\d\dx", PAGES[page]))
    assert gains
    assert not [gain for gain in gains if gain not in MEASURED]


def test_the_picture_shows_the_figures_of_the_benchmarks() -> None:
    points = measured_points(MEASURED)
    assert {point.engine for point in points} == set(ENGINES)
    assert {point.method for point in points} == set(COLOURS)
    for ink in INKS:
        picture = (REPOSITORY / "docs" / "images" / f"latency-{ink}.svg").read_text(encoding="utf-8")
        assert not [point for point in points if f">{point.gain:.2f}x<" not in picture]


# Each has its own names and process, which has imported torch already: that takes longer than the program.
EACH = """
import json, os, sys, torch

for folder, program in json.load(sys.stdin):
    child = os.fork()
    if not child:
        os.chdir(folder)
        if "explore(" in program:
            from gati.exploration import stages

            stages.LEAST_EXIT_STEPS = 4  # nothing needs to be learnt
        exec(program, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit("failed: " + program)
    print("ended", flush=True)
"""


@pytest.mark.slow
def test_the_programs_of_the_readme_run(measured_demo: Demo, tmp_path: Path) -> None:
    assert len(PROGRAMS) > 3
    for page in RUN:  # each must do without what the other has composed
        shutil.copytree(measured_demo.folder, tmp_path / page.stem / "demo")
    command = [sys.executable, "-c", EACH]
    there = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command,
        input=json.dumps(PROGRAMS),
        cwd=tmp_path,
        env=there,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *said, rest = done.stdout.split("ended\n")
    assert len(said) == len(PROGRAMS) and all(each.strip() for each in said) and not rest
