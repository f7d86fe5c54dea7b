"""The floating-point precision of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def bfloat16_pays() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX)."""
    capabilities = torch.backends.cpu.get_cpu_capability()
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return capabilities.startswith("AVX512") and supported is not None and bool(supported())


def gains_by_bfloat16(module: nn.Module) -> bool:
    """Whether a network trains faster in bfloat16 on such a CPU; depthwise convolutions are slower in it."""
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    return 4 * sum(layer.groups > 1 for layer in convolutions) <= len(convolutions)


@contextmanager
def training_precision(device: torch.device, gains: bool = True) -> Iterator[None]:
    """Train in bfloat16 if hardware and network gain from it; measurements are always in float32.

    Weights are cast each time they are used. Autocast would otherwise keep what it has cast, and inside
    another autocast, even one that is off, it would keep that however the weights change.
    """
    enabled = device.type == "cuda" or (device.type == "cpu" and gains and bfloat16_pays())
    with torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False):
        yield
