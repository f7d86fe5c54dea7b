"""Which numbers training computes with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["bfloat16_pays", "training_precision"]


def bfloat16_pays() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX)."""
    capabilities = torch.backends.cpu.get_cpu_capability()
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return capabilities.startswith("AVX512") and supported is not None and bool(supported())


@contextmanager
def training_precision(device: torch.device) -> Iterator[None]:
    """Train in bfloat16 where the hardware gains by it; measuring is always in float32."""
    enabled = device.type == "cuda" or (device.type == "cpu" and bfloat16_pays())
    with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
        yield
