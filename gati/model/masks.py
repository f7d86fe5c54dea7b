"""Padding: the network's own mask says where it is, and caches never see it.

The output of a block at a padded position is meaningless, and a cache that read it would answer differently
for the same sentence with more padding. So caches see zeros there. The network itself continues with the
unmasked output.
"""

from __future__ import annotations

from collections.abc import Callable

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
