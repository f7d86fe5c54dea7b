"""OpenVINO: each stretch of the network with its lookup as one compiled graph, tensors shared between them.

A request costs one `infer` a stretch, 0.03 to 0.05 ms of which are the call. Nothing is copied on the way: a
graph's outputs are the next one's inputs. One request at a time; rows of a batch follow each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gati.errors import BackendError
from gati.model.segments import Segment, TracedModel
from gati.runtime.backends.base import Backend, Lookup, Path, Requests, register_backend
from gati.runtime.backends.pieces import Piece, pieces_of

__all__ = ["OpenVinoBackend", "OpenVinoBrainFloatBackend"]


class _Compiled:
    """A graph with its request, whose tensors stay where they are; `inputs` are another graph's outputs."""

    def __init__(self, model: Any, precision: str, inputs: Sequence[Any] = ()) -> None:
        import openvino

        core = _core()
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        self.request = core.compile_model(model, "CPU", settings).create_infer_request()
        for index, port in enumerate(model.inputs):
            shared = inputs[index] if inputs else openvino.Tensor(port.get_element_type(), port.get_shape())
            self.request.set_input_tensor(index, shared)
        self.infer = self.request.infer
        self.inputs = [self.request.get_input_tensor(index).data for index in range(len(model.inputs))]
        self.output_tensors = [self.request.get_output_tensor(index) for index in range(len(model.outputs))]
        self.outputs = [tensor.data for tensor in self.output_tensors]


class _Requests(Requests):
    """Base model and early-exit network on the same input tensor."""

    def __init__(
        self, base: _Compiled, stretches: Sequence[_Compiled], thresholds: Sequence[float]
    ) -> None:
        self._base_infer, self._base_scores = base.infer, base.outputs[0]
        self._input = base.inputs[0]
        self._steps = [
            (stretch.infer, stretch.outputs[-1], stretch.outputs[-2], np.float32(threshold))
            for stretch, threshold in zip(stretches, thresholds, strict=False)
        ]
        self._last_infer, self._last_scores = stretches[-1].infer, stretches[-1].outputs[0]
        self._kept = (base, *stretches)  # requests live as long as their tensors are read

    def base(self, x: Tensor) -> Tensor:
        """Class scores [1, K] of the whole network."""
        self._input[...] = x.numpy()
        self._base_infer()
        return torch.from_numpy(self._base_scores.copy())

    def answer(self, x: Tensor) -> tuple[Tensor, int]:
        """Probabilities [1, K] and the exit's position, or class scores and the number of exits."""
        self._input[...] = x.numpy()
        position = 0
        for infer, score, probabilities, threshold in self._steps:
            infer()
            if score[0] >= threshold:  # False for NaN
                return torch.from_numpy(probabilities.copy()), position
            position += 1
        self._last_infer()
        return torch.from_numpy(self._last_scores.copy()), position


@register_backend("openvino")
class OpenVinoBackend(Backend):
    """OpenVINO on the CPU in float32.

    The compiler may fuse a stretch otherwise than the whole network, so a miss equals the base model's answer
    but for rounding, not always bit for bit as on the torch backend.
    """

    precision: ClassVar[str] = "f32"

    def __init__(self) -> None:
        if not self.installed():
            raise BackendError(f"backend '{self.name}' needs OpenVINO: pip install 'gati[openvino]'")

    @classmethod
    def installed(cls) -> bool:
        """Whether the package is there."""
        return find_spec("openvino") is not None

    def path(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """The network whole, and cut at `blocks`; segments must be run in their order."""
        base = self._base(traced)
        stretches = self._stretches(pieces_of(traced, [(block, None) for block in blocks]), [])

        def whole(x: Tensor) -> Tensor:
            base.inputs[0][...] = x.numpy()
            base.infer()
            return torch.from_numpy(base.outputs[0])

        segments = tuple(
            _segment(segment, stretch)
            for segment, stretch in zip(traced.cut(blocks), stretches, strict=True)
        )
        return Path(whole, segments)

    def lookup(self, cache: nn.Module, hidden: Tensor) -> Lookup:
        """The cache as a graph of its own."""
        module = _CacheOnly(cache)
        compiled = _Compiled(_converted(module, (torch.empty(hidden.shape).copy_(hidden),)), self.precision)

        def look_up(hidden: Tensor) -> tuple[Tensor, Tensor]:
            compiled.inputs[0][...] = hidden.numpy()
            compiled.infer()
            probabilities, score = compiled.outputs
            return torch.from_numpy(probabilities), torch.from_numpy(score)

        return look_up

    def requests(
        self, traced: TracedModel, exits: Sequence[tuple[str, nn.Module]], thresholds: Sequence[float]
    ) -> Requests:
        """Base model and stretches on one shared input."""
        base = self._base(traced)
        first = [base.request.get_input_tensor(0)]
        return _Requests(base, self._stretches(pieces_of(traced, exits), first), thresholds)

    def _base(self, traced: TracedModel) -> _Compiled:
        if traced.device.type != "cpu":
            raise BackendError(
                f"backend '{self.name}' runs on the cpu only; use --backend torch on {traced.device}"
            )
        (whole,) = pieces_of(traced, [])
        return _Compiled(_converted(*whole[:2]), self.precision)

    def _stretches(self, pieces: Sequence[Piece], inputs: list[Any]) -> list[_Compiled]:
        stretches = []
        for piece in pieces:
            stretch = _Compiled(_converted(piece.module, piece.example), self.precision, inputs)
            stretches.append(stretch)
            inputs = stretch.output_tensors[: piece.carries]
        return stretches


@register_backend("openvino-bf16")
class OpenVinoBrainFloatBackend(OpenVinoBackend):
    """As `openvino`, computing in bfloat16; it disagrees with the float32 network now and then."""

    precision: ClassVar[str] = "bf16"
    exact: ClassVar[bool] = False


class _CacheOnly(nn.Module):
    def __init__(self, cache: nn.Module) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, hidden: Tensor) -> Any:
        return self.cache(hidden)


def _segment(segment: Segment, stretch: _Compiled) -> Segment:
    arrays = stretch.inputs
    outputs = tuple(torch.from_numpy(array) for array in stretch.outputs)
    result: Any = outputs if segment.block is not None else outputs[0]

    def run(*carried: Tensor) -> Any:
        for array, tensor in zip(arrays, carried, strict=True):
            if tensor.data_ptr() != array.ctypes.data:  # else it is the previous stretch's own output
                array[...] = tensor.numpy()
        stretch.infer()
        return result

    return replace(segment, run=run)


def _converted(module: nn.Module, example: tuple[Tensor, ...]) -> Any:
    import openvino

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecations between torch and OpenVINO, nothing a user can mend
        with torch.no_grad():
            exported = torch.export.export(module.eval(), example, strict=False)
        try:
            model = openvino.convert_model(exported)
            # all sizes are known, and only then do tensors stay where they are
            model.reshape({index: list(tensor.shape) for index, tensor in enumerate(example)})
            return model
        except Exception as error:  # OpenVINO raises unrelated types for operators it does not know
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]
            message = f"OpenVINO cannot convert the network ({reason}); use --backend torch"
            raise BackendError(message) from error


_CORES: list[Any] = []


def _core() -> Any:
    """One runtime a process: it owns the thread pools."""
    if not _CORES:
        import openvino

        _CORES.append(openvino.Core())
    return _CORES[0]
