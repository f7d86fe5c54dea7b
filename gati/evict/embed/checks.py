"""Checks of the inputs of `EmbeddingCache`, with one-line error messages."""

from __future__ import annotations

import numpy as np
import torch

from gati.errors import EvictError
from gati.evict.embed.tiers import Ids

MODES = ("sum", "mean")
_INTEGERS = (torch.int32, torch.int64)
_NUMBERS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # that `embedding_bag` sums


def check_numbers(dtype: torch.dtype) -> None:
    """Raise EvictError for rows of a type that cannot be summed."""
    if dtype not in _NUMBERS:
        raise EvictError(
            f"the rows of the slow tier are {dtype}, which cannot be summed; give one of "
            f"{', '.join(map(str, _NUMBERS))}"
        )


def padding_of(padding_idx: int | None, rows: int) -> int | None:
    """Return the padding's id, from 0. Raises EvictError if the table has no such row."""
    if padding_idx is None:
        return None
    if not -rows <= padding_idx < rows:
        raise EvictError(f"padding_idx is {padding_idx}; the table has rows 0 to {rows - 1}")
    return padding_idx % rows


def check_ids(ids: torch.Tensor) -> torch.Tensor:
    """Return ids [n], flat and as int64. Raises EvictError for other types."""
    if ids.dtype not in _INTEGERS or ids.device.type != "cpu" or ids.ndim not in (1, 2):
        raise EvictError(
            f"input has shape {tuple(ids.shape)}, type {ids.dtype}, on {ids.device}; give int64 ids on the "
            "CPU, [n] with offsets or [bags, ids]"
        )
    return ids.reshape(-1).to(torch.int64)


def check_range(flat: Ids, rows: int) -> None:
    """Raise EvictError for ids [n] out of range."""
    unsigned = flat.view(np.uint64)  # negative ids are larger than all others
    if unsigned.max(initial=0) >= rows:
        at = int((unsigned >= rows).argmax())
        raise EvictError(
            f"id {int(flat[at])} at position {at} is out of range: the table has rows 0 to {rows - 1}"
        )


def check_offsets(ids: torch.Tensor, offsets: torch.Tensor | None, *, include_last: bool) -> None:
    """Raise EvictError for offsets that do not cut `ids` into bags."""
    if ids.ndim == 2:
        if offsets is not None:
            raise EvictError(
                "offsets were given with a 2-d input, whose rows are the bags: leave offsets out"
            )
        if ids.shape[1] == 0:
            raise EvictError("the bags of a 2-d input have no ids; give a 1-d input with offsets")
        return
    if offsets is None:
        raise EvictError("a 1-d input needs offsets, which say where bags begin")
    if offsets.dtype not in _INTEGERS or offsets.ndim != 1 or offsets.device.type != "cpu":
        raise EvictError(
            f"offsets have shape {tuple(offsets.shape)}, type {offsets.dtype}, on {offsets.device}; give "
            "int64 numbers [bags] on the CPU"
        )
    if len(offsets) == 0:
        if include_last:
            raise EvictError("offsets are empty; with include_last_offset they hold at least the last one")
        return
    if int(offsets[0]) != 0:
        raise EvictError(f"offsets begin with {int(offsets[0])}; the first bag begins at 0")
    falls = (offsets[1:] < offsets[:-1]).nonzero()
    if len(falls):
        at = int(falls[0]) + 1
        raise EvictError(
            f"offsets decrease from {int(offsets[at - 1])} to {int(offsets[at])} at position {at}; "
            "they must not decrease"
        )
    last, count = int(offsets[-1]), ids.shape[0]
    if last > count:
        raise EvictError(f"the last offset is {last}, but the input has {count} ids")
    if include_last and last < count:  # torch sums the other ids, too, or crashes, depending on the type
        raise EvictError(
            f"the last offset is {last}, but the input has {count} ids: with include_last_offset, the last "
            "offset is the number of ids, so give the input without the others"
        )


def check_weights(ids: torch.Tensor, weights: torch.Tensor | None, mode: str, dtype: torch.dtype) -> None:
    """Raise EvictError for weights that do not belong to `ids`."""
    if weights is None:
        return
    if mode != "sum":
        raise EvictError(f'per_sample_weights are for mode "sum", this cache has mode "{mode}"')
    if weights.shape != ids.shape or weights.dtype != dtype:
        raise EvictError(
            f"per_sample_weights have shape {tuple(weights.shape)} and type {weights.dtype}; the input needs "
            f"{tuple(ids.shape)} and {dtype}"
        )
