"""What `import gati` promises."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import gati

CLASSES = [name for name in gati.__all__ if inspect.isclass(getattr(gati, name))]
FUNCTIONS = [name for name in gati.__all__ if callable(getattr(gati, name)) and name not in CLASSES]


def test_all_is_sorted_and_complete() -> None:
    assert list(gati.__all__) == sorted(gati.__all__)
    assert set(gati.__all__) <= set(dir(gati))
    verbs = {"blocks", "certify", "compose", "demo", "evaluate", "explain", "explore", "export", "load"}
    verbs |= {"bench", "compose_within_latency", "explore_more", "pareto", "predict", "report"}
    assert verbs == set(FUNCTIONS)


# They start processes, ask them, or follow a stream: what they do is in `services` and `gati.adapt`.
SERVICES = {"serve", "query", "stream", "replay"}


def test_every_verb_of_the_command_line_is_a_function() -> None:
    from typer.main import get_command

    from gati.cli import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    verbs = {name for name, command in commands.items() if not hasattr(command, "commands")}
    verbs -= SERVICES
    assert verbs <= set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_says_what_it_does_and_returns(name: str) -> None:
    function = getattr(gati, name)
    assert function.__name__ in (name, f"gati.{name}")  # the second is a room that is called
    assert len(inspect.getdoc(function) or "") > 60
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(one.annotation is not inspect.Parameter.empty for one in signature.parameters.values())


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_says_what_it_is(name: str) -> None:
    assert len(inspect.getdoc(getattr(gati, name)) or "") > 30


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("import gati.compose.composition, gati.explore.library", id="rooms first"),
        pytest.param("gati.explore, gati.compose", id="verbs first"),
        pytest.param("from gati.explore import library", id="a room's module first"),
        pytest.param("from gati import compose, explore", id="verbs by name first"),
        pytest.param("import importlib; importlib.reload(gati)", id="the package loaded again"),
        pytest.param(
            "import importlib, gati.compose.problem; importlib.reload(sys.modules['gati.compose'])",
            id="a room loaded again",
        ),
    ],
)
def test_a_verb_is_a_verb_whatever_was_imported_before(before: str) -> None:
    program = (
        f"import sys, inspect, pickle, gati; {before}\n"
        "import gati.compose.composition, gati.explore.library\n"
        "from gati.explore.library import Library\n"
        "assert Library is gati.Library\n"
        "import gati.compose.problem as p; import gati.explore.library as l\n"
        "from gati.compose import problem\n"
        "assert p is problem is gati.compose.problem and l.Library is Library\n"
        "import gati.compose.compose as home\n"
        "home.compose = lambda path, **wishes: (path, wishes)\n"
        "for verb in (gati.compose, pickle.loads(pickle.dumps(gati.compose))):\n"
        "    assert verb('runs/x', accuracy=0.9) == ('runs/x', {'accuracy': 0.9})\n"
        "assert 'variants' in inspect.signature(gati.explore).parameters\n"
        "assert inspect.getdoc(gati.explore) == inspect.getdoc(sys.modules['gati.explore.explore'].explore)\n"
        "from gati import compose\n"
        "assert compose is gati.compose\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


IMPORTS = """
import pkgutil, sys
from importlib import import_module
import gati

names = ["gati", *(each.name for each in pkgutil.walk_packages(gati.__path__, "gati."))]
names.remove("gati.__main__")  # runs the command line
hidden = []
for name in names if sys.argv[1] == "forwards" else reversed(names):
    parent, _, last = name.rpartition(".")
    found = {}
    exec(f"import {name} as one", found)
    if parent:
        exec(f"from {parent} import {last} as other", found)
    exec(f"import {name}; spelt = {name}", found)
    module = sys.modules[name]
    assert module is import_module(name)
    for way in {"one", "other", "spelt"} & set(found):
        if found[way] is not module:
            hidden.append(f"{name} ({way})")
for verb in gati.__all__:
    assert callable(getattr(gati, verb)) or verb == "__version__", verb
assert not hidden, hidden
print(len(names))
"""


@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_every_module_is_imported_however_it_is_written(order: str) -> None:
    command = [sys.executable, "-c", IMPORTS, order]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_a_room_that_is_called_is_loaded_by_no_more_than_that() -> None:
    """`gati.compose` alone imports no solver, and `gati.explore` no torch."""
    program = (
        "import sys, gati; gati.compose, gati.explore, gati.export, gati.bench, gati.report\n"
        "assert not {'torch', 'numpy', 'scipy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'gati' has no attribute 'divine'"):
        gati.divine  # noqa: B018
