"""Counting inputs when some are copies of each other, so that certificates stay valid.

A certificate assumes that the inputs it counts were drawn independently. A copy may be a duplicate of the
same draw, which is no evidence, or another independent draw of a common input, which is evidence. The data
does not say which. So an input with the base model's answer counts once, and one with a different answer
counts once per copy. In both cases the share of losses is at least that of independent draws, so the
certificate errs no more often than it states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


def counted(
    lost: Bool[NDArray[np.bool_], " n"], copies: Int[NDArray[np.int64], " n"]
) -> Int[NDArray[np.int64], " rows"]:
    """Return the rows to count: `lost` inputs `copies` times, others once. Both are by distinct input."""
    return np.repeat(np.arange(len(lost)), np.where(lost, copies, 1))
