"""Policies for embedding rows, by name."""

from __future__ import annotations

from gati.errors import EvictError
from gati.evict.embed.replacing import RowPolicy
from gati.evict.embed.sets import RowSets

__all__ = ["ROW_POLICIES", "row_policy"]

ROW_POLICIES: dict[str, type[RowPolicy]] = {one.name: one for one in (RowPolicy,)}


def row_policy(name: str, sets: RowSets, capacity: int, *, seed: int = 0) -> RowPolicy:
    """Make a policy. Raises EvictError for an unknown name."""
    try:
        kind = ROW_POLICIES[name]
    except KeyError:
        raise EvictError(f'policy is "{name}"; choose one of {", ".join(ROW_POLICIES)}') from None
    return kind(sets)
