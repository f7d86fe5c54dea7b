"""Telling inputs apart by their content: the same pixels are the same input, under any name and label.

Images are compared as decoded, before they are resized, so an array, a file and its copy as another kind of
file without loss are one input. A picture that was compressed again, or a frame next to it, is another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Identities", "group_copies", "identities_of", "identity_of"]

Identities = NDArray[np.uint64]


def identity_of(content: NDArray[Any]) -> int:
    """Return 64 bits of a hash of one input's dtype, shape and values.

    Among 100,000 different inputs two are taken for one with a probability below 3e-10.
    """
    digest = hashlib.blake2b(f"{content.dtype.str} {content.shape}".encode(), digest_size=8)
    digest.update(np.ascontiguousarray(content).data)
    return int.from_bytes(digest.digest(), "little")


def identities_of(contents: Iterable[NDArray[Any]]) -> Identities:
    """Return the identity of each input, uint64 [n]."""
    return np.fromiter((identity_of(content) for content in contents), dtype=np.uint64)


def group_copies(identities: Identities) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the first copy of each input stands, and how many copies there are; both [n]."""
    _, first, inverse, count = np.unique(
        identities, return_index=True, return_inverse=True, return_counts=True
    )
    return first[inverse].astype(np.int64), count[inverse].astype(np.int64)
