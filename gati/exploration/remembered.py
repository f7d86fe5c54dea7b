"""Tensors of batches that repeat, kept so that they are computed only once."""

from __future__ import annotations

import torch
from torch import Tensor

from gati.exploration.views import ViewedBatch


class BatchMemory:
    """One tensor [B, ...] per batch, in float16 and where the first one was, up to `limit_bytes`.

    Further batches are not kept.

    Callers apply `rounded` to newly computed tensors, so that these equal the kept ones.
    """

    def __init__(self, rounds: int, places: int, limit_bytes: int = 2**30) -> None:
        self._slots, self._places, self._limit_bytes = rounds * places, places, limit_bytes
        self._rows: Tensor | None = None
        self._known: set[int] = set()

    @property
    def memory_bytes(self) -> int:
        """Bytes that are reserved."""
        return 0 if self._rows is None else 2 * self._rows.numel()

    def get(self, batch: ViewedBatch) -> Tensor | None:
        """Return the tensor of a batch in float32, or None."""
        slot = self._slot(batch)
        return self._rows[slot].float() if self._rows is not None and slot in self._known else None

    def put(self, batch: ViewedBatch, rows: Tensor) -> None:
        """Keep the tensor of a batch; all tensors have the same shape."""
        if self._rows is None:
            fitting = min(self._slots, self._limit_bytes // max(1, 2 * rows.numel()))
            self._rows = torch.empty((fitting, *rows.shape), dtype=torch.float16, device=rows.device)
        slot = self._slot(batch)
        if slot < len(self._rows):
            self._rows[slot] = rows.half()
            self._known.add(slot)

    def _slot(self, batch: ViewedBatch) -> int:
        return batch.round * self._places + batch.place


def rounded(rows: Tensor) -> Tensor:
    """Return a tensor as `BatchMemory.get` would return it."""
    return rows.half().float()
