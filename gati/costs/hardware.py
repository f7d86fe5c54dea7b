"""The name of the processor that runs a network: latencies hold only where they were measured."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

from gati.types import Profile

_INFO = Path("/proc/cpuinfo")


@cache
def cpu_name() -> str:
    """The name of this machine's CPU, or its architecture if the system does not tell."""
    if _INFO.is_file():
        with _INFO.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:  # one part per core, so the first is enough
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def processor_name(device: str) -> str:
    """The name of the GPU that `device` is, such as "cuda:0", or that of the CPU; "" if it is not here."""
    if not device.startswith("cuda"):
        return cpu_name()
    import torch

    found = torch.device(device)
    here = torch.cuda.device_count()
    return torch.cuda.get_device_name(found) if (found.index or 0) < here else ""


def is_from_here(profile: Profile) -> bool:
    """Whether its latencies were measured on this machine's processor, as those of an older Gati may be."""
    return profile.processor in ("", processor_name(profile.device))
