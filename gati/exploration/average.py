"""A running average of weights, which removes the noise of single training steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RunningAverage:
    """Exponential moving average of the floating-point tensors in a module's state; counters are copied.

    The statistics of batch normalisation are averaged like the weights, since they belong to the weights of
    the same steps. The decay is smaller at first, so that the untrained weights are soon forgotten.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        """Add the module's state after step `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages: list[Tensor] = []
        present: list[Tensor] = []
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                averages.append(self.tensors[name])
                present.append(tensor)
            else:
                self.tensors[name].copy_(tensor)
        torch._foreach_lerp_(averages, present, 1 - decay)  # on a GPU, one launch for all

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        """Replace the module's state by the average."""
        for name, tensor in module.state_dict().items():
            tensor.copy_(self.tensors[name])
