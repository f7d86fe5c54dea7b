"""Places of a network that caches may take: its blocks in forward order, and the input before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from gati.caches import reads_input
from gati.errors import BlockError, VariantError
from gati.model.blocks import find_blocks
from gati.model.entry import INPUT, means_input


class FoundPlaces(NamedTuple):
    """Names in forward order, and a line to tell of what has no place, or ""."""

    names: tuple[str, ...]
    note: str = ""


def find_places(
    module: nn.Module,
    pattern: str | None,
    example: Tensor,
    variants: Sequence[str],
    companions: Sequence[str] = (),
) -> FoundPlaces:
    """Find the blocks that `pattern` names, or all, and the input where a variant or a companion reads it.

    A network without blocks that we know has the input alone, unless blocks were asked for. `example` is an
    input [B, ...] of the network.

    **Raises:** `BlockError` where there is no place at all, `VariantError` where only the input would do and
    the network has a module of that name.
    """
    reading = [variant for variant in variants if reads_input(variant)]
    at_the_input = bool(reading or companions)
    reason = "" if means_input(module, INPUT) else f"the network has a module of its own called '{INPUT}'"
    try:
        blocks = find_blocks(module, pattern, example=example)
    except BlockError as error:
        if pattern is not None or reason or not at_the_input:
            raise
        return FoundPlaces((INPUT,), f"{error}; until then there are caches at the input alone")
    if not at_the_input:
        return FoundPlaces(blocks)
    if not reason:
        return FoundPlaces((INPUT, *blocks))
    if companions or len(reading) == len(variants):
        without = ", ".join((*reading, *companions))
        raise VariantError(f"{reason}, so {without} cannot be placed before it: leave that out")
    return FoundPlaces(blocks, f"left {', '.join(reading)} out: {reason}")
