"""The processor and the software that run a network: latencies hold only where they were measured."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gati.types import Conditions, Profile

_INFO = Path("/proc/cpuinfo")
_RUNTIMES = ("nncf", "onnxruntime", "openvino", "torch")


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


@cache
def software() -> str:
    """The packages that run networks here, with their versions."""
    return ", ".join(f"{name} {found}" for name in _RUNTIMES if (found := _version(name)))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def conditions_here(device: str) -> Conditions:
    """What latencies depend on that are measured now on `device`, such as "cpu" or "cuda:0"."""
    import torch

    processor, threads = processor_name(device), torch.get_num_threads()
    return Conditions(processor=processor, threads=threads, software=software())


def is_from_here(profile: Profile) -> bool:
    """Whether its latencies were measured on this machine's processor, as those of an older Gati may be."""
    return profile.processor in ("", processor_name(profile.device))
