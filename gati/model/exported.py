"""Loading `torch.export` files without running code from them.

`torch.export.load` trusts its file: it unpickles sample inputs, custom objects and some constants, loads
compiled libraries, evaluates shape expressions as Python and looks up any callable below `torch`. Here every
part of the archive is inspected first, through the same reader, and anything beyond tensors, operators and
arithmetic on sizes is refused.
"""

from __future__ import annotations

import ast
import io
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gati.errors import ModelError, one_line
from gati.files import is_file

_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims|higher_order|torchvision|quantized_decomposed)\.\w+(\.\w+)?"
    r"|torch\._?sym_\w+"
    r"|_operator\.(getitem|add|sub|mul|truediv|floordiv|mod|neg|pow|eq|ne|lt|le|gt|ge|and_|or_|not_)"
    r"|math\.(ceil|floor|trunc|sqrt)"
)
_VALUE_NAME = re.compile(r"\w+")
_QUALIFIED_NAME = re.compile(r"[\w.@-]*")
_MODULE_STACK = re.compile(r"[^\"\\\n]*")
_QUALIFIED_KEYS = frozenset({"fqn", "parameter_name", "buffer_name", "tensor_constant_name"})
_SIZE_FUNCTIONS = frozenset({
    "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Mod", "Max", "Min", "Eq", "Ne",
    "Lt", "Le", "Gt", "Ge", "Equality", "Unequality", "StrictLessThan", "LessThan", "StrictGreaterThan",
    "GreaterThan", "And", "Or", "Not", "floor", "ceiling", "FloorDiv", "CeilDiv", "CleanDiv",
    "PythonMod", "ModularIndexing", "IntTrueDiv", "FloatTrueDiv", "TruncToInt", "CeilToInt",
    "FloorToInt", "ToFloat", "RoundToInt", "PowByNatural", "Where", "Identity",
})  # fmt: skip
_SIZE_SYNTAX = (
    ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp,
    ast.Compare, ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip
_TREE_TYPES = (None, "builtins.tuple", "builtins.list", "builtins.dict")
_LARGEST_BATCH = 250  # of those that Gati answers
_EXAMPLE = "torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim('batch')},))"


def load_exported(path: Path) -> tuple[nn.Module, tuple[int | None, ...]]:
    """Load a `torch.export` file as a network of modules with their original names.

    Returns the network and its input's shape, None for dynamic sizes. The network takes one tensor of any
    batch size.

    **Raises:** `ModelError` for a file that is missing, damaged, of another format or could run code, and for
    a network with several inputs or a fixed batch size.
    """
    return read_exported(_read(path), path)


def read_exported(content: bytes, path: Path) -> tuple[nn.Module, tuple[int | None, ...]]:
    """As `load_exported`, from a file's content; `path` is for messages."""
    _inspect_archive(path, content)
    try:
        from torch.export.pt2_archive._package import load_pt2

        with _quiet():
            programs = load_pt2(io.BytesIO(content)).exported_programs
    except Exception as error:
        raise _unreadable(path, error) from error
    if len(programs) != 1:
        raise ModelError(f"{path} holds {len(programs)} exported networks; give a file that holds one")
    program = next(iter(programs.values()))
    shape = _input_shape(path, program)
    program._guards_code = []  # Python source that module() would execute; checked above
    with _quiet():
        module: nn.Module = torch.export.unflatten(program)
    module.__class__ = _exported_class(type(module))
    return module, shape


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings that are meant for torch's developers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _exported_class(base: type[nn.Module]) -> type[nn.Module]:
    class ExportedNetwork(base):  # type: ignore[valid-type, misc]
        """A program whose forward declares its tensor argument, so that it can be exported again."""

        def forward(self, x: Tensor) -> Any:
            return super().forward(x)

    return ExportedNetwork


def _read(path: Path) -> bytes:
    if not is_file(path):
        raise ModelError(f"no torch.export file at {path}; check the path")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}; check its permissions") from error


def _inspect_archive(path: Path, content: bytes) -> None:
    try:
        from torch.export.pt2_archive._package import PT2ArchiveReader

        reader = PT2ArchiveReader(io.BytesIO(content))
        records = {name: reader.read_bytes(name) for name in reader.get_file_names()}
    except ImportError as error:
        raise ModelError(
            f"torch {torch.__version__} cannot read {path}; install torch 2.8 or newer"
        ) from error
    except Exception as error:
        raise _unreadable(path, error) from error
    for name, record in records.items():
        reason = _danger(name, record)
        if reason:
            raise ModelError(
                f"refused {path}: {name} {reason}, which could run any code; export the network again "
                "without it, or give package.module:callable and a checkpoint"
            )


def _danger(name: str, record: bytes) -> str:
    """Return what in a record of the archive could run code, or an empty string."""
    try:
        if name.startswith("data/aotinductor"):
            return "holds a compiled library"
        if name.endswith(".pt"):
            return "needs unpickling" if record and not _is_plain(record) else ""
        if name.endswith("_config.json"):
            return _danger_in_payloads(json.loads(record))
        if name.startswith("models/"):
            return next(_dangers_in_program(json.loads(record)), "")
    except (ValueError, TypeError, AttributeError, RecursionError):
        return "is not what torch.export writes"
    return ""


def _is_plain(record: bytes) -> bool:
    try:
        torch.load(io.BytesIO(record), weights_only=True, map_location="cpu")
    except Exception:  # after any failure torch.export.load would unpickle
        return False
    return True


def _danger_in_payloads(config: Any) -> str:
    for fqn, payload in config["config"].items():
        if payload["use_pickle"] or not payload["path_name"].startswith(("weight_", "tensor_")):
            return f"has a pickled object for {fqn}"
    return ""


def _dangers_in_program(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        if key == "as_custom_obj" or (key in ("custom_obj_values", "treespec_namedtuple_fields") and value):
            yield f"has {key}"
        for inner_key, inner in value.items():
            # Keys of these tables are names of values; all others are fields of torch's schema.
            if key.endswith("_values") and not _VALUE_NAME.fullmatch(inner_key):
                yield f"names a value {inner_key[:40]!r}"
            yield from _dangers_in_program(inner, inner_key)
    elif isinstance(value, list):
        for inner in value:
            yield from _dangers_in_program(inner, key)
    elif isinstance(value, str) and not _is_harmless(key, value):
        yield f"has {key} {value[:60]!r}"


def _is_harmless(key: str, text: str) -> bool:
    """Whether a string is safe where torch turns it into code or looks it up."""
    if key == "target" or key == "as_operator":
        return _OPERATOR.fullmatch(text) is not None
    if key == "expr_str":
        return _is_size_expression(text)
    if key == "nn_module_stack":
        return _MODULE_STACK.fullmatch(text) is not None
    if key in _QUALIFIED_KEYS:
        return _QUALIFIED_NAME.fullmatch(text) is not None
    if key in ("in_spec", "out_spec"):
        return _is_plain_tree(json.loads(text)[1])
    if key in ("name", "forward_arg_names"):
        return _VALUE_NAME.fullmatch(text) is not None or text == ""
    return True


def _is_size_expression(text: str) -> bool:
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except SyntaxError:
        return False
    for node in nodes:
        if not isinstance(node, _SIZE_SYNTAX):
            return False
        if isinstance(node, ast.Call) and not (
            isinstance(node.func, ast.Name) and node.func.id in _SIZE_FUNCTIONS
        ):
            return False
        if isinstance(node, ast.Name) and "__" in node.id:
            return False
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.isidentifier():
            return False
    return True


def _is_plain_tree(tree: Any) -> bool:
    return tree["type"] in _TREE_TYPES and all(_is_plain_tree(child) for child in tree["children_spec"])


def _input_shape(path: Path, program: Any) -> tuple[int | None, ...]:
    inputs = program.graph_signature.user_inputs
    values = [
        node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs
    ]
    if len(inputs) != 1 or len(values) != 1 or not isinstance(values[0], Tensor):
        raise ModelError(
            f"{path} was exported with {len(inputs)} inputs; export a network that takes one tensor"
        )
    shape = tuple(size if isinstance(size, int) else None for size in values[0].shape)
    if not shape or shape[0] is not None:
        raise ModelError(
            f"{path} was exported for a batch of exactly {shape[0] if shape else 0}; "
            f"export it for any batch: {_EXAMPLE}"
        )
    limits = program.range_constraints.get(values[0].shape[0].node.expr)
    largest = "" if limits is None else str(limits.upper)
    if largest.isdecimal() and int(largest) < _LARGEST_BATCH:
        raise ModelError(
            f"{path} was exported for batches of at most {largest}; export it for any batch: {_EXAMPLE}"
        )
    return shape


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{path} is not a torch.export file that torch {torch.__version__} reads ({one_line(error)}); "
        "export the network again with this torch"
    )
