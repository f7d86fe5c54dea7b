"""Backends by name; importing this registers those that come with Gati."""

from gati.runtime.backends.base import (
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
from gati.runtime.backends.cuda_graph import CudaGraphBackend
from gati.runtime.backends.int8_lookups import (
    OnnxRuntimeInt8LookupsBackend,
    OpenVinoInt8LookupsBackend,
)
from gati.runtime.backends.onnxruntime import OnnxRuntimeBackend
from gati.runtime.backends.openvino import OpenVinoBackend, OpenVinoBf16Backend, OpenVinoInt8Backend
from gati.runtime.backends.torch import TorchBackend
from gati.runtime.backends.torch_compile import TorchCompileBackend

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
