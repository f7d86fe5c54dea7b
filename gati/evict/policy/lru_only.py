"""The blocks that only an LRU cache would still have, because a prediction evicted them here."""

from __future__ import annotations

from collections.abc import Collection, Iterator


class LruOnly:
    """Blocks, when each was evicted here, and what they cost together."""

    __slots__ = ("_blocks", "cost")

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[float, float]] = {}  # when it was evicted, and its cost
        self.cost = 0.0

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def add(self, block: int, evicted: float, cost: float) -> None:
        """Evicted at the clock `evicted`."""
        self._blocks[block] = evicted, cost
        self.cost += cost

    def discard(self, blocks: Collection[int]) -> float:
        """Remove those of `blocks` that are here; return their cost."""
        gone = 0.0
        if self._blocks.keys().isdisjoint(blocks):
            return gone
        for block in blocks:
            known = self._blocks.pop(block, None)
            if known is not None:
                gone += known[1]
        self.cost = self.cost - gone if self._blocks else 0.0  # rounding errors do not add up
        return gone

    def evictions(self, blocks: Collection[int]) -> list[tuple[float, float]]:
        """When those of `blocks` that are here were evicted, latest first, and the largest cost at that time.

        Earlier evictions of blocks that cost no more say nothing that later ones do not, and are left out.
        """
        if self._blocks.keys().isdisjoint(blocks):
            return []
        found = [self._blocks[block] for block in blocks if block in self._blocks]
        telling: list[tuple[float, float]] = []
        for evicted, cost in sorted(found, reverse=True):
            if not telling or cost > telling[-1][1]:
                telling.append((evicted, cost))
        return telling
