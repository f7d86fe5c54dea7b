"""Identifying inputs by content: equal pixels are the same input, under any name and label.

Images are hashed as decoded, before resizing, so an array, a file and a lossless copy in another format are
the same input. An image that was compressed again, or an adjacent video frame, is a different input.
Preprocessed tensors have no identity in common with the images that they were made from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Identities = NDArray[np.uint64]


class CopyCounts(NamedTuple):
    """How often each distinct input counts, [n]: with an answer that `differs`, and with the `same` one.

    `gati.composition.copies` says why.
    """

    differs: NDArray[np.int64]
    same: NDArray[np.int64]

    @classmethod
    def once(cls, count: int) -> CopyCounts:
        """Each input counts once."""
        return cls(np.ones(count, dtype=np.int64), np.ones(count, dtype=np.int64))

    def of(self, which: NDArray[Any]) -> CopyCounts:
        """The counts of some of the inputs."""
        return CopyCounts(self.differs[which], self.same[which])

    def followed_by(self, others: CopyCounts) -> CopyCounts:
        """These counts, then those of other inputs."""
        return CopyCounts(*(np.concatenate(both) for both in zip(self, others, strict=True)))

    def limited(self, rows: NDArray[np.int64] | None) -> CopyCounts:
        """The counts if of the inputs that are evidence only the `rows` among them still are; None: all."""
        if rows is None:
            return self
        same = np.zeros_like(self.same)
        same[np.flatnonzero(self.same)[rows]] = 1
        return self._replace(same=same)

    @property
    def evidence(self) -> int:
        """How many inputs count if no answer differs."""
        return int(self.same.sum())

    @property
    def draws(self) -> int:
        """How many inputs count if every answer differs: all of them, copies included."""
        return int(self.differs.sum())

    @property
    def seen(self) -> int:
        """How many of the draws count only if their answers differ, because of what they were used for."""
        return int(self.differs[self.same == 0].sum())

    @property
    def all_once(self) -> bool:
        """Whether each input counts once, whatever its answer: counts are then those of a plain sample."""
        return bool((self.differs == 1).all() and (self.same == 1).all())


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
