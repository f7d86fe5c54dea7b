"""What glibc does with large blocks of memory that are freed. With another C library nothing changes.

By default glibc maps blocks from 128 KiB on by themselves, and returns them to the system when they are
freed; but each one that is freed raises that bound, to 32 MiB at most. Training and serving want opposites.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_ALWAYS_KEPT = 2**31 - 1
_USUAL_THRESHOLD = 32 << 20  # the largest value that glibc itself sets
_LARGE_BYTES = 1 << 20
_KEPT_BYTES = 16 << 20


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed blocks of any size for later allocations, and return them at the end.

    For training, which allocates and frees activations of many megabytes: the system clears each page that
    it hands out again, which took as long as computing on EfficientNet-Lite0 at 224 pixels.
    """
    library = _glibc()
    if library is None:
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, _ALWAYS_KEPT)
    library.mallopt(_TRIM_THRESHOLD, _ALWAYS_KEPT)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, _USUAL_THRESHOLD)
        library.mallopt(_TRIM_THRESHOLD, 2 * _USUAL_THRESHOLD)
        library.malloc_trim(0)


def return_freed_memory() -> None:
    """Return freed blocks of 1 MiB or more to the system at once, from now on.

    For servers: a request's body that grows within the heap is copied there, which holds it twice and keeps
    the space. A block that is mapped by itself grows in place.
    """
    library = _glibc()
    if library is not None:
        library.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)  # else 128 KiB, now that nothing raises it


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt") else None
