"""Muon: steepest descent in the spectral norm for convolutions, momentum for everything else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gati.exploration.precision import bfloat16_pays

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic whose iteration drives singular values towards 1
_ITERATIONS = 4
_TINY = 1e-7


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised for the kernels of convolutions.

    After Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024). A kernel
    [out, in, height, width] is treated as a matrix [out, in x height x width]. It keeps the norm sqrt(out),
    because the normalisation that follows ignores its scale; `lr` is therefore the relative change of a
    kernel per step. Parameters of other shapes use Nesterov momentum with `weight_decay`, at `lr_ratio` times
    that rate.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        *,
        momentum: float = 0.9,
        lr_ratio: float = 2.0,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "lr_ratio": lr_ratio, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from the present gradients; closures are not supported."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    learn = self._update_kernel if parameter.dim() == 4 else self._update_other
                    learn(parameter, parameter.grad, self._momentum_of(parameter), group)

    def _momentum_of(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        found: Tensor = state["momentum_buffer"]
        return found

    @staticmethod
    def _update_kernel(kernel: Tensor, gradient: Tensor, average: Tensor, group: dict[str, Any]) -> None:
        average.lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(average, group["momentum"])
        out = kernel.shape[0]
        kernel.mul_(out**0.5 / kernel.norm().clamp_min(_TINY))
        direction = orthogonalised(ahead.reshape(out, -1)).reshape(kernel.shape)
        kernel.sub_(direction, alpha=group["lr"])

    @staticmethod
    def _update_other(parameter: Tensor, gradient: Tensor, average: Tensor, group: dict[str, Any]) -> None:
        gradient = gradient.add(parameter, alpha=group["weight_decay"])
        average.mul_(group["momentum"]).add_(gradient)
        ahead = gradient.add(average, alpha=group["momentum"])
        parameter.sub_(ahead, alpha=group["lr_ratio"] * group["lr"])


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
