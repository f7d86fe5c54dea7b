"""Limits how much of a shared resource, such as places or bytes, one owner may have."""

from __future__ import annotations

_FREE_FACTOR = 4  # an owner may have at most this multiple of what is free


def crowds(wanted: int, left: int) -> bool:
    """Whether an owner would have too much: `wanted` in total, while `left` is free for all owners.

    The limit falls with the free amount, so one owner always leaves a part to others, however much it wants
    (dynamic thresholds: Choudhury and Hahne 1998).
    """
    return wanted > _FREE_FACTOR * left
