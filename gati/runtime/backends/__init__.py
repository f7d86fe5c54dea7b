"""Backends by name; importing this registers those that come with Gati."""

from gati.runtime.backends.base import BACKENDS, Backend, Path, Requests, get_backend, register_backend
from gati.runtime.backends.openvino import OpenVinoBackend, OpenVinoBrainFloatBackend
from gati.runtime.backends.torch import TorchBackend

__all__ = [
    "BACKENDS",
    "Backend",
    "OpenVinoBackend",
    "OpenVinoBrainFloatBackend",
    "Path",
    "Requests",
    "TorchBackend",
    "get_backend",
    "register_backend",
]
