"""What is expensive to make is made once, by whichever of the tests' processes needs it first."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch

from gati.files import atomic_write_bytes

__all__ = ["convert_once", "made_once", "shared_folder"]


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
