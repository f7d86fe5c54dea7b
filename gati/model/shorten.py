"""A network with fewer of its blocks, made from the network itself.

A block whose output has the shape of its input can be left out, because the next block still fits. Residual
networks lose little accuracy from that (Veit et al. 2016, "Residual networks behave like ensembles of
relatively shallow networks", sect. 4.1), and training recovers most of it. A network can also end at one of
its blocks, where a small head replaces everything after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gati.errors import BlockError, ModelError
from gati.model.blocks import find_blocks
from gati.model.flatten import export_program


class BlockShape(NamedTuple):
    """One block: the shape of its output, without the batch dimension, and whether its input has it, too."""

    name: str
    shape: tuple[int, ...]
    keeps_shape: bool


class Kept(NamedTuple):
    """The blocks that remain, in forward order, and whether the network ends at the last of them."""

    names: tuple[str, ...]
    ends: bool


@torch.inference_mode()
def block_shapes(network: nn.Module, example: Tensor) -> tuple[BlockShape, ...]:
    """The blocks of `network` that take and return one tensor, in forward order, for `example` [B, ...].

    **Raises:** `BlockError` if there are none.
    """
    found: dict[str, BlockShape] = {}
    names = find_blocks(network, example=example)
    handles = []
    for name in names:

        def note(_module: nn.Module, given: Any, output: Any, name: str = name) -> None:
            if isinstance(output, Tensor) and given and isinstance(given[0], Tensor):
                found[name] = BlockShape(name, tuple(output.shape[1:]), output.shape == given[0].shape)

        handles.append(network.get_submodule(name).register_forward_hook(note))
    try:
        network(example.clone())
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise BlockError(f"none of the blocks {', '.join(names[:5])} takes and returns one tensor")
    return tuple(found[name] for name in names if name in found)


def stages(blocks: Sequence[BlockShape]) -> tuple[int, ...]:
    """The index of the first block of each stage, whose output shape differs from the previous block's."""
    return tuple(
        place for place, block in enumerate(blocks) if not place or block.shape != blocks[place - 1].shape
    )


def choose_blocks(blocks: Sequence[BlockShape], count: int) -> Kept:
    """Choose `count` of `blocks`: the first of each stage, then others at even distances.

    If `count` is less than the number of stages, the network ends at the last block that is kept. A block
    that changes the shape within a stage is always kept.

    **Raises:** `BlockError` unless 1 <= count < the number of blocks.
    """
    if not 1 <= count < len(blocks):
        raise BlockError(f"the network has {len(blocks)} distinct blocks: keep fewer, at least 1")
    first = stages(blocks)
    others = [place for place in range(len(blocks)) if place not in first]
    more = max(0, count - len(first))
    chosen = {*first[:count], *(others[int((number + 0.5) * len(others) / more)] for number in range(more))}
    ends = count < len(first)
    last = first[count - 1] if ends else len(blocks)
    kept = [
        block.name
        for place, block in enumerate(blocks)
        if place in chosen or (place < last and not block.keeps_shape)
    ]
    return Kept(tuple(kept), ends)


def leave_out(network: nn.Module, names: Sequence[str]) -> None:
    """Replace the named blocks of `network`, which must keep the shape, by the identity, in place."""
    for name in names:
        network.set_submodule(name, _Identity())


class _Identity(nn.Module):
    """Returns the first of its arguments."""

    def forward(self, x: Tensor, *_others: Any, **_named: Any) -> Tensor:
        return x


class EndingAt(nn.Module):
    """A network up to the output of one of its blocks, followed by a head."""

    def __init__(self, network: nn.Module, block: str, head: nn.Module) -> None:
        super().__init__()
        self.network, self.block, self.head = network, block, head

    def forward(self, x: Tensor) -> Tensor:
        """The head's output for the block's output."""
        result: Tensor = self.head(output_of(self.network, self.block, x))
        return result


class _ReachedError(Exception):
    """Raised when the block has returned, so that the rest of the network does not run."""


def output_of(network: nn.Module, block: str, x: Tensor) -> Tensor:
    """The output of a block of `network` for `x`; later blocks do not run, except during export."""
    found: list[Tensor] = []

    def take(_module: nn.Module, _given: Any, output: Tensor) -> None:
        found.append(output)
        if not torch.compiler.is_compiling():  # torch.export cannot follow an exception
            raise _ReachedError

    handle = network.get_submodule(block).register_forward_hook(take)
    try:
        network(x)
    except _ReachedError:
        return found[0]
    finally:
        handle.remove()
    return found[0]


def without_unused(module: nn.Module, example: Tensor) -> nn.Module:
    """A network that computes the same as `module`, without unused operators and weights.

    It is traced on `example` [2 or more, ...]; weights are shared.

    **Raises:** `ModelError` for a network that cannot be traced, or if a part that seemed unused is not.
    """
    lean = export_program(module, example).module()
    assert isinstance(lean, torch.fx.GraphModule)
    needed: set[torch.fx.Node] = set()
    waiting = [node for node in lean.graph.nodes if node.op in ("output", "placeholder")]
    while waiting:
        node = waiting.pop()
        waiting += [] if node in needed else node.all_input_nodes
        needed.add(node)
    for node in reversed(list(lean.graph.nodes)):
        if node not in needed:
            lean.graph.erase_node(node)
    used = {node.target for node in needed if node.op == "get_attr"}
    for name in [name for name, _ in (*lean.named_parameters(), *lean.named_buffers()) if name not in used]:
        parent, _, own = name.rpartition(".")
        delattr(lean.get_submodule(parent), own)
    lean.recompile()
    with torch.inference_mode():
        if not torch.allclose(lean(example.clone()), module(example.clone()), 1e-4, 1e-5):
            raise ModelError("a part of the network that seems unused changes its result; keep all blocks")
    return lean
