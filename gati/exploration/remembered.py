"""Tensors of batches that repeat, kept so that they are computed only once."""

from __future__ import annotations

import torch
from torch import Tensor

from gati.exploration.memory import spare_bytes
from gati.exploration.views import ViewedBatch

KEPT_TYPE = torch.float16
MOST_KEPT_BYTES = 2**30  # of answers, and of each kind of views
_MOST_ROUNDING = 0.1  # of a value, relative to its standard deviation over inputs
_CONSTANT = 1e-6  # a smaller spread, relative to the value, is no difference


class BatchMemory:
    """One tensor [B, ...] per batch, as `dtype` and where the first one was, up to `limit_bytes`.

    Further batches are not kept.
    """

    def __init__(
        self,
        rounds: int,
        places: int,
        limit_bytes: int = MOST_KEPT_BYTES,
        dtype: torch.dtype = KEPT_TYPE,
    ) -> None:
        self._slots, self._places, self._limit_bytes = rounds * places, places, limit_bytes
        self._dtype = dtype
        self._rows: Tensor | None = None
        self._known: set[int] = set()

    @property
    def memory_bytes(self) -> int:
        """Bytes that are reserved."""
        return 0 if self._rows is None else self._rows.nbytes

    def get(self, batch: ViewedBatch) -> Tensor | None:
        """Return the tensor of a batch in float32, or None."""
        slot = self._slot(batch)
        return self._rows[slot].float() if self._rows is not None and slot in self._known else None

    def put(self, batch: ViewedBatch, rows: Tensor) -> Tensor:
        """Keep the tensor of a batch, and return it as `get` would; all tensors have the same shape."""
        kept = rounded(rows, self._dtype)
        if self._rows is None:
            fitting = min(self._slots, self._limit_bytes // max(1, kept.nbytes))
            self._rows = torch.empty((fitting, *kept.shape), dtype=self._dtype, device=kept.device)
        slot = self._slot(batch)
        if slot < len(self._rows):
            self._rows[slot] = kept
            self._known.add(slot)
        return kept.float()

    def _slot(self, batch: ViewedBatch) -> int:
        return batch.round * self._places + batch.place


def bytes_to_plan_with(device: torch.device) -> int:
    """The memory of a device for what repeats, before training: half of it, as less may be free by then."""
    return spare_bytes(MOST_KEPT_BYTES, device) // 2


def rounded(rows: Tensor, dtype: torch.dtype = KEPT_TYPE) -> Tensor:
    """Return a tensor as `dtype`; values beyond its range become its largest, not infinity."""
    limits = torch.finfo(dtype)
    return rows.clamp(limits.min, limits.max).to(dtype)


def type_that_keeps(view: Tensor) -> torch.dtype:
    """Return float16, or float32 if inputs [B, ...] like these would lose their differences in it.

    So do readings of sensors that are far from 0, and those beyond 65504. What all inputs have in common
    says nothing, so it may be rounded.
    """
    error = (view - rounded(view).float()).abs().amax(0)
    spread = view.std(0, correction=0)
    varies = spread > _CONSTANT * view.abs().amax(0)
    return torch.float32 if bool((varies & (error > _MOST_ROUNDING * spread)).any()) else KEPT_TYPE
