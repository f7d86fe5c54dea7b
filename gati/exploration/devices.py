"""The device that an exploration computes on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from gati.errors import BackendError


def resolve_device(name: str) -> torch.device:
    """Turn `cpu`, `cuda` or `cuda:1` into a device. Raises `BackendError` if it is not there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BackendError(f"unknown device {name!r}: choose cpu, cuda or cuda:INDEX") from error
    if device.type not in ("cpu", "cuda"):
        raise BackendError(f"device {name!r} is not supported: choose cpu, cuda or cuda:INDEX")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(
            "no CUDA device is available here: use --device cpu, or install the GPU build of torch"
        )
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise BackendError(
            f"device {name!r} is not available here: choose one from cuda:0 to cuda:{count - 1}"
        )
    return device


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which `device` is CUDA's current one: graphs, streams and events belong to that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
