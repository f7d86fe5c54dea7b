"""Networks that run the user's network, and take or return something else.

An adapted network has the modules, weights and names of the original. It runs the original itself rather than
a copy, because hooks and attributes of the original may refer to it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from gati.model.hooks import first_tensor
from gati.model.masks import TokenMask, mask_of, set_mask, without_padding
from gati.model.outputs import class_scores

Forward = Callable[..., Any]

_HOOKS = ("_forward_", "_backward_")  # of the original: they run when it is called


def giving_scores(module: nn.Module, *, may_change: bool) -> nn.Module:
    """`module` as a network that returns nothing but its class scores, see `class_scores`.

    `may_change` allows a hook on `module` itself; otherwise its own calls return what they returned before.
    """
    if not may_change or _loses_hooks(module):
        return adapted(module, _scored)
    if only_scores not in module._forward_hooks.values():
        module.register_forward_hook(only_scores)  # a function of a module, which can be pickled
    return module


def only_scores(_module: nn.Module, _arguments: Any, output: Any) -> Tensor:
    """A forward hook that reduces what a network returns to its class scores."""
    return class_scores(output)


def _loses_hooks(module: nn.Module) -> bool:
    """Whether copies of `module` are built without its hooks, and its result is no plain tensor."""
    if not isinstance(module, torch.fx.GraphModule):
        return False
    results = [node.args[0] for node in module.graph.nodes if node.op == "output"]
    return not all(isinstance(result, torch.fx.Node) for result in results)


def _scored(module: nn.Module) -> Forward:
    @functools.wraps(module.forward)  # for its signature
    def forward(*values: Any, **named: Any) -> Tensor:
        return class_scores(module(*values, **named))

    return forward


def giving_hidden(module: nn.Module, blocks: Sequence[str]) -> nn.Module:
    """A network that returns its scores, followed by the hidden output of each block, padding zeroed.

    `module` must have a mask.
    """
    mask = mask_of(module)
    if mask is None:
        raise AssertionError("the network has no mask, so its hidden outputs have no padding to remove")

    def watched(module: nn.Module) -> Forward:
        def forward(x: Tensor) -> tuple[Any, ...]:
            found: dict[str, Tensor] = {}

            def noting(name: str) -> Callable[[nn.Module, Any, Any], None]:
                def note(_module: nn.Module, _arguments: Any, output: Any) -> None:
                    found[name] = without_padding(first_tensor(output, name), mask(x))

                return note

            with ExitStack() as handles:
                for name in blocks:
                    handles.enter_context(module.get_submodule(name).register_forward_hook(noting(name)))
                scores = class_scores(module(x))
            return (scores, *(found[name] for name in blocks))

        return forward

    return adapted(module, watched)


def adapted(original: nn.Module, forward_of: Callable[[nn.Module], Forward]) -> nn.Module:
    """A network whose forward is `forward_of(original)`, which calls `original`.

    Parameters, buffers and modules are those of `original`, also in copies and after pickling.
    """
    kind = type(original)
    if isinstance(original, torch.fx.GraphModule):  # writes its own forward and its own copies
        bases: tuple[type, ...] = (_Adapted,)
    else:
        bases = (kind,) if issubclass(kind, _Adapted) else (_Adapted, kind)
    made: Any = object.__new__(type(kind.__name__, bases, {"__module__": kind.__module__}))
    hooks = {name: kept for name, kept in vars(nn.Module()).items() if name.startswith(_HOOKS)}
    vars(made).update({**vars(original), **hooks, "forward": forward_of(original)})
    vars(made).update({"_gati_original": original, "_gati_forward_of": forward_of})  # no submodule
    return made  # type: ignore[no-any-return]


class _Adapted(nn.Module):
    """What an adapted network, of a subclass of the original's class, does in another way."""

    _gati_original: nn.Module
    _gati_forward_of: Callable[[nn.Module], Forward]

    __call__ = nn.Module.__call__

    def __init_subclass__(cls) -> None:
        """Runs nothing of the original's, which may require arguments, or register the user's own classes."""

    def train(self, mode: bool = True) -> Any:
        self._gati_original.train(mode)
        vars(self)["training"] = mode
        return self

    def _apply(self, *values: Any, **named: Any) -> Any:
        self._gati_original._apply(*values, **named)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        function, values = self.__reduce_ex__(4)
        found: nn.Module = function(*copy.deepcopy(values, memo))
        memo[id(self)] = found
        return found

    def __reduce_ex__(self, _protocol: Any) -> tuple[Callable[..., nn.Module], tuple[Any, ...]]:
        return _rebuilt, (self._gati_original, self._gati_forward_of, mask_of(self))


def _rebuilt(
    original: nn.Module, forward_of: Callable[[nn.Module], Forward], mask: TokenMask | None
) -> nn.Module:
    found = adapted(original, forward_of)
    if mask is not None:
        set_mask(found, mask)
    return found
