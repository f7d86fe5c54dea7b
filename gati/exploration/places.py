"""The positions in a network where caches can sit: its blocks in forward order, and the input before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from gati.caches import reads_input
from gati.errors import BlockError, VariantError
from gati.model.blocks import find_blocks
from gati.model.entry import INPUT, means_input
from gati.model.segments import readable_blocks


class FoundPlaces(NamedTuple):
    """Names in forward order; `note` says what cannot be placed, or is empty."""

    names: tuple[str, ...]
    note: str = ""


def find_places(
    module: nn.Module,
    pattern: str | None,
    example: Tensor,
    variants: Sequence[str],
    companions: Sequence[str] = (),
) -> FoundPlaces:
    """Find the blocks that `pattern` selects, or all, and the input if a variant or a companion reads it.

    Without a pattern, blocks whose output caches cannot read are left out; if no others are found, the input
    is the only position, unless the network could be changed so that they can. `example` is an input
    [B, ...] of the network.

    **Raises:** `BlockError` if there is no position at all; `VariantError` if only the input would do, but
    the network has a module named `input`.
    """
    reading = [variant for variant in variants if reads_input(variant)]
    at_the_input = bool(reading or companions)
    reason = "" if means_input(module, INPUT) else f"the network has a module named '{INPUT}'"
    try:
        blocks = find_blocks(module, pattern, example=example)
    except BlockError as error:
        if pattern is not None or reason or not at_the_input:
            raise
        return FoundPlaces((INPUT,), f"{error}; until then there are only caches at the input")
    note = ""
    if pattern is None:
        readable, others_curable = readable_blocks(module, example, blocks)
        others = ", ".join(name for name in blocks if name not in readable)
        if others and (readable or (at_the_input and not reason and not others_curable)):
            note = f"left out {others}: caches read float32 tensors [batch, ...], which these do not return"
            blocks = readable
    if not at_the_input:
        return FoundPlaces(blocks, note)
    if not reason:
        return FoundPlaces((INPUT, *blocks), note)
    if companions or len(reading) == len(variants):
        without = ", ".join((*reading, *companions))
        raise VariantError(f"{reason}, so {without} cannot be placed at the network's input; leave it out")
    of_variants = f"left out {', '.join(reading)}: {reason}"
    return FoundPlaces(blocks, f"{note}; {of_variants}" if note else of_variants)
