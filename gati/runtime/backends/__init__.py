"""Backends by name; importing this registers those that come with Gati."""

from gati.runtime.backends.base import BACKENDS, Backend, Path, get_backend, register_backend
from gati.runtime.backends.torch import TorchBackend

__all__ = ["BACKENDS", "Backend", "Path", "TorchBackend", "get_backend", "register_backend"]
