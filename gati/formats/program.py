"""The early-exit network as a `torch.export` program, with `torch.cond` in place of ONNX's `If`."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from gati.engine.graph.stages import GraphStage, GraphStages
from gati.errors import ModelError, one_line

Answer = tuple[Tensor, Tensor, Tensor]


class EarlyExit(nn.Module):
    """Maps one input to probabilities [1, K], exit int64 [1] and score [1], as the ONNX file does."""

    def __init__(self, stages: GraphStages) -> None:
        super().__init__()
        self.segments = nn.ModuleList([_exported(each) for each in stages.segments])
        self.lookups = nn.ModuleList([_exported(each) for each in stages.lookups if each is not None])
        self.thresholds = stages.thresholds

    def forward(self, x: Tensor) -> Answer:
        """Run segments and lookups until one hits."""
        return self._from(0, x.new_full((1,), math.nan, dtype=torch.float32), x)

    def _from(self, index: int, score: Tensor, *carried: Tensor) -> Answer:
        if index == len(self.thresholds):
            return self.segments[index](*carried), torch.full((1,), index), score.clone()
        handed_on = self.segments[index](*carried)
        probabilities, score = self.lookups[index](handed_on[0])

        def leave(probabilities: Tensor, score: Tensor, *_: Tensor) -> Answer:
            return probabilities.clone(), torch.full((1,), index), score.clone()

        def go_on(_: Tensor, score: Tensor, *carried: Tensor) -> Answer:
            return self._from(index + 1, score, *carried)

        hit = (score >= self.thresholds[index]).squeeze(0)  # False for NaN
        answer: Answer = torch.cond(hit, leave, go_on, (probabilities, score, *handed_on))
        return answer


def _exported(stage: GraphStage) -> nn.Module:
    module: nn.Module = torch.export.export(stage.module, stage.example, strict=False).module()
    return module


def to_program(stages: GraphStages) -> torch.export.ExportedProgram:
    """Trace the early-exit network for one input at a time.

    **Raises:** `ModelError` if `torch.export` fails.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(EarlyExit(stages), stages.segments[0].example, strict=False)
    except Exception as error:  # torch.export raises many unrelated types
        raise ModelError(
            f"cannot export the network with torch {torch.__version__}: {one_line(error)}; try --format onnx"
        ) from error
    _drop_traces(program.graph_module)
    return program


def save_program(program: torch.export.ExportedProgram, path: Path, notes: dict[str, str]) -> None:
    """Write a program; `notes` maps extra file names to texts, which `torch.export.load` can read back."""
    with open(path, "wb") as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about shared weights, which are intended
        torch.export.save(program, handle, extra_files=dict(notes))


def _drop_traces(module: nn.Module) -> None:
    """Drop each operator's stack trace and source metadata, which would take up most of the file."""
    for graph_module in module.modules():
        if isinstance(graph_module, fx.GraphModule):
            for node in graph_module.graph.nodes:
                for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node"):
                    node.meta.pop(key, None)
