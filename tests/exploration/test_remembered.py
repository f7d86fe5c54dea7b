"""What belongs to batches is remembered within bounds."""

from __future__ import annotations

import pytest
import torch

from gati.exploration.remembered import BatchMemory, type_that_keeps
from gati.exploration.views import ViewedBatch


def test_memory_gives_back_what_was_put_in_and_keeps_to_its_limit() -> None:
    memory = BatchMemory(rounds=2, places=3, limit_bytes=4 * 2 * 8 * 5)  # four batches
    batches = [ViewedBatch(number, place) for number in range(2) for place in range(3)]
    rows = {batch: torch.randn(8, 5) for batch in batches}
    assert all(memory.get(batch) is None for batch in batches)
    for batch in reversed(batches):
        assert torch.equal(memory.put(batch, rows[batch]), rows[batch].half().float())
    for batch in batches[:4]:
        found = memory.get(batch)
        assert found is not None and torch.equal(found, rows[batch].half().float())
    assert all(memory.get(batch) is None for batch in batches[4:])
    assert memory.memory_bytes == 4 * 2 * 8 * 5


def test_memory_of_nothing_keeps_nothing() -> None:
    memory = BatchMemory(rounds=1, places=2, limit_bytes=10)
    memory.put(ViewedBatch(0, 0), torch.randn(8, 5))
    assert memory.get(ViewedBatch(0, 0)) is None and memory.memory_bytes == 0


def test_values_beyond_half_precision_stay_finite() -> None:
    memory = BatchMemory(rounds=1, places=1)
    rows = torch.tensor([[0.0, -1e9], [-1e9, 0.0]])
    assert torch.equal(memory.put(ViewedBatch(0, 0), rows), rows.clamp(-65_504, 65_504))


@pytest.mark.parametrize(
    ("centre", "spread", "expected"),
    [
        (0.0, 1.0, torch.float16),
        (100.0, 1.0, torch.float16),
        (10_000.0, 1.0, torch.float32),
        (101_325.0, 100.0, torch.float32),
        (0.0, 1e-9, torch.float32),
        (-0.4242, 0.0, torch.float16),
    ],
)
def test_inputs_are_kept_as_a_type_that_tells_them_apart(
    centre: float, spread: float, expected: torch.dtype
) -> None:
    noise = torch.randn(64, 3, 4, generator=torch.Generator().manual_seed(0))
    inputs = centre + spread * noise
    assert type_that_keeps(inputs) == expected
    kept = BatchMemory(rounds=1, places=1, dtype=expected).put(ViewedBatch(0, 0), inputs)
    assert float((kept - inputs).abs().max()) <= max(0.1 * spread, 1e-3 * abs(centre) * (spread == 0.0))
