"""Backends by name; importing this package registers Gati's own backends."""

from gati.engine.backends.base import (
    BACKENDS,
    Backend,
    Graph,
    GraphBackend,
    Path,
    SegmentBackend,
    SingleExit,
    SinglePath,
    get_backend,
    register_backend,
    segment_backend,
)
from gati.engine.backends.cuda_graph import CudaGraphBackend
from gati.engine.backends.int8_lookups import (
    OnnxRuntimeInt8LookupsBackend,
    OpenVinoInt8LookupsBackend,
)
from gati.engine.backends.onnxruntime import OnnxRuntimeBackend
from gati.engine.backends.openvino import OpenVinoBackend, OpenVinoBf16Backend, OpenVinoInt8Backend
from gati.engine.backends.torch import TorchBackend
from gati.engine.backends.torch_compile import TorchCompileBackend

__all__ = [
    "BACKENDS",
    "Backend",
    "CudaGraphBackend",
    "Graph",
    "GraphBackend",
    "OnnxRuntimeBackend",
    "OnnxRuntimeInt8LookupsBackend",
    "OpenVinoBackend",
    "OpenVinoBf16Backend",
    "OpenVinoInt8Backend",
    "OpenVinoInt8LookupsBackend",
    "Path",
    "SegmentBackend",
    "SingleExit",
    "SinglePath",
    "TorchBackend",
    "TorchCompileBackend",
    "get_backend",
    "register_backend",
    "segment_backend",
]
