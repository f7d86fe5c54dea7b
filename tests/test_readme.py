"""The README is run: its shell lines fit the command line, its Python runs on the demo's files."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from gati.cli import app
from tests.conftest import REPOSITORY, Demo

TEXT = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SHELL_LINES = [
    line.split("  #")[0].strip()
    for language, block in BLOCKS
    if language == "sh"
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip()
]
PROGRAMS = [block for language, block in BLOCKS if language == "python"]
INLINE = re.findall(r"`(gati [a-z]+[^`\n]*)`", TEXT)


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
    while hasattr(command, "commands"):  # a group of verbs
        command = command.commands[arguments.pop(0)]
    if arguments == ["--help"]:
        return
    options = {name: one for one in command.params for name in one.opts if name.startswith("--")}
    used = [argument for argument in arguments if argument.startswith("--")]
    assert set(used) <= set(options)
    if line in SHELL_LINES:  # a whole command, so it must parse with everything that is required
        command.make_context(f"gati {verb}", arguments)


def test_every_shell_line_is_one_of_ours() -> None:
    assert all(line.startswith(("make ", "gati ")) for line in SHELL_LINES)


def test_every_link_leads_to_a_file() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if not link.startswith("http")]
    assert links
    assert not [link for link in links if not (REPOSITORY / link).exists()]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.strip().splitlines()[-1][:40])
def test_a_program_of_the_readme_runs(program: str, measured_demo: Demo, tmp_path: Path) -> None:
    shutil.copytree(measured_demo.folder, tmp_path / "demo")
    command = [sys.executable, "-c", program]
    there = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=there, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
