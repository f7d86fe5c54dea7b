"""OpenVINO: the early-exit network as one compiled graph, `If` nodes decide inside."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gati.errors import BackendError
from gati.runtime.backends.base import Graph, GraphBackend, register_backend

__all__ = ["OpenVinoBackend"]

_NEEDED = ("openvino", "onnx", "onnxscript")


class _OpenVinoGraph(Graph):
    def __init__(self, compiled: Any) -> None:
        import openvino

        self._request = compiled.create_infer_request()
        self._infer = self._request.infer
        self._input = np.zeros(tuple(compiled.input(0).shape), dtype=np.float32)
        self._request.set_input_tensor(0, openvino.Tensor(self._input, shared_memory=True))

    def answer(self, x: Tensor) -> tuple[Tensor, int]:
        """As `Graph.answer`; the result is a copy, the request's own tensors are used again."""
        np.copyto(self._input, x.numpy())
        self._infer()
        probabilities = self._request.get_output_tensor(0).data
        return torch.from_numpy(probabilities.copy()), int(self._request.get_output_tensor(1).data[0])


@register_backend("openvino")
class OpenVinoBackend(GraphBackend):
    """OpenVINO on the CPU in float32."""

    precision: ClassVar[str] = "f32"

    def __init__(self) -> None:
        missing = [name for name in _NEEDED if find_spec(name) is None]
        if missing:
            raise BackendError(
                f"backend '{self.name}' needs {', '.join(missing)}, not installed here: "
                "pip install 'gati[openvino]'"
            )

    @classmethod
    def installed(cls) -> bool:
        """Whether the packages are there."""
        return all(find_spec(name) is not None for name in _NEEDED)

    def compile(self, model: bytes) -> Graph:
        """As `GraphBackend.compile`."""
        core = _core()
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": self.precision,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        return _OpenVinoGraph(core.compile_model(core.read_model(model=model), "CPU", settings))


_CORES: list[Any] = []


def _core() -> Any:
    """One runtime a process: it owns the thread pools."""
    if not _CORES:
        import openvino

        _CORES.append(openvino.Core())
    return _CORES[0]
