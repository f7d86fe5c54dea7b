"""How the house is built: which room may know which, and how large a module may grow."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
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

NOTE = (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8")

# Rooms from the bottom up: a room may import what stands before its own line, and nothing of its own line.
LAYERS = (
    ("gati.errors", "gati.types", "gati.variants", "gati.version"),
    ("gati.allocation", "gati.cores", "gati.files", "gati.hosts", "gati.priority", "gati.units"),
    ("gati.documents",),
    ("gati.model",),
    ("gati.caches",),
    ("gati.engine",),
    ("gati.costs",),
    ("gati.exploration",),
    ("gati.composition",),
    ("gati.evaluation", "gati.formats"),
    ("gati.guard", "gati.samples", "gati.versions"),
    ("gati.pipelines", "gati.video", "gati.evict"),
    ("gati.adaptation",),
    ("services",),
    ("gati.cli",),  # the command line starts services
)
# Loose files that belong to a room: `gati` itself has the names of the verbs, each imported when it is used.
PART_OF = {"gati.zoo": "gati.model", "gati": "gati.cli", "gati.__main__": "gati.cli"}
LEVELS = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def name_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in LEVELS or prefix in PART_OF:
            return PART_OF.get(prefix, prefix)
    raise AssertionError(f"{module} has no place in LAYERS")


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Names of our modules that a file imports, anywhere in it, by `import_module`, too."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [ast.literal_eval(name) for name in node.args[:1] if isinstance(name, ast.Constant)]
        found += [name for name in names if name.split(".")[0] in ("gati", "services")]
    return tuple(found)


def is_known_to(module: str, own: str) -> bool:
    """Whether a module may be imported in the room `own`."""
    room = room_of(module)
    return room == own or LEVELS[room] < LEVELS[own]


@pytest.mark.slow
def test_imports_point_only_to_rooms_before() -> None:
    wrong = [
        f"{name_of(path)} must not know of {name}"
        for path in MODULES
        for name in dict.fromkeys(imports_of(path))
        if not is_known_to(name, room_of(name_of(path)))
    ]
    assert not wrong


def test_no_module_is_two_rooms() -> None:
    lines = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert not {name: count for name, count in lines.items() if count > 400}


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param("gati", id="the package"),
        pytest.param("gati.cli", id="the command line"),
        pytest.param("gati.exploration.library", id="reading a cache library"),
        pytest.param("gati.composition.compose", id="composing"),
        pytest.param("gati.pipelines", id="planning"),
        pytest.param("gati.evict", id="eviction"),
        pytest.param("gati.samples.writer, gati.versions.repository", id="records and versions"),
        pytest.param("gati.cli.query, gati.model.pictures", id="asking a server about an image"),
        pytest.param("services", id="the services package"),
    ],
)
def test_importing_needs_no_torch(modules: str) -> None:
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=False).returncode == 0


def test_the_idl_folder_does_not_shadow_the_thrift_package() -> None:
    assert (REPOSITORY / "thrift").is_dir()
    assert not list((REPOSITORY / "thrift").glob("**/*.py"))


@pytest.mark.slow
def test_nothing_is_swallowed() -> None:
    """An error may be translated or handled, but not dropped."""
    silent = [
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ExceptHandler) and all(isinstance(child, ast.Pass) for child in node.body)
    ]
    assert not silent


def class_names(path: Path) -> list[str]:
    module = ast.parse(path.read_text(encoding="utf-8"))
    names = [node.name for node in module.body if isinstance(node, ast.ClassDef)]
    return [name for name in names if not name.startswith("_")]


@pytest.mark.slow
def test_a_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for name in class_names(path):
            homes.setdefault(name, []).append(name_of(path))
    shared = {name: sorted(modules) for name, modules in homes.items() if len(modules) > 1}
    assert not shared


def swappable(path: Path) -> set[str]:
    """Public records of a file whose constructor takes two texts, or two numbers, in a row by position."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        dataclass = next((each for each in map(ast.unparse, node.decorator_list) if "dataclass" in each), "")
        if (dataclass and "kw_only" not in dataclass) or "NamedTuple" in map(ast.unparse, node.bases):
            kinds = [ast.unparse(each.annotation) for each in node.body if isinstance(each, ast.AnnAssign)]
            if any(
                one == other and one.split(" | ")[0] in ("str", "float") for one, other in pairwise(kinds)
            ):
                found.add(node.name)
    return found


# Records that are still made by position, in the rooms where this is the rule.
BY_POSITION = {
    "ChartLine", "Constraint", "ExitCost", "Exit", "Expected", "LookupCost", "OverlapCost", "Point",
    "ReplayOutcome", "Settings", "Solution",
}  # fmt: skip


def test_texts_and_numbers_that_could_be_swapped_are_given_by_name() -> None:
    rooms = ("gati.composition", "gati.evaluation", "gati.costs", "gati.formats")
    paths = [path for path in MODULES if room_of(name_of(path)) in rooms]
    assert set().union(*map(swappable, paths)) == BY_POSITION


def test_the_architecture_note_names_every_room_and_no_other() -> None:
    table = NOTE.partition("## Rooms")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    paths = [path for cell in cells for path in re.findall("`(.*?)`", cell)]
    rooms = [path.removesuffix(".py").replace("/", ".") for path in paths]
    assert sorted(rooms) == sorted(LEVELS)
    assert all(LEVELS[former] <= LEVELS[later] for former, later in pairwise(rooms)), "not as in LAYERS"


@pytest.mark.slow
def test_the_picture_of_the_rooms_shows_what_imports_what() -> None:
    picture = NOTE.partition("```mermaid")[2].partition("```")[0]
    rooms = {room.removeprefix("gati."): room for room in LEVELS if is_package(room)}
    assert set(re.findall(r"^    (\w+)\[", picture, re.MULTILINE)) == set(rooms)
    arrows = {
        (rooms[start], rooms[end])
        for start, ends in re.findall(r"^    (\w+).* --> (.+)$", picture, re.MULTILINE)
        for end in ends.split(" & ")
    }
    imports = {(room_of(name_of(path)), room_of(name)) for path in MODULES for name in imports_of(path)}
    assert arrows
    assert not arrows - imports, "arrows in ARCHITECTURE.md without an import"


def is_package(room: str) -> bool:
    return (REPOSITORY / room.replace(".", "/")).is_dir()


@pytest.mark.slow
def test_no_files_import_each_other() -> None:
    names = {name_of(path) for path in MODULES}
    known = {name_of(path): {_module_of(name, names) for name in imports_of(path)} for path in MODULES}
    graph = {module: found - {module, None} for module, found in known.items() if module != "gati"}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a cycle of imports: {' -> '.join(map(str, error.args[1]))}")


def _module_of(imported: str, modules: set[str]) -> str | None:
    """The module that a dotted name is, or is a member of."""
    if imported in modules:
        return imported
    parent = imported.rpartition(".")[0]
    return parent if parent in modules else None
