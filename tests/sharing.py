"""What is expensive to make is made once, by whichever of the tests' processes needs it first."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import os
from collections.abc import Callable, Hashable
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from gati.files import atomic_write_bytes
from gati.model.adapted import only_scores

__all__ = ["convert_once", "made_once", "shared_folder", "trace_once"]


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run of the tests see, and no other run."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, filled by `make` unless another process has done so; who comes second waits for it."""
    done = folder.with_name(f"{folder.name}.done")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(folder)
            done.touch()
    return folder


def convert_once(folder: Path, export: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.onnx.export` that converts what it has converted before by looking it up.

    Tests convert the same small networks hundreds of times, at half a second of a core each. What is looked
    up is the program with its weights and shapes, so nothing else can be found.
    """
    folder.mkdir(exist_ok=True)

    def exported(program: Any, *args: Any, **options: Any) -> Any:
        if args:  # no program, but a module that is still to be traced
            return export(program, *args, **options)
        kept = folder / f"{_identity(program, options)}.onnx"
        if not kept.exists():
            model = export(program, **options).model_proto
            atomic_write_bytes(kept, model.SerializeToString())
            return SimpleNamespace(model_proto=model)
        return SimpleNamespace(model_proto=onnx.load(kept))

    return exported


def _identity(program: Any, options: dict[str, Any]) -> str:
    found = hashlib.sha256()

    def add(*parts: object) -> None:
        found.update(repr([str(part) for part in parts]).encode())

    add(sorted(options.items()), program.graph_signature, program.range_constraints)
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            add(node.format_node(), node.meta.get("val"), node.meta.get("nn_module_stack"))
    for name, tensor in sorted({**program.state_dict, **program.constants}.items()):
        add(name, tensor.dtype, tensor.shape, tensor.stride())
        found.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trace_once(export: Callable[[nn.Module, Tensor], Any]) -> Callable[[nn.Module, Tensor], Any]:
    """`gati.model.flatten.export_program` that traces modules of one structure once in each process.

    Tests open the same few small networks a thousand times, and tracing takes a third of a second. It sees
    shapes, not values, so modules of the same classes, attributes and shapes have the same program; the
    weights are each module's own. A module of which this cannot be told is traced.
    """
    known: dict[Hashable, Any] = {}

    def exported(module: nn.Module, example: Tensor) -> Any:
        key = _structure(module, example)
        if key is None:
            return export(module, example)
        own = {**_named(module, "_parameters"), **_named(module, "_buffers")}
        if key not in known:
            program = export(module, example)
            weights = tuple(program.state_dict)
            constants = {name: None if name in own else value for name, value in program.constants.items()}
            known[key] = (program.graph_module, program.graph_signature, weights, constants)
        graph_module, signature, weights, constants = known[key]
        return SimpleNamespace(
            graph=graph_module.graph,
            graph_module=graph_module,
            graph_signature=signature,
            state_dict={name: own[name] for name in weights},
            constants={name: own.get(name, value) for name, value in constants.items()},
        )

    return exported


def _named(module: nn.Module, kind: str) -> dict[str, Tensor]:
    """Parameters or buffers by every name that they have."""
    return {
        f"{prefix}.{name}" if prefix else name: tensor
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name, tensor in getattr(part, kind).items()
        if tensor is not None
    }


class _UnknownError(Exception):
    """Something that may change what is traced."""


def _structure(module: nn.Module, example: Tensor) -> Hashable | None:
    """All that tracing depends on; None where an attribute is of a kind that this does not know."""
    tensors = {**_named(module, "_parameters"), **_named(module, "_buffers")}
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}  # which are one and the same
    try:
        parts = tuple(
            (
                name,
                _origin(type(part)),
                getattr(getattr(type(part), "forward", None), "__code__", None),  # a test may replace it
                _known_hooks(part),
                _plain({k: v for k, v in vars(part).items() if k not in (*_TABLES, *_HOOKS)}),
            )
            for name, part in module.named_modules(remove_duplicate=False)
        )
    except _UnknownError:
        return None
    shapes = tuple((name, first[id(each)], _layout(each)) for name, each in tensors.items())
    return parts, shapes, _layout(example), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")


_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def _known_hooks(part: nn.Module) -> int:
    """How many hooks reduce results to class scores; others may change anything."""
    hooks = [hook for kind in _HOOKS for hook in vars(part).get(kind, {}).values()]
    if any(hook is not only_scores for hook in hooks):
        raise _UnknownError
    return len(hooks)


def _layout(tensor: Tensor) -> Hashable:
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _origin(kind: Any) -> Hashable:
    """A class or function that is defined at the top of a file is known by it, others by themselves."""
    if "<" in kind.__qualname__:
        return kind
    try:
        file = inspect.getsourcefile(kind)
    except TypeError:  # built in
        return kind
    return (file, os.stat(file).st_mtime_ns, kind.__qualname__) if file and os.path.isfile(file) else kind


def _plain(value: Any) -> Hashable:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return type(value), value
    if isinstance(value, dict):
        return dict, tuple((_plain(key), _plain(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_plain(each) for each in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(_plain(each) for each in value)
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return _origin(value)
    raise _UnknownError
