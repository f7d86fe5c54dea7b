"""Counting inputs when some are copies of each other, so that certificates stay valid.

A certificate assumes that the inputs it counts were drawn independently of one another and of what was
chosen. A copy may be another independent draw of a common input, such as a query that recurs, which is
evidence. Or it may be the same draw once more, which is none, in data that has each input several times. The
data does not say which. So an input with the base model's answer counts once, and not at all if a copy of it
was used to train or to choose; one with a different answer counts once per copy, whatever it was used for.
Leaving out what was used before would not do: where a few inputs are common, these are the ones left out,
however often their answers differ.

In both cases the certificate errs no more often than it states: if copies are draws of their own, and if each
input is there as often as the others. It is not valid where some inputs are repeated more than others and
their copies are no draws, as in data that was oversampled by class or by difficulty. What is new there is a
biased sample, of the inputs with few copies. No way of counting covers both that and common inputs, so such
data must be made unique first (`gati explore --unique`); `gati.exploration.alike` warns where it may be such.
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
