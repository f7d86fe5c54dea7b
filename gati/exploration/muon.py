"""Muon: steepest descent in the spectral norm for convolutions, momentum for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gati.exploration.graphs import EAGER_CALLS
from gati.exploration.precision import bfloat16_pays

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic whose iteration drives singular values towards 1
_ITERATIONS = 4
_TINY = 1e-7
_MOMENTUM = 0.9
_OTHER_RATE = 2.0  # learning rate of what is no kernel, relative to that of kernels


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised for the kernels of convolutions.

    After Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024). A kernel
    [out, in, height, width] is treated as a matrix [out, in x height x width]. It keeps the norm sqrt(out),
    because the normalisation that follows ignores its scale; `lr` is therefore the relative change of a
    kernel per step. Parameters of other shapes use Nesterov momentum with `weight_decay`, at twice that rate.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        *,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self._rates: list[Tensor] = []  # of the groups, where a CUDA graph reads them
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: tuple[int, ...] = ()  # addresses in the last step
        self._steps_alike = 0  # with the same addresses

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from the present gradients; closures are not supported.

        On CUDA, where gradients stay at the same addresses, a step becomes a CUDA graph: it consists of some
        hundred small operators.
        """
        parameters = [each for group in self.param_groups for each in group["params"]]
        if not parameters or parameters[0].device.type != "cuda":
            self._update([group["lr"] for group in self.param_groups])
            return
        self._rates = self._rates or [torch.zeros((), device=parameters[0].device) for _ in self.param_groups]
        for rate, group in zip(self._rates, self.param_groups, strict=True):
            rate.fill_(group["lr"])
        gradients = tuple(0 if each.grad is None else each.grad.data_ptr() for each in parameters)
        if gradients != self._gradients:
            self._graph, self._gradients, self._steps_alike = None, gradients, 0
        if self._graph is not None:
            self._graph.replay()
            return
        self._update(self._rates)
        self._steps_alike += 1
        if self._steps_alike == EAGER_CALLS:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._update(self._rates)

    def _update(self, rates: Sequence[float | Tensor]) -> None:
        for group, rate in zip(self.param_groups, rates, strict=True):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, average = parameter.grad, self._momentum_of(parameter)
                if parameter.dim() == 4:
                    self._update_kernel(parameter, gradient, average, rate)
                else:
                    self._update_other(parameter, gradient, average, rate, group["weight_decay"])

    def _momentum_of(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        found: Tensor = state["momentum_buffer"]
        return found

    @staticmethod
    def _update_kernel(kernel: Tensor, gradient: Tensor, average: Tensor, rate: float | Tensor) -> None:
        average.lerp_(gradient, 1 - _MOMENTUM)
        ahead = gradient.lerp(average, _MOMENTUM)
        out = kernel.shape[0]
        kernel.mul_(out**0.5 / kernel.norm().clamp_min(_TINY))
        direction = orthogonalised(ahead.reshape(out, -1)).reshape(kernel.shape)
        kernel.sub_(direction * rate)

    @staticmethod
    def _update_other(
        parameter: Tensor, gradient: Tensor, average: Tensor, rate: float | Tensor, weight_decay: float
    ) -> None:
        gradient = gradient.add(parameter, alpha=weight_decay)
        average.mul_(_MOMENTUM).add_(gradient)
        ahead = gradient.add(average, alpha=_MOMENTUM)
        parameter.sub_(ahead * (_OTHER_RATE * rate))


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return the matrix [R, C] with its singular values brought close to 1, by Newton-Schulz iterations.

    Uses bfloat16 if the hardware gains from it, since close is enough. A matrix of zeros stays zero.
    """
    first, second, third = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    fast = matrix.device.type == "cuda" or bfloat16_pays()
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp_min(_TINY)
    x = x.bfloat16() if fast else x
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = first * x + (second * gram + third * gram @ gram) @ x
    found: Tensor = x.T if tall else x
    return found.to(matrix.dtype)
