"""CUDA graphs for training: a step of small networks takes longer to launch than to compute.

On other devices nothing here has an effect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gati.errors import first_line
from gati.exploration.precision import training_precision

_log = logging.getLogger(__name__)

EAGER_CALLS = 3  # before a capture: libraries choose kernels and allocate on first use


class ReplayedFunction:
    """A function of one tensor, without gradients, that is captured after a few calls.

    Its results are overwritten by the next call. Inputs of another shape, and those on other devices, run
    operator by operator.
    """

    def __init__(self, run: Callable[[Tensor], Any]) -> None:
        self._run = run
        self._calls = 0
        self._input: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Any:
        """The function's result."""
        if x.device.type != "cuda":
            return self._run(x)
        if self._calls == EAGER_CALLS:
            self._capture(x)
        self._calls += 1
        if self._graph is None or self._input is None or self._input.shape != x.shape:
            return self._run(x)
        self._input.copy_(x)
        self._graph.replay()
        return self._result

    def _capture(self, x: Tensor) -> None:
        own, graph = x.clone(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._result = self._run(own)
        except RuntimeError as error:  # the network makes the host wait, for example
            _log.info("a function is not captured as a CUDA graph: %s", first_line(error))
            return
        self._input, self._graph = own, graph


def capture_training(forward: nn.Module, example: Tensor) -> None:
    """Replace forward and backward pass of a module in training by CUDA graphs, for inputs like `example`.

    The module stays as it is if it is not on CUDA, or cannot be captured. Gradients of graphs are in memory
    that each backward pass overwrites, so on CUDA they must be set to None before it, not to zero.
    """
    if example.device.type != "cuda":
        return
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # as intended here
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    try:
        with training_precision(example.device):
            torch.cuda.make_graphed_callables(forward, (example.detach().clone(),), allow_unused_input=True)
    except RuntimeError as error:
        _log.info("training is not captured as a CUDA graph: %s", first_line(error))
