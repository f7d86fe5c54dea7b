"""A pytest plugin that executes the shapes in annotations: `pytest -p tests.checked_shapes`.

They are strings to Python and their names are imported for type checkers only, so that users need neither
jaxtyping nor beartype. Here the names are there for all modules, and a call with other shapes fails.
"""

from __future__ import annotations

import ast
import builtins
import sys
from importlib import import_module

import jaxtyping
from beartype import beartype  # noqa: F401  # named below

MODULES = (
    "gati.caches.cache",
    "gati.caches.losses",
    "gati.caches.predictors",
    "gati.caches.selectors",
    "gati.composition.accuracy",
    "gati.composition.copies",
    "gati.composition.walk",
    "gati.engine.engine",
    "gati.evaluation.by_class",
)
_SHAPES = ("Bool", "Float", "Int", "Shaped")


def _for_type_checkers(module: str) -> list[ast.ImportFrom]:
    """The imports that a module makes for type checkers only."""
    path = sys.modules[module].__file__
    assert path is not None
    with open(path, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    return [
        line
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for line in block.body
        if isinstance(line, ast.ImportFrom)
    ]


for name in _SHAPES:
    setattr(builtins, name, getattr(jaxtyping, name))
early = set(MODULES) & set(sys.modules)
assert not early, f"imported before the hook: {early}"
with jaxtyping.install_import_hook(list(MODULES), "beartype.beartype"):
    for name in MODULES:
        import_module(name)
for name in MODULES:
    for line in _for_type_checkers(name):
        exec(ast.unparse(line), vars(sys.modules[name]))
