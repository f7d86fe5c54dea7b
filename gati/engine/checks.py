"""Checks, when an engine is built, that exits fit the network and the backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gati.engine.backends import SegmentBackend, get_backend
from gati.engine.exits import EngineExit
from gati.errors import BackendError, GatiError, LibraryError, first_line, one_line


def listed(shape: Sequence[int]) -> str:
    """A shape as text, for messages."""
    return ", ".join(map(str, shape))


def check_placement(leaving: EngineExit, backend: str) -> None:
    """Raise BackendError for a placement that is unknown or that the backend does not support."""
    if leaving.placement == "overlapped" and not isinstance(get_backend(backend), SegmentBackend):
        raise BackendError(
            f"backend '{backend}' runs lookups inside its graph; compose with --placement inline"
        )
    if leaving.placement not in ("inline", "overlapped"):
        raise BackendError(
            f"unknown placement '{leaving.placement}' at block '{leaving.block}'; choose inline or overlapped"
        )


def check_lookup(leaving: EngineExit, lookup: Any, hidden: Tensor, classes: int) -> None:
    """Run a lookup on a hidden output [1, ...]; raise LibraryError if it does not fit the block."""
    try:
        probabilities, score = lookup(hidden)
    except (RuntimeError, ValueError, IndexError) as error:
        reason = first_line(error)
    else:
        if probabilities.shape == (1, classes) and score.shape == (1,):
            return
        reason = f"it returns shapes {list(probabilities.shape)} and {list(score.shape)}"
    variant = leaving.variant or type(leaving.cache).__name__
    raise LibraryError(
        f"the learned cache {variant} does not fit block '{leaving.block}' with output "
        f"{list(hidden.shape[1:])} and {classes} classes: {reason}; restore the code of its "
        "predictor and of the network, or run gati explore again with another --out"
    )


@contextmanager
def prepared_on(backend: str) -> Iterator[None]:
    """Raise BackendError for what a runtime raises while it prepares the network.

    Too little memory and errors of the system remain as they are: they may pass, so a service tries again.
    """
    try:
        yield
    except (GatiError, MemoryError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each runtime raises its own
        raise BackendError(
            f"backend '{backend}' cannot run this network ({one_line(error)}); run gati compose with another "
            "--backend"
        ) from error
