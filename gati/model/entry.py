"""The network's input as a block, at position 0, for caches that read the input itself.

If the network has a submodule called `input`, that name means the submodule, and there is no input block.
"""

from __future__ import annotations

from torch import nn

INPUT = "input"
INPUT_KIND = "network input"  # not a valid class name


def means_input(module: nn.Module, block: str) -> bool:
    """Whether `block` means the input of `module` rather than the output of a submodule."""
    return block == INPUT and INPUT not in dict(module.named_children())
