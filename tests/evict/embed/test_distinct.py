"""The different ids of a batch, against `numpy.unique`."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from gati.evict.embed.distinct import distinct
from gati.evict.embed.tiers import Ids


@given(st.integers(1, 2**62), st.lists(st.integers(0, 2**62), max_size=60))
def test_different_ids_are_those_of_unique_and_the_last_places_are_right(
    below: int, numbers: list[int]
) -> None:
    """Also where an id and its place take more than 63 bits together."""
    batch = np.array([number % below for number in numbers], dtype=np.int64)
    check(batch)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=60), st.integers(0, 40))
@example([2**64 - 1, 2**63 + 2**16 - 1, 2**64 - 1], 0)
def test_ids_with_all_64_bits_are_told_apart(numbers: list[int], dropped: int) -> None:
    check(np.array([number >> dropped for number in numbers], dtype=np.uint64).view(np.int64))


def check(batch: Ids) -> None:
    found = distinct(batch)
    ids, inverse, counts = np.unique(batch.view(np.uint64), return_inverse=True, return_counts=True)
    np.testing.assert_array_equal(found.ids.view(np.uint64), ids)
    np.testing.assert_array_equal(found.spread(np.arange(len(ids))), inverse)
    np.testing.assert_array_equal(found.counts, counts)
    backwards = batch.view(np.uint64).tolist()[::-1]
    assert found.last.tolist() == [len(batch) - 1 - backwards.index(id_) for id_ in ids.tolist()]
