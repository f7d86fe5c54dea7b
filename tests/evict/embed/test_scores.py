"""Scores for tables that evict the smallest: learned ones miss less than those of LRU."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from gati import evict
from gati.errors import EvictError

ROWS = 150


class SmallestFirst:
    """A table that evicts the smallest score, as its last assignment had it."""

    def __init__(self) -> None:
        self.score: dict[int, int] = {}
        self.heap: list[tuple[int, int]] = []
        self.missed = 0

    def serve(self, ids: list[int], scores: list[int]) -> None:
        for id_, score in dict(zip(ids, scores, strict=True)).items():
            self.missed += id_ not in self.score
            self.score[id_] = score
            heapq.heappush(self.heap, (score, id_))
        while len(self.score) > ROWS:
            score, id_ = heapq.heappop(self.heap)
            if self.score.get(id_) == score:
                del self.score[id_]


@pytest.mark.parametrize("seed", [0, 1])
def test_learned_scores_miss_less_than_lru_where_some_rows_are_popular(seed: int) -> None:
    random = np.random.default_rng(seed)
    chances = np.cumsum(np.arange(1, 5_001, dtype=np.float64) ** -1.0)
    names = random.permutation(5_000)
    scores = evict.RowScores(ROWS, seed=seed)
    learned, lru = SmallestFirst(), SmallestFirst()
    for number in range(100):
        ids = names[np.searchsorted(chances, random.random(300) * chances[-1])]
        found = scores.scores(ids)
        assert found.dtype == np.uint64 and found.shape == ids.shape
        learned.serve(ids.tolist(), found.tolist())
        lru.serve(ids.tolist(), [number] * len(ids))
    assert learned.missed < 0.97 * lru.missed


def test_without_anything_learned_what_was_requested_later_scores_more() -> None:
    scores = evict.RowScores(ROWS)
    first, second = scores.scores(np.array([4, 9, 4])), scores.scores(np.array([2, 9]))
    assert first.max() < second.min() and first[0] == first[2]
    assert len(scores.scores(np.zeros(0, dtype=np.int64))) == 0
    with pytest.raises(EvictError, match="rows is 0; a table holds at least 1"):
        evict.RowScores(0)
    with pytest.raises(EvictError, match="seed is -1; give a number from 0"):
        evict.RowScores(10, seed=-1)


def test_ids_of_all_64_bits_are_told_apart_with_and_without_sign() -> None:
    """Keys of tables on GPUs are hashes: each id is learned as if it were a small one."""
    random = np.random.default_rng(0)
    small, signed, unsigned = (evict.RowScores(ROWS) for _ in range(3))
    low = np.uint64(2**16)  # of all names, the last bits are alike
    names = random.integers(2**47, 2**48, 500, dtype=np.uint64) * low + (low - np.uint64(1))
    names[0] = 2**64 - 1
    for _ in range(60):
        drawn = (500 * random.random(300) ** 3).astype(np.int64)
        found = unsigned.scores(names[drawn])
        np.testing.assert_array_equal(found, signed.scores(names[drawn].view(np.int64)))
        assert len(np.unique(found[drawn == 0])) <= 1
        small.scores(drawn)
    ids = unsigned._returns._remembered
    known = ids["id"][ids["seen"] > 0].view(np.uint64).tolist()
    assert len(known) == len(set(known)) and set(known) <= set(names.tolist())
    assert 2**64 - 1 in known


def test_the_largest_id_is_new_when_it_comes_first() -> None:
    for first in (7, -1):
        scores = evict.RowScores(ROWS)
        scores.scores(np.full(300, 100))
        scores.scores(np.array([first]))
        entries = scores._returns._remembered
        (seen,) = entries["seen"][entries["id"] == first]
        (span,) = entries["span"][entries["id"] == first]
        assert (seen, span) == (1.0, 1.0)


@pytest.mark.parametrize("ids", [np.array([0.5]), np.array([[1]]), np.array(["a"])])
def test_what_are_no_ids_is_refused_in_one_line(ids: object) -> None:
    with pytest.raises(EvictError, match="give whole numbers"):
        evict.RowScores(ROWS).scores(ids)  # type: ignore[arg-type]
