"""A learned cache as one module: maps a hidden output to class probabilities and a score."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gati.caches.companions import Companion
from gati.caches.predictors import build_predictor, fold_normalisation
from gati.caches.selectors import build_selector, unsorted

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped


class LearnedCache(nn.Module):
    """A predictor and selector for a block or the input; a forward pass is a lookup.

    **Arguments:** `variant`, `hidden_shape` (without batch) and `classes` define the architecture; `selector`
    is one of `selector_names()`. A new cache has random weights; `load_cache` loads trained ones.
    """

    def __init__(
        self,
        variant: str,
        hidden_shape: tuple[int, ...],
        classes: int,
        selector: str,
        *,
        predictor: nn.Module | None = None,
        selector_module: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.variant = variant
        self.hidden_shape = hidden_shape
        self.classes = classes
        self.selector_name = selector
        self.predictor = (
            fold_normalisation(build_predictor(variant, hidden_shape, classes))
            if predictor is None
            else predictor
        )
        self.selector = build_selector(selector, classes) if selector_module is None else selector_module
        # Convolutions on one small input are up to a third faster with channels-last weights.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.eval().requires_grad_(False)

    @property
    def structure(self) -> tuple[object, ...]:
        """A key that is equal for caches that differ only in their weights."""
        weights = ((name, tuple(tensor.shape)) for name, tensor in self.state_dict().items())
        kinds = (type(module).__name__ for module in self.modules())
        own = self.predictor.structure if isinstance(self.predictor, Companion) else None
        return self.variant, self.hidden_shape, self.classes, self.selector_name, own, *kinds, *weights

    @property
    def memory_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state_dict().values())

    def fusible(self) -> nn.Module:
        """Return the same cache, sharing weights, in a form that compilers fuse into fewer kernels."""
        other = copy.copy(self)
        other._modules = {**self._modules, "selector": unsorted(self.selector)}
        return other

    def forward(self, hidden: Shaped[Tensor, "b ..."]) -> tuple[Float[Tensor, "b k"], Float[Tensor, " b"]]:
        """Map hidden outputs [B, *hidden_shape] to class probabilities [B, K] and scores [B]."""
        probabilities = self.predictor(hidden).softmax(1)
        return probabilities, self.selector(probabilities)
