"""Compares the answers of a written file with the engine's, before the file gets its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from gati.engine.exits import tie_tolerance
from gati.engine.graph.stages import GraphStages
from gati.errors import ModelError

Run = Callable[[Tensor], tuple[Tensor, int]]  # what the file takes -> probabilities [K], exit

_TOLERANCE = 1e-3  # of a probability; engines fuse and reorder


def onnx_runner(path: Path, name: str) -> Run:
    """The file in ONNX Runtime on one core."""
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
    """The file in PyTorch."""
    program = torch.export.load(file).module()

    def run(x: Tensor) -> tuple[Tensor, int]:
        probabilities, exit, _ = program(x)
        return probabilities[0], int(exit)

    return run


def check_answers(run: Run, stages: GraphStages, inputs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Compare a file with the stages it was made of, on pairs of what the file and what the network takes.

    A score within rounding of its threshold may go either way.

    **Raises:** `ModelError` if the file leaves elsewhere or says something else.
    """
    for number, (fed, x) in enumerate(inputs):
        trail = stages.trail(x)
        allowed = _allowed_exits(stages, [score for _, score in trail])
        probabilities, exit = run(fed)
        if exit not in allowed:
            raise _wrong(f"leaves at exit {exit} where the engine leaves at {allowed[-1]}", number)
        difference = float((probabilities - trail[exit][0]).abs().max())
        if not difference <= _TOLERANCE:
            raise _wrong(f"has probabilities that differ from the engine's by {difference:.2g}", number)


def _allowed_exits(stages: GraphStages, scores: list[Tensor | None]) -> list[int]:
    """Where an input may leave; the last entry is where the engine lets it leave or later."""
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
