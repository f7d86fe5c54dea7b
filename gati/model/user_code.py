"""Running the user's network, which may raise anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from gati.errors import GatiError, ModelError


@contextmanager
def running_user_code(message: Callable[[Exception], str]) -> Iterator[None]:
    """Inside the context, an error becomes a `ModelError` with the `message` about it.

    Gati's own errors pass unchanged, and so does a lack of memory: both say more than a message here could.
    """
    try:
        yield
    except (GatiError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(message(error)) from error
