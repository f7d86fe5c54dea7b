"""Keeping freed memory in the process while training allocates and frees it repeatedly.

By default, glibc returns every large block to the system when it is freed, and the system clears it page by
page when it is allocated again. Activations of a batch of images take many megabytes: on EfficientNet-Lite0
at 224 pixels, clearing pages took as long as computing.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_ALWAYS_KEPT = 2**31 - 1
_USUAL_THRESHOLD = 32 << 20  # the largest value that glibc itself sets


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed blocks of any size for later allocations, and return them at the end.

    Does nothing if the C library is not glibc.
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


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt") else None
