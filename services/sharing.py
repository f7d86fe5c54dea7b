"""What all owners share, such as places or bytes: how much of it one owner may have."""

from __future__ import annotations

_OF_WHAT_IS_LEFT = 4  # so many times what is left for all


def crowds(wanted: int, left: int) -> bool:
    """Whether an owner that has so much in all takes too much, where so much is `left` for all.

    What one may have falls with what is left, so that one owner leaves a part to others, however much it
    wants (dynamic thresholds: Choudhury and Hahne 1998).
    """
    return wanted > _OF_WHAT_IS_LEFT * left
