"""Counting inputs when some are copies of each other, so that certificates stay valid.

A certificate assumes that the inputs it counts were drawn independently. A copy may be either of two things:
the same drawing put into the data again, which is no evidence, or another drawing of an input that is common
where the network serves, which is. The data does not say which. So an input that both answer alike counts
once, and one that is answered differently counts as often as it occurs: in both readings the losses are at
least as large a share as those of independent drawings, and the certificate errs no more often than it says.
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
    """Return the rows to count, those of `lost` inputs `copies` times; both over distinct inputs."""
    return np.repeat(np.arange(len(lost)), np.where(lost, copies, 1))
