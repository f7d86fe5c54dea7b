"""ONNX Runtime: the early-exit network as one session, with `If` nodes for decisions."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gati.engine.backends.base import Graph, GraphBackend, imported, register_backend
from gati.engine.graph.stages import INPUT, OUTPUTS


class _OnnxRuntimeGraph(Graph):
    def __init__(self, session: Any) -> None:
        self._session = session

    def answer(self, x: Tensor) -> tuple[Tensor, int]:
        """As `Graph.answer`."""
        probabilities, exit = self._session.run(OUTPUTS[:2], {INPUT: np.ascontiguousarray(x.numpy())})
        return torch.from_numpy(probabilities), int(exit[0])


@register_backend("onnxruntime")
class OnnxRuntimeBackend(GraphBackend):
    """ONNX Runtime on the CPU in float32."""

    needed: ClassVar[tuple[str, ...]] = ("onnxruntime", "onnx", "onnxscript")
    extra: ClassVar[str] = "onnxruntime"

    def compile(self, model: bytes, threads: int | None = None) -> Graph:
        """As `GraphBackend.compile`."""
        onnxruntime = imported("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.log_severity_level = 3
        # Threads that spin between layers halve the time of small networks. But if they spin between requests
        # too, the thread pools of several sessions compete for the cores.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        return _OnnxRuntimeGraph(
            onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        )
