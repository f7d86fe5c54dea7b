"""Batch normalisation folded into the convolutions before it, in any network that can be traced."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import fuse_conv_bn_eval

from gati.errors import ModelError
from gati.model.flatten import export_program

__all__ = ["without_normalisation"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMALISATIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVOLVES = frozenset({"conv1d", "conv2d", "conv3d"})


def without_normalisation(module: nn.Module, example: Tensor) -> nn.Module:
    """A copy of `module` that answers the same, with fewer layers; `module` itself where there is nothing.

    A batch normalisation goes where the trace on `example` [2 or more, ...] shows that it, and nothing else,
    reads what a convolution gives; of a layer that does more, that part goes. `module` must be in evaluation
    mode.

    **Raises:** `ModelError` for a network that cannot be traced.
    """
    found = list(_pairs(module, export_program(module, example)))
    plain = [(one, other) for one, other in found if type(module.get_submodule(other)) in _NORMALISATIONS]
    for pairs in dict.fromkeys((tuple(found), tuple(plain))):
        if pairs:
            folded = _folded(module, pairs)
            if _alike(module, folded, example):
                return folded
    return module


def _folded(module: nn.Module, pairs: Sequence[tuple[str, str]]) -> nn.Module:
    folded = copy.deepcopy(module)
    for convolution, normalisation in pairs:
        before, after = folded.get_submodule(convolution), folded.get_submodule(normalisation)
        _put(folded, convolution, fuse_conv_bn_eval(before, after))  # type: ignore[type-var, arg-type]
        _put(folded, normalisation, nn.Sequential(*after.children()))  # as timm's, which activates, too
    return folded.eval().requires_grad_(False)


def _pairs(module: nn.Module, program: torch.export.ExportedProgram) -> Iterator[tuple[str, str]]:
    """Names of a convolution and the normalisation after it, both run once."""
    weights = program.graph_signature.inputs_to_parameters
    read = Counter(weights.get(str(node)) for node in program.graph.nodes for _ in node.users)
    modules = dict(module.named_modules())
    for node in program.graph.nodes:
        before = node.args[0] if node.args else None
        if _operator(node) != "batch_norm" or not isinstance(before, fx.Node) or len(before.users) != 1:
            continue
        if _operator(before) not in _CONVOLVES:
            continue
        names = [weights.get(str(argument), "") for argument in (before.args[1], node.args[1])]
        first, second = (name.removesuffix(".weight") for name in names)
        if (
            isinstance(modules.get(first), _CONVOLUTIONS)
            and isinstance(after := modules.get(second), _NORMALISATIONS)
            and after.running_mean is not None
            and all(read[name] == 1 for name in names)
        ):
            yield first, second


def _operator(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "").partition(".")[0] if node.op == "call_function" else ""


def _put(module: nn.Module, name: str, child: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(module.get_submodule(parent), own, child)


@torch.inference_mode()
def _alike(module: nn.Module, folded: nn.Module, example: Tensor) -> bool:
    """Whether a layer's own forward was all that used it: a network may read its weights elsewhere."""
    try:
        same = torch.allclose(folded(example.clone()), module(example.clone()), 1e-3, 1e-4)
    except (AttributeError, ModelError, RuntimeError, TypeError):
        return False
    return bool(same)
