"""A network as data: its traced program without weights, from which it is rebuilt without the user's code.

The caller stores the weights separately. The program cannot run code: it is read like any `torch.export`
file.
"""

from __future__ import annotations

import io
import warnings
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn

from gati.errors import ModelError, one_line
from gati.model.exported import read_exported
from gati.model.flatten import export_program


def pack_network(module: nn.Module, example: Tensor) -> bytes:
    """Serialise the program of `module`, traced on `example` [2 or more, ...], for any batch size.

    **Raises:** `ModelError` for a network that cannot be traced or serialised.
    """
    program = export_program(module, example)
    program.example_inputs = None
    for name, tensor in list(program.state_dict.items()):
        nothing = torch.zeros_like(tensor)  # compresses to almost nothing
        is_parameter = isinstance(tensor, nn.Parameter)
        program.state_dict[name] = nn.Parameter(nothing, False) if is_parameter else nothing
    for node in (node for part in program.graph_module.modules() for node in _nodes_of(part)):
        for key in ("stack_trace", "source_fn_stack", "torch_fn", "from_node"):  # of this machine
            node.meta.pop(key, None)
    written = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # meant for torch's own developers
            torch.export.save(program, written)
    except Exception as error:  # torch.export raises many unrelated types
        raise ModelError(f"cannot serialise {type(module).__name__}: {one_line(error)}") from error
    return zlib.compress(written.getvalue(), 9)


def unpack_network(program: bytes, where: Path) -> nn.Module:
    """Rebuild the network from what `pack_network` returned, with all weights 0; `where` is for messages.

    **Raises:** `ModelError` for a program that is damaged, could run code, or is unreadable by this torch.
    """
    try:
        content = zlib.decompress(program)
    except zlib.error as error:
        raise ModelError(f"the program in {where} is damaged ({error})") from error
    module, _ = read_exported(content, where)
    return module.eval().requires_grad_(False)


def _nodes_of(module: nn.Module) -> list[torch.fx.Node]:
    return list(module.graph.nodes) if isinstance(module, torch.fx.GraphModule) else []
