"""Sets of embedding rows kept by the letter, one id at a time."""

from __future__ import annotations

import numpy as np

from gati.evict.embed.sets import hashed


class NaiveLru:
    """LRU within hashed sets: of a batch, every id is used where it occurs last."""

    def __init__(self, sets: int, room: list[int]) -> None:
        self.sets = sets
        self.room = room
        self.held: list[list[int]] = [[] for _ in range(sets)]  # the least recently used first

    def access(self, batch: list[int]) -> int:
        """Serve a batch; how many different ids it lacked."""
        different = sorted(set(batch), key=lambda id_: len(batch) - 1 - batch[::-1].index(id_))
        homes = hashed(np.array(different, dtype=np.int64), self.sets).homes.tolist()
        missing = sum(id_ not in self.held[home] for id_, home in zip(different, homes, strict=True))
        for id_, home in zip(different, homes, strict=True):
            held = self.held[home]
            if id_ in held:
                held.remove(id_)
            held.append(id_)
            del held[: max(len(held) - self.room[home], 0)]
        return missing

    def resize(self, room: list[int]) -> None:
        """Change how many ids each set may hold."""
        self.room = room
        for held, most in zip(self.held, room, strict=True):
            del held[: max(len(held) - most, 0)]

    def forget(self, ids: list[int]) -> None:
        """Drop these ids."""
        for held in self.held:
            held[:] = [id_ for id_ in held if id_ not in ids]


def leave_one_by_one(
    queue: list[tuple[int, float]], *, used: int, safe: int, window: int, count: int
) -> list[int]:
    """Evict `count` of a set's ids, given in LRU's order with predictions; one enters after each."""
    held, entering = queue[:used], queue[used:]
    gone = []
    for number in range(count):
        if number < safe:
            victim = held[0]
        else:
            oldest = held[:window]
            victim = max(oldest, key=lambda each: (each[1], -held.index(each)))
        held.remove(victim)
        gone.append(victim[0])
        held.append(entering[number])
    return gone
