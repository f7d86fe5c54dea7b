"""What belongs to batches is remembered within bounds."""

from __future__ import annotations

import torch

from gati.exploration.remembered import BatchMemory, rounded
from gati.exploration.views import ViewedBatch


def test_memory_gives_back_what_was_put_in_and_keeps_to_its_limit() -> None:
    memory = BatchMemory(rounds=2, places=3, limit_bytes=4 * 2 * 8 * 5)  # four batches
    batches = [ViewedBatch(number, place) for number in range(2) for place in range(3)]
    rows = {batch: torch.randn(8, 5) for batch in batches}
    assert all(memory.get(batch) is None for batch in batches)
    for batch in reversed(batches):
        memory.put(batch, rows[batch])
    for batch in batches[:4]:
        found = memory.get(batch)
        assert found is not None and torch.equal(found, rounded(rows[batch]))
    assert all(memory.get(batch) is None for batch in batches[4:])
    assert memory.memory_bytes == 4 * 2 * 8 * 5


def test_memory_of_nothing_keeps_nothing() -> None:
    memory = BatchMemory(rounds=1, places=2, limit_bytes=10)
    memory.put(ViewedBatch(0, 0), torch.randn(8, 5))
    assert memory.get(ViewedBatch(0, 0)) is None and memory.memory_bytes == 0
