"""How the house is built: which room may know which, and how large a module may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
GENERATED = REPOSITORY / "services" / "wire" / "gen"
MODULES = sorted(
    path
    for room in ("gati", "services")
    for path in REPOSITORY.glob(f"{room}/**/*.py")
    if GENERATED not in path.parents
)

# Imports may only go to an entry further up, or stay in their own. The longest prefix counts.
# The part of the runtime that runs and times segments lies below explore, which measures with it; which
# inputs explore has not seen is asked by compose, too.
LAYERS = (
    (
        *("gati.errors", "gati.types", "gati.files", "gati.units"),
        *("gati.variants", "gati.verb", "gati.version"),
    ),
    ("gati.model", "gati.zoo"),
    (
        *("gati.graph", "gati.runtime.exits", "gati.runtime.backends", "gati.runtime.placement"),
        *("gati.runtime.profile", "gati.runtime.graph_costs", "gati.runtime.segment_costs"),
        *("gati.runtime.least_costs", "gati.runtime.disturbance"),
    ),
    ("gati.caches",),
    ("gati.explore", "gati.runtime.fresh"),
    ("gati.compose",),
    ("gati.runtime",),
    ("gati.export", "gati.bench"),
    ("gati.plan", "gati.adapt", "gati.video", "gati.report", "gati.evict"),
    ("gati",),  # the package itself, the demo
    ("services",),
    ("gati.cli", "gati.cli_serve", "gati.cli_stream", "gati.__main__"),  # the command line starts services
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}


def name_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def level_of(module: str) -> int:
    """The level of the longest known prefix; for a room, its own entry rather than the whole package."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in LEVELS:
            return LEVELS[prefix]
    raise AssertionError(f"{module} has no place in LAYERS")


def imports_of(path: Path) -> Iterator[str]:
    """Names of our modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
            if node.module == "gati":  # `from gati import zoo` means gati.zoo
                names = [f"gati.{alias.name}" for alias in node.names]
        yield from (name for name in names if name.split(".")[0] in ("gati", "services"))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_only_to_rooms_further_left(path: Path) -> None:
    own = level_of(name_of(path))
    wrong = sorted({name for name in imports_of(path) if level_of(name) > own})
    assert not wrong, f"{name_of(path)} must not know of {', '.join(wrong)}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_is_two_rooms(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 400, f"{name_of(path)} has {lines} lines"


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param("gati", id="the package"),
        pytest.param("gati.cli", id="the command line"),
        pytest.param("gati.explore.library", id="reading a cache library"),
        pytest.param("gati.compose.compose", id="composing"),
        pytest.param("gati.plan", id="planning"),
        pytest.param("gati.evict", id="eviction"),
        pytest.param("gati.adapt.writer, gati.adapt.repository", id="records and versions"),
        pytest.param("services", id="the services package"),
    ],
)
def test_importing_needs_no_torch(modules: str) -> None:
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=False).returncode == 0


def test_the_idl_folder_does_not_shadow_the_thrift_package() -> None:
    assert (REPOSITORY / "thrift").is_dir()
    assert not list((REPOSITORY / "thrift").glob("**/*.py"))


def test_nothing_is_swallowed() -> None:
    """An error may be translated or handled, but not dropped."""
    silent = [
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ExceptHandler) and all(isinstance(child, ast.Pass) for child in node.body)
    ]
    assert not silent
