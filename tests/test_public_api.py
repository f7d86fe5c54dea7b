"""What `import gati` promises."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

import gati

CLASSES = [name for name in gati.__all__ if inspect.isclass(getattr(gati, name))]
FUNCTIONS = [name for name in gati.__all__ if callable(getattr(gati, name)) and name not in CLASSES]


def test_all_is_sorted_and_complete() -> None:
    assert list(gati.__all__) == sorted(gati.__all__)
    assert set(gati.__all__) <= set(dir(gati))
    verbs = {"blocks", "certify", "compose", "demo", "doctor", "evaluate", "explain", "explore", "export"}
    verbs |= {"bench", "compose_within_latency", "explore_more", "load", "pareto", "predict", "report"}
    assert verbs == set(FUNCTIONS)


# They start processes, ask them, or follow a stream: what they do is in `services` and `gati.adaptation`.
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
    assert function.__name__ == name
    assert len(inspect.getdoc(function) or "") > 60
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(one.annotation is not inspect.Parameter.empty for one in signature.parameters.values())


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_says_what_it_is(name: str) -> None:
    assert len(inspect.getdoc(getattr(gati, name)) or "") > 30


BEFORE = (
    "import gati.composition.composition, gati.exploration.library",
    "gati.explore, gati.compose",
    "from gati.exploration import library",
    "from gati import compose, explore",
    "import importlib; importlib.reload(gati)",
)


VERBS = [
    f"import inspect, pickle, gati; {before}\n"
    "from gati.exploration.library import Library\n"
    "assert Library is gati.Library\n"
    "import gati.composition.problem as p; import gati.exploration.library as l\n"
    "from gati.composition import problem\n"
    "assert p is problem is gati.composition.problem and l.Library is Library\n"
    "from gati.composition.compose import compose\n"
    "assert gati.compose is compose is pickle.loads(pickle.dumps(gati.compose))\n"
    "assert inspect.isfunction(gati.explore)\n"
    "assert 'variants' in inspect.signature(gati.explore).parameters\n"
    for before in BEFORE
]


# Other packages take seconds to import: the processes begin with them, and without Gati.
FORKED = """
import contextlib, json, os, sys, traceback
from importlib import import_module

for name in ("highspy", "onnx", "openvino", "PIL.Image", "scipy.stats", "sklearn.utils", "torch.export"):
    with contextlib.suppress(ImportError):
        import_module(name)
assert not [name for name in sys.modules if name.partition(".")[0] in ("gati", "services")]
failed = []
for program in json.load(sys.stdin):
    child = os.fork()
    if not child:
        status = 1
        try:
            exec(program, {"__name__": "__main__"})
            status = 0
        except BaseException:
            print(program, file=sys.stderr)
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        failed.append(program)
print(json.dumps(failed))
"""

IMPORTS = """
import pkgutil, sys
from importlib import import_module
import gati

names = ["gati", *(each.name for each in pkgutil.walk_packages(gati.__path__, "gati."))]
names.remove("gati.__main__")  # runs the command line
hidden = []
for name in names if ORDER == "forwards" else reversed(names):
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
assert len(names) > 100
"""


MODULES = [f"ORDER = '{order}'\n{IMPORTS}" for order in ("forwards", "backwards")]


@pytest.fixture(scope="module")
def failed() -> tuple[list[str], str]:
    """Those programs that fail in a process of their own, which has not imported Gati, and what they say."""
    command = [sys.executable, "-c", FORKED]
    programs = json.dumps(VERBS + MODULES)
    done = subprocess.run(command, input=programs, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_a_verb_is_a_verb_whatever_was_imported_before(failed: tuple[list[str], str]) -> None:
    programs, said = failed
    assert not set(VERBS).intersection(programs), said


@pytest.mark.slow
def test_every_module_is_imported_however_it_is_written(failed: tuple[list[str], str]) -> None:
    programs, said = failed
    assert not set(MODULES).intersection(programs), said


def test_importing_the_package_imports_nothing_else() -> None:
    program = (
        "import sys, gati; dir(gati)\n"
        "assert not {'torch', 'numpy', 'scipy', 'typer'} & set(sys.modules)\n"
        "assert not [name for name in sys.modules if name.startswith('gati.') and name.count('.') > 1]"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'gati' has no attribute 'divine'"):
        gati.divine  # noqa: B018


def test_a_type_checker_accepts_how_the_readme_preprocesses() -> None:
    """It refuses to call what may be None."""
    assert inspect.signature(gati.Engine.preprocessing.fget).return_annotation == "Preprocessing"
