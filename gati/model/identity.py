"""Identifying inputs by content: equal pixels are the same input, under any name and label.

Images are hashed as decoded, before resizing, so an array, a file and a lossless copy in another format are
the same input. An image that was compressed again, or an adjacent video frame, is a different input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Identities = NDArray[np.uint64]


def identity_of(content: NDArray[Any]) -> int:
    """Return a 64-bit hash of an input's dtype, shape and values.

    Among 100,000 different inputs, the probability of any collision is below 3e-10.
    """
    digest = hashlib.blake2b(f"{content.dtype.str} {content.shape}".encode(), digest_size=8)
    digest.update(np.ascontiguousarray(content).data)
    return int.from_bytes(digest.digest(), "little")


def identities_of(contents: Iterable[NDArray[Any]]) -> Identities:
    """Return the identity of each input, uint64 [n]."""
    return np.fromiter((identity_of(content) for content in contents), dtype=np.uint64)


def group_copies(identities: Identities) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the index of each input's first copy, and its number of copies; both [n]."""
    _, first, inverse, count = np.unique(
        identities, return_index=True, return_inverse=True, return_counts=True
    )
    return first[inverse].astype(np.int64), count[inverse].astype(np.int64)
