"""Signatures of engines' classes and functions, read from their source without importing anything.

`python -m tests.evict.plugins.signatures` writes `recorded.json` anew from the packages on `sys.path`.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

RECORDED = Path(__file__).with_name("recorded.json")


def source_of(path: str) -> Path | None:
    """A file of a package that is installed, whether or not it can be imported here."""
    return next((Path(root, path) for root in sys.path if Path(root, path).is_file()), None)


def signatures(source: Path, names: list[str]) -> dict[str, str]:
    """Parameters of functions and methods by name; a class alone stands for its fields."""
    found: dict[str, str] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = parameters(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found[ast.unparse(target)] = "a value"
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{each.name}": parameters(each) for each in methods}
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            found |= {f"{node.name}.{ast.unparse(each.target)}": "a field" for each in fields}
            found |= {
                f"{node.name}.{each.attr}": "an attribute"
                for method in methods
                for each in ast.walk(method)
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and ast.unparse(each.value) == "self"
            }
    return {name: found[name] for name in names if name in found}


def parameters(function: ast.FunctionDef) -> str:
    """Names of the parameters, those with a default followed by `=`."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    optional = len(plain) - len(given.defaults)
    texts = [each.arg + ("=" if place >= optional else "") for place, each in enumerate(plain)]
    if given.vararg or given.kwonlyargs:
        texts.append("*" + (given.vararg.arg if given.vararg else ""))
    texts += [
        each.arg + ("" if default is None else "=")
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return ", ".join(texts + (["**" + given.kwarg.arg] if given.kwarg else []))


def record() -> None:
    """Write the signatures anew where the engine's source is at hand."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    for engine in recorded.values():
        for path, known in engine["files"].items():
            source = source_of(path)
            if source is not None:
                engine["files"][path] = signatures(source, list(known))
    RECORDED.write_text(json.dumps(recorded, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
