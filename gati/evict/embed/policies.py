"""Policies for embedding rows, by name."""

from __future__ import annotations

from gati.errors import EvictError
from gati.evict.embed.learned import GuardedRows, LaruRows
from gati.evict.embed.replacing import RowPolicy
from gati.evict.embed.returns import RowReturns
from gati.evict.embed.sets import RowSets
from gati.evict.seeds import check_seed

_LEARNED: dict[str, type[LaruRows]] = {"laru": LaruRows, "gati": GuardedRows}
ROW_POLICIES = ("lru", *_LEARNED)


def row_policy(name: str, sets: RowSets, capacity: int, *, seed: int = 0) -> RowPolicy:
    """Make a policy for a cache of `capacity` rows.

    Raises EvictError for an unknown name, and a seed out of range.
    """
    check_seed(seed)
    if name == "lru":
        return RowPolicy(sets)
    if name not in _LEARNED:
        raise EvictError(f'policy is "{name}"; choose one of {", ".join(ROW_POLICIES)}')
    return _LEARNED[name](sets, RowReturns(capacity, seed=seed))
