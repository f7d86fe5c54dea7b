"""Batch normalisation folded into the preceding convolutions, in any network that can be traced.

Permanent folding speeds up inference. Folding again in every training step, from the layers' own weights,
speeds up training and keeps gradients at the scale of the original layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import fuse_conv_bn_eval, parametrize

from gati.errors import ModelError
from gati.model.flatten import export_program
from gati.model.user_code import copied

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMALISATIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVOLVES = frozenset({"conv1d", "conv2d", "conv3d"})


def without_normalisation(module: nn.Module, example: Tensor) -> nn.Module:
    """An equivalent copy of `module` with fewer layers; `module` itself if there is nothing to fold.

    A batch normalisation is folded if the trace on `example` [2 or more, ...] shows that it is the only
    reader of a convolution's output; layers that also do other things keep the rest. `module` must be in
    evaluation mode.

    **Raises:** `ModelError` for a network that cannot be traced.
    """
    folded = _with_pairs(module, example, fuse_conv_bn_eval)
    return module if folded is None else folded.requires_grad_(False)


def trainable_without_normalisation(module: nn.Module, example: Tensor) -> nn.Module | None:
    """An equivalent copy of `module` that trains as it would in evaluation mode, in less time.

    Statistics stay fixed; the normalisation's scale is applied to the convolution's weights instead of its
    output. `settled` folds permanently. None if there is nothing to fold.

    **Raises:** `ModelError` as `without_normalisation`.
    """
    return _with_pairs(module, example, _scaled)


def settled(module: nn.Module) -> nn.Module:
    """A permanently folded copy of what `trainable_without_normalisation` made; other modules unchanged."""
    if not any(parametrize.is_parametrized(layer) for layer in module.modules()):
        return module
    folded = copied(module)
    for layer in list(folded.modules()):
        if parametrize.is_parametrized(layer, "weight"):
            weight = torch.as_tensor(layer.weight).detach()
            kind = parametrize.type_before_parametrizations(layer)
            del layer.parametrizations
            layer.__class__ = kind  # torch's removal would affect the original, too
            layer.weight = nn.Parameter(weight)
    return folded


class _Scale(nn.Module):
    """Multiplies weights [out, ...] of a convolution by the scale of the following normalisation."""

    deviation: Tensor

    def __init__(self, normalisation: nn.BatchNorm2d) -> None:
        super().__init__()
        assert normalisation.running_var is not None
        deviation = (normalisation.running_var + normalisation.eps).sqrt()
        scale = torch.ones_like(deviation) if normalisation.weight is None else normalisation.weight
        self.scale = nn.Parameter(scale.detach().clone())
        self.register_buffer("deviation", deviation)

    def forward(self, weight: Tensor) -> Tensor:
        """Weights of the same shape."""
        return weight * (self.scale / self.deviation).view(-1, *[1] * (weight.dim() - 1))


def _scaled(convolution: nn.Conv2d, normalisation: nn.BatchNorm2d) -> nn.Conv2d:
    convolution.bias = fuse_conv_bn_eval(convolution, normalisation).bias
    parametrize.register_parametrization(convolution, "weight", _Scale(normalisation))
    return convolution


def _with_pairs(module: nn.Module, example: Tensor, fold: Callable[..., nn.Module]) -> nn.Module | None:
    """A copy with all possible pairs folded, if it is equivalent; None if there are none."""
    found = list(_pairs(module, export_program(module, example)))
    plain = [(one, other) for one, other in found if type(module.get_submodule(other)) in _NORMALISATIONS]
    for pairs in dict.fromkeys((tuple(found), tuple(plain))):
        if pairs:
            folded = _folded(module, pairs, fold)
            if _alike(module, folded, example):
                return folded
    return None


def _folded(module: nn.Module, pairs: Sequence[tuple[str, str]], fold: Callable[..., nn.Module]) -> nn.Module:
    folded = copied(module)
    for convolution, normalisation in pairs:
        before, after = folded.get_submodule(convolution), folded.get_submodule(normalisation)
        folded.set_submodule(convolution, fold(before, after))
        folded.set_submodule(normalisation, nn.Sequential(*after.children()))  # timm's also has an activation
    return folded.eval()


def _pairs(module: nn.Module, program: torch.export.ExportedProgram) -> Iterator[tuple[str, str]]:
    """Names of a convolution and the following normalisation, both executed once."""
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


@torch.inference_mode()
def _alike(module: nn.Module, folded: nn.Module, example: Tensor) -> bool:
    """Whether both agree on `example`: a network may also use a layer's weights outside its forward."""
    try:
        same = torch.allclose(folded(example.clone()), module(example.clone()), 1e-3, 1e-4)
    except (AttributeError, ModelError, RuntimeError, TypeError):
        return False
    return bool(same)
