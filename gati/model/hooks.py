"""Collecting the hidden outputs of a network's blocks with temporary hooks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gati.errors import BlockError, ModelError, one_line
from gati.model.entry import INPUT, means_input
from gati.model.masks import TokenMask, mask_of, without_padding
from gati.model.source import near
from gati.model.user_code import running_user_code

# In torch's messages about dtypes.
_TYPES = re.compile(r"dtype|scalar type|data type|Input type \(|same type", re.IGNORECASE)


@contextmanager
def collect_hidden(module: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that every forward of `module` inside the context fills: block name -> hidden output.

    If a block returns several tensors, its hidden output is the first. Padding of masked sequences is zero.
    The block `input` is the network's input, unless the network has a module of that name. Tensors are
    detached, keep their values if a later operation overwrites a block's output in place, and stay valid
    after the context. All hooks are removed when the context ends; parameters and buffers are never touched.

    **Raises:** `BlockError` for a name the network does not have, before anything is registered; inside a
    forward, `ModelError` for a block that returns no tensor.
    """
    modules = dict(module.named_modules())
    inner = [name for name in names if not means_input(module, name)]
    for name in inner:
        if name not in modules or not name:
            raise BlockError(
                f"the network has no module {name!r}{near(name, (key for key in modules if key))}"
            )
    collector = _Collector(mask_of(module))
    with ExitStack() as handles:
        handles.callback(collector.forget)
        register = handles.enter_context
        register(module.register_forward_pre_hook(collector.before_forward))
        if len(inner) < len(names):
            register(module.register_forward_pre_hook(collector.entry))
        for name in inner:
            register(modules[name].register_forward_hook(collector.hook_for(name)))
        register(module.register_forward_hook(collector.after_forward))
        yield collector.hidden


class _Collector:
    """Collects outputs; clones only those that the network overwrites later in the same forward.

    The first forward clones every output and finds the overwritten ones by their version counters. From then
    on only those are cloned. The counters of the others are checked after each forward, so an overwrite that
    depends on the input raises an error instead of returning a wrong value. Inference tensors have no version
    counter and are always cloned.
    """

    def __init__(self, mask: TokenMask | None = None) -> None:
        self._mask, self._tokens = mask, torch.empty(0)
        self.hidden: dict[str, Tensor] = {}
        self._overwritten: dict[str, bool] = {}  # block -> must be cloned; absent before the first forward
        self._watched: dict[str, tuple[Tensor, int]] = {}

    def before_forward(self, module: nn.Module, arguments: Any) -> None:
        self.hidden.clear()
        self._watched.clear()
        if self._mask is not None:
            self._tokens = self._mask(first_tensor(arguments, INPUT))

    def entry(self, module: nn.Module, arguments: Any) -> None:
        self._note(INPUT, first_tensor(arguments, INPUT))

    def hook_for(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            hidden = first_tensor(output, name)
            self._note(name, hidden if self._mask is None else without_padding(hidden, self._tokens))

        return hook

    def _note(self, name: str, hidden: Tensor) -> None:
        tensor = hidden.detach()
        countable = not tensor.is_inference()
        if countable:
            self._watched[name] = (tensor, tensor._version)
        must_clone = not countable or self._overwritten.get(name, True)
        self.hidden[name] = tensor.clone() if must_clone else tensor

    def after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        for name, (tensor, version) in self._watched.items():
            changed = tensor._version != version
            if name not in self._overwritten:
                self._overwritten[name] = changed
                if not changed:
                    self.hidden[name] = tensor
            elif changed and not self._overwritten[name]:
                self._overwritten[name] = True
                self.hidden.pop(name)
                raise ModelError(
                    f"block {name}: its output is overwritten in place on some inputs and not on others, so "
                    "its hidden output is lost; leave the block out or make that operation out of place"
                )
        self._watched.clear()

    def forget(self) -> None:
        self._watched.clear()


def forward_order(module: nn.Module, names: Sequence[str], example: Tensor) -> list[str]:
    """Return those of `names` that a forward of `example` [B, ...] runs, in the order of their first run.

    **Raises:** `ModelError` when the network does not accept the example.
    """
    ran: dict[str, None] = {}
    modules = dict(module.named_modules())
    with ExitStack() as handles, torch.no_grad():
        for name in names:
            handles.enter_context(modules[name].register_forward_pre_hook(_noting(ran, name)))
        with running_user_code(
            lambda error: (
                f"the network does not accept {str(example.dtype).removeprefix('torch.')} input of shape "
                f"{list(example.shape)} ({one_line(error)}); {_advice(example, error)}"
            )
        ):
            module(example)
    return list(ran)


def _advice(example: Tensor, error: Exception) -> str:
    """What to do about inputs that a network does not accept."""
    if _TYPES.search(str(error)):
        return "give numbers of the type it takes, or convert them in its forward"
    if not example.is_floating_point():
        if isinstance(error, IndexError):
            return "check that ids are below the rows of its embedding, and texts no longer than it takes"
        return "check the names, shapes and types of its arguments"
    if example.ndim == 4:
        return "check the images' size and channels (--resize)"
    return "check the shape of the inputs"


def _noting(ran: dict[str, None], name: str) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, arguments: Any) -> None:
        ran.setdefault(name)

    return hook


def first_tensor(output: Any, name: str) -> Tensor:
    """Return a block's output, or its first tensor if there are several. Raises `ModelError`."""
    values = [output]
    if isinstance(output, Mapping):
        values = list(output.values())
    elif isinstance(output, (tuple, list)):
        values = list(output)
    for value in values:
        if isinstance(value, Tensor):
            return value
    raise ModelError(
        f"block {name} returns {type(output).__name__} without a tensor; exclude it from the blocks"
    )
