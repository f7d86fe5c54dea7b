"""What a network that the user's code built must be before Gati can use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gati.errors import ModelError, one_line
from gati.model.user_code import running_user_code

_COMPILED_FROM = "_torchdynamo_orig_callable"  # of functions that torch.compile returns
_PROBLEM = "problem_type"
_OTHER_PROBLEMS = ("multi_label_classification", "regression")


def without_compile(module: nn.Module) -> nn.Module:
    """The network without `torch.compile`, at any depth: Gati traces it, and compiles segments itself."""
    module = _original(module)
    for parent in list(module.modules()):
        if parent._compiled_call_impl is not None:  # after `module.compile()`
            parent._compiled_call_impl = None
        for name, child in list(parent._modules.items()):
            if child is not None and _original(child) is not child:
                setattr(parent, name, _original(child))
        for name, function in _plain_functions(parent):
            setattr(parent, name, function)
    return module


def _plain_functions(module: nn.Module) -> list[tuple[str, Callable[..., Any]]]:
    """The names of a module's compiled functions and methods, such as its forward, and what was compiled."""
    methods: dict[str, Any] = {}
    for kind in reversed(type(module).__mro__):
        methods |= vars(kind)
    own = vars(module)
    found = [(name, _plain(value)) for name, value in own.items()]
    for name in methods.keys() - own.keys():
        plain = _plain(methods[name])
        found.append((name, None if plain is None else MethodType(plain, module)))
    return [(name, function) for name, function in found if function is not None]


def _plain(value: Any) -> Callable[..., Any] | None:
    """What a function was compiled from; None for others, also for those that only wrap a compiled one.

    `functools.wraps` copies the mark of a compiled function to what is around it.
    """
    if not isinstance(value, FunctionType):
        return None
    plain: Callable[..., Any] | None = getattr(value, _COMPILED_FROM, None)
    return plain if getattr(value, "__wrapped__", None) is plain else None


def _original(module: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
        module = inner
    return module


def check_weights(module: nn.Module, source: str) -> None:
    """Raise `ModelError` for weights that are missing, quantized or hidden from Python."""
    for name, part in module.named_modules():
        # torch.export runs through a part that was traced, but not through one that was scripted
        unusable = not name or type(part).__name__ == "RecursiveScriptModule"
        if isinstance(part, torch.jit.ScriptModule) and unusable:
            raise ModelError(
                f"{source}{f': {name}' if name else ''} is a TorchScript module, which cannot be cut; give "
                "the nn.Module that it was made from"
            )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{source}: {name} has no shape yet, because it belongs to a lazy layer; run the network "
                "once on an example before that callable returns it"
            )
        if tensor.is_meta:
            raise ModelError(f"{source}: {name} is on the meta device, without values; build it on the CPU")
        if tensor.layout != torch.strided:
            raise ModelError(
                f"{source}: {name} is {str(tensor.layout).removeprefix('torch.')}, and Gati takes dense "
                f"tensors; register {name}.to_dense()"
            )
    for name, value in module.state_dict().items():
        is_plain = isinstance(value, Tensor) and not value.is_quantized
        if not is_plain and not name.endswith("_extra_state"):
            raise ModelError(
                f"{source}: {name} is no plain tensor, as in a quantized network; give the network in "
                "floating point: gati compose --backend openvino-int8 quantizes it"
            )


def check_one_label(config: Any, where: str) -> None:
    """Raise `ModelError` for a network of `transformers` that gives several labels at once, or numbers.

    `config` is its configuration, an object or a mapping, or anything for other networks.
    """
    found = config.get(_PROBLEM) if isinstance(config, Mapping) else getattr(config, _PROBLEM, None)
    if found in _OTHER_PROBLEMS:
        raise ModelError(
            f"{where} is for {str(found).replace('_', ' ')} ({_PROBLEM} in its config), and Gati answers "
            f"with one class; if that with the highest score is all you need, set {_PROBLEM} to None there"
        )


def other_precision(module: nn.Module) -> str:
    """The precision of a network whose weights are all in another one than float32, such as `float16`, or "".

    One that mixes precisions converts in its own forward, and is left as it is.
    """
    kinds = {each.dtype for each in module.parameters() if each.is_floating_point()}
    return str(kinds.pop()).removeprefix("torch.") if len(kinds) == 1 and torch.float32 not in kinds else ""


def frozen(module: nn.Module, source: str) -> nn.Module:
    """The network on the CPU, in evaluation mode, without gradients. Raises `ModelError` if it refuses."""
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoder):  # else the output length depends on the batch
            layer.use_nested_tensor = False
        if isinstance(layer, nn.DataParallel):  # else inputs are sent to all GPUs, where the network is not
            layer.device_ids = []
    with running_user_code(
        lambda error: (
            f"{source} does not let itself be put on the CPU in evaluation mode ({one_line(error)}); give an "
            "nn.Module that does, or the .pt2 file of an exported network itself"
        )
    ):
        module.to("cpu")
        module.eval()  # the user's own may return nothing; a loaded torch.export program refuses
    module.requires_grad_(False)
    return module
