"""Importing the user's code and optional libraries."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch

from gati.errors import GatiError, ModelError, one_line
from gati.files import is_file

_MISSING_OPERATOR = "operator torchvision::nms does not exist"
_OPERATORS = ("nms", "qnms")
_PACKAGE = "__init__.py"
_USER_FILE = "_gati_user_"  # prefix of module names for the user's files
# Errors of code that registers what may be registered only once. After others, such as those of a data file
# that was changed, the module of the first run would be out of date.
_ONLY_ONCE = re.compile(r"\balready\b|\bregist|\bduplicate|\btwice\b", re.IGNORECASE)
T = TypeVar("T")

_appended: list[str] = []  # folders of the user's code on `sys.path`
_ran: dict[str, tuple[bytes, ModuleType]] = {}  # content of the user's files, by name of the module
_held_libraries: list[torch.library.Library] = []  # a schema lives as long as its Library


def import_object(source: str, error: type[GatiError], what: str) -> Any:
    """Import `package.module:name` or `file.py:name`.

    The folder of the user's code goes last on `sys.path`, so that a folder named `services` or `thrift` does
    not shadow those packages.

    **Raises:** `error` with a one-line message, whatever the user's code raises on import.
    """
    place, _, name = source.rpartition(":")
    if not place or not name:
        raise error(f"{what} {source!r} names no callable; write package.module:callable or file.py:callable")
    module = _import_file(place, error, what) if place.endswith(".py") else _import_module(place, error, what)
    try:
        value: Any = module
        for part in name.split("."):
            value = getattr(value, part)
    except AttributeError as cause:
        public = [other for other in vars(module) if not other.startswith("_")]
        raise error(f"{place} has no {name!r}{near(name, public)}") from cause
    return value


class UserFile(NamedTuple):
    """A user's `file.py` that was imported."""

    module: str
    path: str
    text: str


def user_files() -> tuple[UserFile, ...]:
    """The user's files that are imported in this process, to be installed in another one.

    Files that were deleted since belong to networks that cannot be loaded again; they are left out.
    """
    found = []
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name.startswith(_USER_FILE) and path is not None and Path(path).is_file():
            found.append(UserFile(name, path, Path(path).read_text(encoding="utf-8")))
    return tuple(found)


def install_user_files(files: Iterable[UserFile], folders: Iterable[str] = ()) -> None:
    """Import `files` of another process, so that its pickles can be loaded, and add `folders` to `sys.path`.

    **Raises:** whatever the files raise.
    """
    for folder in (*folders, *(str(Path(each.path).parent) for each in files)):
        _append_to_path(folder)
    for each in files:
        if each.module not in sys.modules:
            _execute(each.module, each.path, each.text)


def import_torchvision() -> ModuleType:
    """Import torchvision, even if its compiled operators do not match this torch (CUDA wheel, CPU torch).

    Its Python code registers shapes for two operators and fails if they are not declared. Classifiers and
    transforms use neither, so declaring them is enough.

    **Raises:** `ModelError` if it is not installed or still fails to import.
    """
    return _import_optional("torchvision")


def import_timm() -> ModuleType:
    """Import timm, which imports torchvision. Raises `ModelError` if it is not installed."""
    _import_optional("torchvision", needed_by="timm")
    return _import_optional("timm")


def near(name: str, choices: Iterable[str]) -> str:
    """Return `; did you mean a, b?` with the choices most like `name`, or `; choose one of ...`."""
    choices = sorted(set(choices))
    found = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    if found:
        return f"; did you mean {', '.join(found)}?"
    if not choices:
        return ""
    return f"; choose one of {', '.join(choices[:8])}" + (", ..." if len(choices) > 8 else "")


def _import_optional(name: str, needed_by: str | None = None) -> ModuleType:
    if importlib.util.find_spec(name) is None:
        wanted = f"{name} (needed by {needed_by})" if needed_by else name
        raise ModelError(f"{wanted} is not installed; run: pip install {needed_by or name}")
    try:
        return with_operators(lambda: importlib.import_module(name))
    except Exception as error:
        raise ModelError(
            f"cannot import {name} ({one_line(error)}); install the build for torch {torch.__version__}"
        ) from error


def with_operators(run: Callable[[], T]) -> T:
    """The result of `run`. If that fails because torchvision's operators are missing, declare them and retry.

    Code that imports torchvision may raise an error of its own from that, as `transformers` does.
    """
    try:
        return run()
    except Exception as error:
        if _held_libraries or not _lacks_operators(error):
            raise
    for half_imported in [key for key in sys.modules if key.partition(".")[0] == "torchvision"]:
        del sys.modules[half_imported]
    library: Any = torch.library.Library("torchvision", "DEF")
    for operator in _OPERATORS:
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _held_libraries.append(library)
    return run()


def _lacks_operators(error: BaseException | None) -> bool:
    while error is not None and _MISSING_OPERATOR not in str(error):
        error = error.__cause__ or error.__context__
    return error is not None


def _import_module(name: str, error: type[GatiError], what: str) -> ModuleType:
    _append_to_path(os.getcwd())
    try:
        return with_operators(lambda: importlib.import_module(name))
    except ModuleNotFoundError as cause:
        if cause.name is not None and (name == cause.name or name.startswith(cause.name + ".")):
            raise error(
                f"{what}: no module named {cause.name!r}; run from the folder that holds it, or install it"
            ) from cause
        raise error(f"{what}: importing {name} failed ({one_line(cause)}); install what it needs") from cause
    except (Exception, SystemExit) as cause:
        raise error(
            f"{what}: importing {name} failed ({one_line(cause)}); {_advice(cause)} module"
        ) from cause


def _import_file(place: str, error: type[GatiError], what: str) -> ModuleType:
    path = Path(place).resolve()
    if not is_file(path):
        raise error(f"{what}: no file {place}; check the path")
    _append_to_path(str(path.parent))
    unique = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"{_USER_FILE}{path.stem}_{unique}"
    content, (ran, module) = b"", _ran.get(name, (None, None))
    try:
        content = path.read_bytes()
        module = with_operators(lambda: _execute(name, str(path), content))
    except (Exception, SystemExit) as cause:
        if module is None or ran != content or not _ONLY_ONCE.search(str(cause)):
            raise error(
                f"{what}: running {place} failed ({one_line(cause)}); {_advice(cause)} file"
            ) from cause
        sys.modules[name] = module
    for imported, other in _taken_elsewhere(path.parent, content):
        raise error(
            f"{what}: {place} imports {imported}, and got {other}, which was there first: a program has one "
            "module of a name, so rename one of the two"
        )
    _ran[name] = content, module
    return module


def _taken_elsewhere(folder: Path, content: bytes) -> Iterator[tuple[str, str]]:
    """Modules that a file in `folder` imports, and has next to it, but got from another user's folder."""
    for node in ast.walk(ast.parse(content)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in {each.partition(".")[0] for each in names}:
            found = getattr(sys.modules.get(name), "__file__", None)
            places = (folder / name / _PACKAGE, folder / f"{name}.py")
            own = next((each for each in places if each.is_file()), None)
            if found is None or own is None:
                continue
            top = Path(found).parent.parent if Path(found).name == _PACKAGE else Path(found).parent
            if str(top) in _appended and _code(Path(found)) != _code(own):
                yield name, found


def _code(path: Path) -> dict[str, bytes]:
    """The Python files of a module or package, by their names in it."""
    files = path.parent.rglob("*.py") if path.name == _PACKAGE else [path]
    return {str(each.relative_to(path.parent)): each.read_bytes() for each in files if each.is_file()}


def _advice(cause: BaseException) -> str:
    """What to do about an error of the user's code, to be followed by its kind."""
    if isinstance(cause, SystemExit):
        return "put what ends the program under `if __name__ == '__main__':` in that"
    return "fix that"


def _execute(name: str, path: str, source: str | bytes) -> ModuleType:
    """Run a user's file as it is now: kept bytecode also fits a change that keeps its size and second."""
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # dataclasses and typing look the module up while it runs
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _append_to_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)
        _appended.append(folder)
