"""Counting inputs when some are copies of each other, so that certificates stay valid.

A certificate assumes that the inputs it counts were drawn independently. A copy may be either of two things:
the same drawing put into the data again, which is no evidence, or another drawing of an input that is common
where the network serves, which is. Nobody can tell from the data. So an input that is answered alike counts
once, and one that is answered differently counts as often as it occurs: in both readings the losses are at
least as large a share as those of independent drawings, and the certificate errs no more often than it says.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["counted"]


def counted(lost: NDArray[np.bool_], copies: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows to count, those of `lost` inputs `copies` times; both [n] over distinct inputs."""
    return np.repeat(np.arange(len(lost)), np.where(lost, copies, 1))
