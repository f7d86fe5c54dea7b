"""A running average of weights: the result of many small steps, without the noise of each."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RunningAverage:
    """Exponential average of everything in a module's state that is a fraction; counters are copied.

    The statistics of batch normalisation are averaged as the weights are: they belong to the weights of the
    same steps. Early on the average follows faster, so that nothing of the untrained weights stays in it.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        """Take in the module's state after that step, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                self.tensors[name].lerp_(tensor, 1 - decay)
            else:
                self.tensors[name].copy_(tensor)

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        """Give the module the average for its state."""
        for name, tensor in module.state_dict().items():
            tensor.copy_(self.tensors[name])

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from `tensors` of an earlier average of the same module."""
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])
