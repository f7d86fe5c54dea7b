"""Answers of the base model to training inputs, on the fastest engine available."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gati.engine.backends.openvino import fusing_settings
from gati.engine.graph.quantise import in_8_bit_integers
from gati.errors import BackendError, one_line
from gati.exploration.graphs import ReplayedFunction
from gati.exploration.precision import bfloat16_pays, training_precision
from gati.model.hooks import first_tensor
from gati.model.outputs import as_logits
from gati.types import OutputsKind

Engine = Callable[[Tensor], Tensor]

ENGINES = ("openvino-bf16", "openvino", "torch")  # in the order of preference
IN_8_BITS = "openvino-int8"  # which is not among those that are tried: quantising takes seconds
CLEARLY = 1.3  # times faster; a smaller gain may be noise
_TIMED = 3
_CALIBRATED_AT_ONCE = 8  # inputs
_SAME_CLASS_SHARE = 0.9  # of a batch: reduced precision changes the class of a few inputs, not of many


class BaseAnswers(nn.Module):
    """The base model as a function from inputs [B, ...] to rows [B, K + D]: logits and pooled hidden outputs.

    The logits of each row are shifted so that the largest is 0; half precision is then enough to store them.

    `feature_block` names the block whose hidden output is pooled to D numbers: each channel is averaged over
    its map or tokens. Without it D is 0. The base model is not changed; a temporary hook reads the block.
    """

    def __init__(
        self, module: nn.Module, outputs_kind: OutputsKind, feature_block: str | None = None
    ) -> None:
        super().__init__()
        self.module, self.outputs_kind, self.feature_block = module, outputs_kind, feature_block
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Answer a batch."""
        if self.feature_block is None:
            return self._logits(images)
        seen: list[Tensor] = []
        name = self.feature_block

        def watch(_module: nn.Module, _arguments: Any, output: Any) -> None:
            seen.append(_pooled(first_tensor(output, name)))

        with self.module.get_submodule(name).register_forward_hook(watch):
            logits = self._logits(images)
        return torch.cat((logits, seen[-1].float()), 1)

    def _logits(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.module(images.clone()).float()  # it may change its input in place
        logits = as_logits(outputs, self.outputs_kind)
        return logits - logits.amax(1, keepdim=True)


def _pooled(hidden: Tensor) -> Tensor:
    if hidden.dim() == 4:
        return hidden.mean((2, 3))
    return hidden.mean(1) if hidden.dim() == 3 else hidden.flatten(1)


def open_engine(name: str, base: BaseAnswers, example: Tensor) -> Engine:
    """Return `base` compiled for batches of the shape of `example` by one of `ENGINES` or `IN_8_BITS`.

    The latter is calibrated on `example`.

    **Raises:** `BackendError` for an engine that is not installed or cannot run the network, and for 8-bit
    integers that give many inputs another class.
    """
    if name == "torch":
        return _torch_engine(base, example.device)
    if name not in (known := (*ENGINES, IN_8_BITS)):
        raise BackendError(f"unknown engine {name!r} for base answers: choose one of {', '.join(known)}")
    if find_spec("openvino") is None:
        raise BackendError(
            f"engine {name!r} needs openvino, not installed here: pip install 'gati[openvino]'"
        )
    if name == "openvino-bf16" and not bfloat16_pays():
        raise BackendError(f"engine {name!r} needs a processor that computes in bfloat16")
    if name == IN_8_BITS and find_spec("nncf") is None:
        raise BackendError(f"engine {name!r} needs nncf, not installed here: pip install 'gati[int8]'")
    return _openvino_engine(base, example, name)


def _torch_engine(base: BaseAnswers, device: torch.device) -> Engine:
    @torch.no_grad()
    def answer(images: Tensor) -> Tensor:
        with training_precision(device):
            rows: Tensor = base(images)
        return rows.float()

    return ReplayedFunction(answer) if device.type == "cuda" else answer


def _openvino_engine(base: BaseAnswers, example: Tensor, name: str) -> Engine:
    import openvino

    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # tracing warns about every Python number
            model = openvino.convert_model(base, example_input=example[:2])
        if name == IN_8_BITS:
            model = _in_8_bits(model, example)
        model.reshape(list(example.shape))
        engine = _compiled(model, "bf16" if name == "openvino-bf16" else "f32")
        fits = name != IN_8_BITS or _gives_same_classes(engine, _Expected.of(base, example))
    except Exception as error:  # converter and quantiser raise many unrelated types
        raise BackendError(f"engine {name!r} cannot run the network: {one_line(error)}") from error
    if not fits:
        raise BackendError(f"engine {name!r} gives many inputs another class than the network")
    return engine


def _in_8_bits(model: Any, example: Tensor) -> Any:
    """Calibrated on a few inputs at a time, because what all layers return is kept until a batch ends."""
    few = min(_CALIBRATED_AT_ONCE, len(example))
    whole = len(example) - len(example) % few
    model.reshape([few, *example.shape[1:]])
    return in_8_bit_integers(model, [np.ascontiguousarray(x.numpy()) for x in example[:whole].split(few)])


def _compiled(model: Any, precision: str) -> Engine:
    import openvino

    settings = {
        "PERFORMANCE_HINT": "THROUGHPUT",
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "ENABLE_CPU_PINNING": False,
        **fusing_settings(model),
    }
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()

    def answer(images: Tensor) -> Tensor:
        request.infer([np.ascontiguousarray(images.numpy())])
        return torch.from_numpy(request.get_output_tensor(0).data.astype(np.float32))

    return answer


def calls_to_choose(device: torch.device) -> int:
    """The most batches that `fastest_engine` answers."""
    return 1 + len(ENGINES) * (1 + _TIMED) if device.type == "cpu" else 0


def fastest_engine(
    base: BaseAnswers, example: Tensor, clock: Callable[[], float] = time.perf_counter
) -> tuple[str, Engine]:
    """Return the first of `ENGINES` that no other is clearly faster than, on batches like `example` [B, ...].

    Engines that cannot run the network, or give many inputs another class than torch, are left out. On
    devices other than the CPU the result is torch.
    """
    plain = open_engine("torch", base, example)
    if example.device.type != "cpu":
        return "torch", plain
    expected = _Expected.of(base, example)
    usable: dict[str, tuple[float, Engine]] = {}
    for name in ENGINES:
        try:
            engine = plain if name == "torch" else open_engine(name, base, example)
        except BackendError:
            continue
        if _gives_same_classes(engine, expected):
            usable[name] = min(_timed(engine, example, clock) for _ in range(_TIMED)), engine
    if not usable:  # even torch changes many classes in bfloat16, and no other engine works
        return "torch", plain
    fastest = min(seconds for seconds, _ in usable.values())
    chosen = next(name for name in ENGINES if name in usable and usable[name][0] <= CLEARLY * fastest)
    return chosen, usable[chosen][1]


class _Expected(NamedTuple):
    """Inputs, and what the base model answers in float32: classes among the first columns of a row."""

    inputs: Tensor
    class_indices: Tensor
    classes: int

    @classmethod
    def of(cls, base: BaseAnswers, inputs: Tensor) -> _Expected:
        with torch.no_grad():
            rows = base(inputs)
            classes = rows.shape[1] if base.feature_block is None else base.module(inputs[:1]).shape[1]
        return cls(inputs, rows[:, :classes].argmax(1), classes)


def _gives_same_classes(engine: Engine, expected: _Expected) -> bool:
    found = engine(expected.inputs)[:, : expected.classes].argmax(1)
    return float((found == expected.class_indices).float().mean()) >= _SAME_CLASS_SHARE


def _timed(engine: Engine, example: Tensor, clock: Callable[[], float]) -> float:
    began = clock()
    engine(example)
    return clock() - began
