"""Torch's modes while caches train, whatever the program has set for its own work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gati.model.load import plain_defaults


@contextmanager
def modes_of_training() -> Iterator[None]:
    """Inside, gradients are recorded, autocast is off, and tensors are made as float32 on the CPU.

    Programs that only run networks often turn gradients off once, for all of their threads' work.
    """
    with (
        plain_defaults(),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        yield
