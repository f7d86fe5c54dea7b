"""The network's input as a block: position 0, before anything runs.

Caches that read the input itself sit there. A network with a module of its own called `input` keeps that name
for it, and has no such block.
"""

from __future__ import annotations

from torch import nn

__all__ = ["INPUT", "INPUT_KIND", "means_input"]

INPUT = "input"
INPUT_KIND = "network input"  # no class can be called so


def means_input(module: nn.Module, block: str) -> bool:
    """Whether `block` is what `module` is given, rather than what a module inside of it hands on."""
    return block == INPUT and INPUT not in dict(module.named_children())
