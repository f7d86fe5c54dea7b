"""What `import gati` promises."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import gati

FUNCTIONS = [name for name in gati.__all__ if inspect.isfunction(getattr(gati, name))]
CLASSES = [name for name in gati.__all__ if inspect.isclass(getattr(gati, name))]


def test_all_is_sorted_and_complete() -> None:
    assert list(gati.__all__) == sorted(gati.__all__)
    assert set(gati.__all__) <= set(dir(gati))
    verbs = {"blocks", "certify", "compose", "demo", "evaluate", "explain", "explore", "export", "load"}
    assert verbs | {"bench", "compose_within_latency", "pareto", "predict", "report"} == set(FUNCTIONS)


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
    assert function.__name__ == name
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
    ],
)
def test_a_verb_is_a_verb_whatever_was_imported_before(before: str) -> None:
    program = (
        f"import gati; {before}\n"
        "import gati.compose.composition, gati.explore.library\n"
        "from gati.explore.library import Library\n"
        "assert Library is gati.Library\n"
        "assert callable(gati.compose) and gati.compose.__name__ == 'compose', gati.compose\n"
        "assert callable(gati.explore) and gati.explore.__name__ == 'explore', gati.explore\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'gati' has no attribute 'divine'"):
        gati.divine  # noqa: B018
