"""Counting inputs when some are copies of each other, so that certificates stay valid.

A certificate assumes that the inputs it counts were drawn independently of one another and of what was
chosen. A copy may be a duplicate of the same draw, which is no evidence, or another independent draw of a
common input, which is evidence. The data does not say which. So an input with the base model's answer counts
once, and not at all if a copy of it was used to train or to choose; one with a different answer counts once
per copy, whatever it was used for. In both cases the share of losses is at least that of independent draws,
so the certificate errs no more often than it states. Leaving out what was used before would not do: where a
few inputs are common, these are the ones left out, however often their answers differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


def counted(
    lost: Bool[NDArray[np.bool_], " n"],
    differs: Int[NDArray[np.int64], " n"],
    same: Int[NDArray[np.int64], " n"],
) -> Int[NDArray[np.int64], " rows"]:
    """Return the rows to count: `lost` inputs as often as `differs` says, others as `same` does.

    All are by distinct input; see `gati.model.identity.CopyCounts`.
    """
    return np.repeat(np.arange(len(lost)), np.where(lost, differs, same))
