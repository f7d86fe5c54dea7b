"""Padding: the network's own mask says where it is, and caches never see it.

The output of a block at a padded position is meaningless, and a cache that read it would answer differently
for the same sentence with more padding. So caches see zeros there. The network itself continues with the
unmasked output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

MASK = "attention_mask"  # 1 at tokens, 0 at padding

TokenMask = Callable[[Tensor], Tensor]  # a packed input [B, ...] -> bool [B, length], true at tokens


def mask_of(module: nn.Module) -> TokenMask | None:
    """The mask of a network's packed input; None if the network takes no mask."""
    found: TokenMask | None = getattr(module, "_gati_token_mask", None)
    return found


def set_mask(module: nn.Module, mask: TokenMask) -> None:
    """Set the function that reads the mask from the packed input of `module`."""
    object.__setattr__(module, "_gati_token_mask", mask)


def without_padding(hidden: Tensor, tokens: Tensor) -> Tensor:
    """`hidden` [B, length, D] with zeros where `tokens` [B, length] is false; other shapes unchanged."""
    if hidden.dim() != 3 or hidden.shape[:2] != tokens.shape:
        return hidden
    return hidden.masked_fill(tokens.logical_not().unsqueeze(2), 0.0)


def giving_hidden(module: nn.Module, blocks: Sequence[str]) -> nn.Module:
    """A network that returns its answer, followed by the hidden output of each block, padding zeroed.

    It shares all weights with `module`, which must have a mask; weights and modules keep their names.
    """
    kind, mask = type(module), mask_of(module)
    if mask is None:
        raise AssertionError("the network has no mask, so its hidden outputs have no padding to remove")

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
