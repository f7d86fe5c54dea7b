"""The machine and the software that `gati bench` measured on."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

from gati.cores import core_count
from gati.costs.hardware import cpu_name
from gati.evaluation.bench_result import BenchMachine
from gati.version import __version__

_PACKAGES = ("torch", "numpy", "onnxruntime", "openvino", "nncf")


def machine_here(device: torch.device, threads: int) -> BenchMachine:
    """Return what is known of this machine; `threads` is the number that torch uses."""
    return BenchMachine(
        cpu=cpu_name(),
        cores=core_count(),
        threads=threads,
        system=f"{platform.system()} {platform.machine()}",
        load_average=tuple(round(value, 2) for value in os.getloadavg()),
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    )


def versions_here() -> dict[str, str]:
    """The versions of Python, Gati and the packages that run networks, by name."""
    found = {"python": platform.python_version(), "gati": __version__}
    installed = {entry.metadata["Name"] for entry in metadata.distributions()}
    return {**found, **{name: metadata.version(name) for name in _PACKAGES if name in installed}}
