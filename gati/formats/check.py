"""Compare an exported file's answers with the engine's, before the file is moved into place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from gati.engine.exits import tie_tolerance
from gati.engine.graph.stages import GraphStages
from gati.errors import ModelError

Run = Callable[[Tensor], tuple[Tensor, int]]  # the file's input -> probabilities [K], exit

_TOLERANCE = 1e-3  # on probabilities; engines fuse and reorder operations


def onnx_runner(path: Path, name: str) -> Run:
    """Return a function that runs the file in ONNX Runtime on one core."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(x: Tensor) -> tuple[Tensor, int]:
        probabilities, exit, _ = session.run(None, {name: x.numpy()})
        return torch.from_numpy(probabilities)[0], int(exit[0])

    return run


def program_runner(file: IO[bytes]) -> Run:
    """Return a function that runs the file in PyTorch."""
    program = torch.export.load(file).module()

    def run(x: Tensor) -> tuple[Tensor, int]:
        probabilities, exit, _ = program(x)
        return probabilities[0], int(exit)

    return run


def check_answers(run: Run, stages: GraphStages, inputs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Compare a file with the stages it was built from; `inputs` are pairs (file input, network input).

    A score within rounding error of its threshold may take either branch.

    **Raises:** `ModelError` if the file takes a different exit or gives a different answer.
    """
    for number, (fed, x) in enumerate(inputs):
        trail = stages.trail(x)
        allowed = _allowed_exits(stages, [score for _, score in trail])
        probabilities, exit = run(fed)
        if exit not in allowed:
            raise _wrong(f"takes exit {exit} where the engine takes exit {allowed[-1]}", number)
        difference = float((probabilities - trail[exit][0]).abs().max())
        if not difference <= _TOLERANCE:
            raise _wrong(f"has probabilities that differ from the engine's by {difference:.2g}", number)


def _allowed_exits(stages: GraphStages, scores: list[Tensor | None]) -> list[int]:
    """Return the exits that an input may take: ties with a threshold, then the first clear hit or the end."""
    tolerance = tie_tolerance(torch.device("cpu"), torch.float32)
    allowed = []
    for index, (score, threshold) in enumerate(zip(scores, stages.thresholds, strict=False)):
        if score is None:
            raise AssertionError("only the last stage has no score")
        margin = float(score) - threshold
        close = abs(margin) <= tolerance * max(1.0, abs(threshold))
        if close or margin >= 0:
            allowed.append(index)
        if margin >= 0 and not close:
            return allowed
    return [*allowed, len(stages.thresholds)]


def _wrong(what: str, number: int) -> ModelError:
    return ModelError(
        f"the exported network {what} (random input {number}); nothing was written, please report it"
    )
