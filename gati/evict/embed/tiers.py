"""Slow tiers, which store all rows of a table: in memory, in a mapped file, or in Redis (`redis_tier`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from gati.errors import EvictError
from gati.files import atomic_write

Ids = NDArray[np.int64]


class SlowTier(Protocol):
    """Stores every row of one table. `fetch` must be thread-safe."""

    @property
    def rows(self) -> int:
        """The number of rows: ids are 0..rows-1."""

    @property
    def width(self) -> int:
        """Numbers in a row."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers."""

    def fetch(self, ids: Ids) -> torch.Tensor:
        """Return the rows of distinct `ids` [n], which are all in range, as [n, width]."""


@runtime_checkable
class AskedTier(SlowTier, Protocol):
    """A tier that can fetch rows while the caller continues."""

    def ask(self, ids: Ids, out: torch.Tensor) -> Callable[[], None]:
        """Start to fetch rows into `out`, a contiguous tensor [n, width] of the tier's type.

        Returns a function that waits for the rows, to be called once in the same thread, which requests
        nothing else before. If it has a method `receive`, that is called in between: it takes in what has
        arrived, without waiting.
        """


def checked_table(weight: torch.Tensor) -> torch.Tensor:
    """The table without its gradient. Raises EvictError for what is no table of rows."""
    if not isinstance(weight, torch.Tensor):
        raise EvictError(
            f"the table is of type {type(weight).__name__}; give a tensor [rows, width] of floating-point "
            "numbers on the CPU, as torch.from_numpy makes one"
        )
    if weight.ndim != 2 or 0 in weight.shape or weight.device.type != "cpu" or not weight.is_floating_point():
        raise EvictError(
            f"the table has shape {tuple(weight.shape)}, type {weight.dtype}, on {weight.device}; give a "
            "tensor [rows, width] of floating-point numbers on the CPU"
        )
    return weight.detach()


def bytes_of(rows: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor of rows [n, width], n at least 1, as an array [n, bytes of a row]."""
    # of one column, as `linear.weight.t()`, torch views no bytes: its stride may be anything
    return rows.view(-1).view(torch.uint8).view(len(rows), -1).numpy()


class MemoryTier:
    """A table in memory. If rows of `weight` change later, call `forget` on the caches in front of it."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Raises EvictError for what is no table."""
        self._weight = checked_table(weight)
        self.rows, self.width = weight.shape
        self.dtype = weight.dtype

    def fetch(self, ids: Ids) -> torch.Tensor:
        """Copy the rows."""
        return self._weight.index_select(0, torch.from_numpy(ids))


class FileTier:
    """A table in a raw file of rows, mapped into memory; the system caches as much as memory allows.

    It keeps the file that it opened. If another one takes its place, as by `write`, make another tier, and
    another cache. Rows that are changed within the file are read as they are: call `forget` on caches.
    """

    def __init__(self, path: str | Path, *, width: int, dtype: torch.dtype = torch.float32) -> None:
        """Map `path`. Raises EvictError if it cannot be read or has an incomplete row."""
        self.width, self.dtype = width, dtype
        row_bytes = width * dtype.itemsize
        try:
            if not S_ISREG(Path(path).stat().st_mode):  # to open a named pipe would wait for its writer
                raise EvictError(f"{path} cannot be read (no regular file): write it with FileTier.write")
            with Path(path).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if width < 1 or size == 0 or size % row_bytes:
                    raise EvictError(
                        f"{path} has {size} bytes, not a multiple of {row_bytes} (a row of {width} {dtype}): "
                        "give the width and dtype it was written with"
                    )
                self.rows = size // row_bytes
                self._bytes = np.memmap(file, dtype=np.uint8, mode="r", shape=(self.rows, row_bytes))
        except OSError as error:
            raise EvictError(
                f"{path} cannot be read ({error.strerror}): write it with FileTier.write"
            ) from None

    @classmethod
    def write(cls, path: str | Path, weight: torch.Tensor) -> FileTier:
        """Write a table [rows, width] atomically, and map it. Raises StorageError, EvictError."""
        content = bytes_of(checked_table(weight).contiguous())
        atomic_write(Path(path), lambda part: content.tofile(part))
        return cls(path, width=weight.shape[1], dtype=weight.dtype)

    def fetch(self, ids: Ids) -> torch.Tensor:
        """Copy the rows out of the file, in file order if ids are sorted."""
        return torch.from_numpy(self._bytes[ids]).view(self.dtype)
