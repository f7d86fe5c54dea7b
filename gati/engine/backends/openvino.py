"""OpenVINO: the early-exit network as one compiled graph, with `If` nodes for decisions."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gati.engine.backends.base import Graph, GraphBackend, imported, register_backend
from gati.engine.exits import EngineExit
from gati.engine.threads import takes_every_core
from gati.errors import BackendError
from gati.model.segments import TracedModel
from gati.types import OutputsKind

if TYPE_CHECKING:
    from gati.engine.graph.convert import Converter
    from gati.engine.graph.quantise import Quantised


_FEW = 8  # vectors

# Operators in which two values meet element by element.
_MEET = frozenset({"Add", "Subtract", "Multiply", "Divide", "Maximum", "Minimum"})


class _Slot(NamedTuple):
    """Buffers for one request at a time: the input array, and the infer request with the outputs."""

    input: npt.NDArray[Any]
    request: Any


class _OpenVinoGraph(Graph):
    """A compiled graph with a pool of slots, which grows to the largest number of concurrent requests."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._idle = [self._slot()]

    def answer(self, x: Tensor) -> tuple[Tensor, int]:
        """As `Graph.answer`. What `infer` returns are copies, so the slot's tensors may be used again."""
        try:
            slot = self._idle.pop()  # atomic, like `append`: two threads never get the same slot
        except IndexError:
            slot = self._slot()
        array, request = slot
        np.copyto(array, x.numpy())
        probabilities, exit, _ = request.infer().to_tuple()
        self._idle.append(slot)  # not after a failure, which leaves its state unknown
        return torch.from_numpy(probabilities), int(exit[0])

    def _slot(self) -> _Slot:
        import openvino

        request = self._compiled.create_infer_request()
        port = self._compiled.input(0)
        array = np.zeros(tuple(port.shape), dtype=port.element_type.to_dtype())
        request.set_input_tensor(0, openvino.Tensor(array, shared_memory=True))
        return _Slot(array, request)


@register_backend("openvino")
class OpenVinoBackend(GraphBackend):
    """OpenVINO on the CPU in float32."""

    needed: ClassVar[tuple[str, ...]] = ("openvino", "onnx", "onnxscript")
    extra: ClassVar[str] = "openvino"

    def compile(self, model: bytes, threads: int | None = None) -> Graph:
        """As `GraphBackend.compile`."""
        return self._compiled(core().read_model(model=model), threads)

    def _compiled(self, model: Any, threads: int | None) -> Graph:
        count = threads or torch.get_num_threads()
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "bf16" if self.precision == "bf16" else "f32",
            "INFERENCE_NUM_THREADS": count,
            # It takes the first cores: several networks on a part of the machine would all share these.
            "ENABLE_CPU_PINNING": takes_every_core(count),
        }
        settings |= fusing_settings(model)
        return _OpenVinoGraph(core().compile_model(model, "CPU", settings))


@register_backend("openvino-bf16")
class OpenVinoBf16Backend(OpenVinoBackend):
    """OpenVINO on the CPU with weights and hidden outputs in bfloat16."""

    precision: ClassVar[Literal["f32", "bf16", "int8"]] = "bf16"

    def __init__(self) -> None:
        super().__init__()
        if not _computes_in("BF16"):
            raise BackendError(f"backend '{self.name}' needs a processor that computes in bfloat16")

    @classmethod
    def installed(cls) -> bool:
        """Whether the packages are installed and the processor computes in bfloat16."""
        with suppress(BackendError):  # a broken installation, of which running a network tells
            return super().installed() and _computes_in("BF16")
        return False


@register_backend("openvino-int8")
class OpenVinoInt8Backend(OpenVinoBackend):
    """OpenVINO on the CPU in 8-bit integers, quantised after training by NNCF on `calibration` [n, ...].

    Without calibration inputs it runs only stored graphs.
    """

    precision: ClassVar[Literal["f32", "bf16", "int8"]] = "int8"
    stored_as: ClassVar[str] = "openvino-int8"
    calibrated: ClassVar[bool] = True
    needed: ClassVar[tuple[str, ...]] = (*OpenVinoBackend.needed, "nncf")
    extra: ClassVar[str] = "int8"

    def __init__(self, calibration: Tensor | None = None) -> None:
        super().__init__()
        self._calibration = calibration
        self._quantised: dict[bytes, Quantised] = {}

    def assembled(
        self,
        traced: TracedModel,
        settings: Sequence[Sequence[EngineExit]],
        outputs_kind: OutputsKind,
        *,
        convert: Converter | None = None,
        cuts: Collection[str] = (),
    ) -> Iterator[bytes]:
        """As `GraphBackend.assembled`; each network is quantised once, on inputs that take no exit."""
        from gati.engine.graph.quantise import quantised, without_exits

        if self._calibration is None:
            raise BackendError(
                f"backend '{self.name}' has no stored quantised network (graphs/ in the library); "
                "run gati compose again"
            )
        never = [without_exits(settings[0])]
        (model,) = super().assembled(traced, never, outputs_kind, convert=convert, cuts=cuts)
        made_from = hashlib.sha256(model).digest()
        if made_from not in self._quantised:  # it takes a minute
            self._quantised[made_from] = quantised(model, self._calibration)
        whole = self._quantised[made_from]
        for exits in settings:
            yield whole.with_thresholds([leaving.threshold for leaving in exits])

    def compile(self, model: bytes, threads: int | None = None) -> Graph:
        """As `GraphBackend.compile`, for a result of `assembled`."""
        from gati.engine.graph.quantise import read_quantised

        return self._compiled(read_quantised(model), threads)


def fusing_settings(model: Any) -> dict[str, str]:
    """Settings for compiling `model` that turn fusing off where it crashes the process (2026.4).

    So it does for the linear layers of several residual blocks, with up to eight vectors at a time.
    """
    return {"SNIPPETS_MODE": "DISABLE"} if _skips(model) > 1 else {}


def _skips(model: Any) -> int:
    """How often few vectors that passed different numbers of linear layers meet, as in residual blocks."""
    found, layers = 0, dict[str, int]()  # by operator; those of weights have none
    for operator in model.get_ordered_ops():
        kind, name = operator.get_type_name(), operator.get_name()
        if kind == "If":
            found += _skips(operator.get_then_body()) + _skips(operator.get_else_body())
        sources = [value.get_node().get_name() for value in operator.input_values()]
        passed = [layers[source] for source in sources if source in layers]
        if not passed and kind != "Parameter":
            continue
        shape = operator.get_output_partial_shape(0)
        few = shape.rank.is_static and len(shape) == 2 and shape[0].get_min_length() <= _FEW
        layers[name] = max(passed, default=0) + (few and kind == "MatMul")
        found += few and kind in _MEET and len(set(passed)) > 1
    return found


def _computes_in(kind: str) -> bool:
    """Whether the processor computes in `kind`. Raises BackendError as `core`."""
    return kind in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


_CORES: list[Any] = []


def core() -> Any:
    """The process's OpenVINO runtime, which owns the thread pools. Raises BackendError as `imported`."""
    if not _CORES:
        _CORES.append(imported("openvino").Core())
    return _CORES[0]
