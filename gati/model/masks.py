"""Padding: which tokens of a sequence are none, told by the network's own mask, and kept from caches.

What a block hands on at a padded place means nothing, and a cache that read it would answer differently for
the same sentence padded further. So the hidden output of a block, as caches see it, is zero there. The
network itself goes on with what its blocks gave.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

__all__ = ["MASK", "TokenMask", "giving_hidden", "mask_of", "set_mask", "without_padding"]

MASK = "attention_mask"  # the array that says where tokens are: 1 there, 0 at padding

TokenMask = Callable[[Tensor], Tensor]  # a packed input [B, ...] -> bool [B, length], where tokens are


def mask_of(module: nn.Module) -> TokenMask | None:
    """How a network's packed input tells where its tokens are; None where it has no mask."""
    found: TokenMask | None = getattr(module, "_gati_token_mask", None)
    return found


def set_mask(module: nn.Module, mask: TokenMask) -> None:
    """Say how the packed input of `module` tells where its tokens are."""
    object.__setattr__(module, "_gati_token_mask", mask)


def without_padding(hidden: Tensor, tokens: Tensor) -> Tensor:
    """`hidden` [B, length, D] with zeros where `tokens` [B, length] is false; other shapes as they are."""
    if hidden.dim() != 3 or hidden.shape[:2] != tokens.shape:
        return hidden
    return hidden.masked_fill(tokens.logical_not().unsqueeze(2), 0.0)


def giving_hidden(module: nn.Module, blocks: Sequence[str]) -> nn.Module:
    """A network that gives its answer and after it the hidden output of each block, padding being zero.

    It shares everything with `module`, which must have a mask; weights and modules keep their names.
    """
    kind, mask = type(module), mask_of(module)
    if mask is None:
        raise AssertionError("only networks with a mask are asked for hidden outputs without padding")

    def forward(self: nn.Module, x: Tensor) -> tuple[Any, ...]:
        found: dict[str, Tensor] = {}

        def noting(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def note(_module: nn.Module, _arguments: Any, output: Any) -> None:
                hidden = output[0] if isinstance(output, (tuple, list)) else output
                found[name] = without_padding(hidden, mask(x))

            return note

        with ExitStack() as handles:
            for name in blocks:
                handles.enter_context(self.get_submodule(name).register_forward_hook(noting(name)))
            answer = kind.forward(self, x)
        return (answer, *(found[name] for name in blocks))

    copied = copy.copy(module)
    copied.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return copied
