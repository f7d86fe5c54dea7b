"""Torch's modes while caches train, whatever the program has set for its own work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def modes_of_training() -> Iterator[None]:
    """Inside, gradients are recorded, autocast is off, and tensors are made as float32 on the CPU.

    Programs that only run networks often turn gradients off once, for all of their threads' work.
    """
    dtype, elsewhere = torch.get_default_dtype(), torch.get_default_device().type != "cpu"
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
            torch.device("cpu") if elsewhere else nullcontext(),  # which slows every operator a little
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
