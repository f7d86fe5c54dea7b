"""`torch.compile`: segments and lookups compiled on first use; on CUDA, replayed as CUDA graphs."""

from __future__ import annotations

import shutil
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gati.engine.backends.base import Path, register_backend
from gati.engine.backends.cuda_graph import CapturingBackend
from gati.engine.exits import Lookup
from gati.errors import BackendError, first_line
from gati.model.program import as_module
from gati.model.segments import TracedModel

_COMPILERS = ("c++", "g++", "clang++")
_COMPILING = threading.Lock()  # warning filters belong to the whole process


class _Compiled:
    """A function compiled for single requests; batches run uncompiled, because their sizes vary."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        flat = as_module(run) if isinstance(run, FunctionType) and hasattr(run, "source") else run
        self._single = torch.compile(flat, dynamic=False)
        self._ready = False

    def __call__(self, *tensors: Tensor) -> Any:
        if tensors[0].shape[0] != 1:
            return self._run(*tensors)
        if self._ready:
            return self._single(*tensors)
        from torch._inductor import config

        # Freezing folds normalisation into the weights and changes their layout once, not in every call. If
        # passed to torch.compile, this option would come too late: by then the weights are arguments.
        with _COMPILING, config.patch(freezing=True), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings for the compiler's developers
            try:
                result = self._single(*tensors)
            except Exception as error:  # a missing or failing compiler raises many unrelated types
                why = first_line(error)
                raise BackendError(
                    f"backend torch-compile cannot compile the network: {why}; use --backend torch"
                ) from error
            self._ready = True
        return result


@register_backend("torch-compile")
class TorchCompileBackend(CapturingBackend):
    """Runs the network through `torch.compile`; needs a C++ compiler and seconds per segment to compile."""

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    automatic: ClassVar[tuple[str, ...]] = ("cuda",)  # on the CPU, other backends run and start faster

    def __init__(self) -> None:
        if not self.installed():
            raise BackendError(
                f"backend '{self.name}' needs a C++ compiler ({', '.join(_COMPILERS)}), none is installed: "
                "apt-get install g++"
            )
        # While one thread compiles, torch sets a flag that all threads see. Compiled functions then raise an
        # error in other threads; with this setting they run uncompiled there.
        torch._dynamo.config.error_on_nested_fx_trace = False

    @classmethod
    def installed(cls) -> bool:
        """Whether there is a C++ compiler."""
        return any(shutil.which(name) for name in _COMPILERS)

    def operators(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """The network and its segments, compiled when first called."""
        plain = super().operators(traced, blocks)
        segments = tuple(replace(segment, run=_Compiled(segment.run)) for segment in plain.segments)
        return Path(base=_Compiled(plain.base), segments=segments)

    def plain_lookup(self, cache: nn.Module, hidden: Tensor) -> Lookup:
        """The cache, compiled when first called."""
        fusible = getattr(cache, "fusible", None)
        if fusible is not None and hidden.device.type == "cuda":
            cache = fusible()
        return _Compiled(super().plain_lookup(cache, hidden))
