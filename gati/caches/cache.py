"""A learned cache as one module: hidden output in, class probabilities and score out."""

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
    """A trained predictor and selector at a block, or at the input; running it is a lookup.

    **Arguments:** `variant`, `hidden_shape` (without batch) and `classes` name the architecture, `selector`
    one of `selector_names()`. A fresh cache has random weights; `load_cache` brings trained ones.
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
        # Convolutions of one small input are up to a third faster on weights stored channels last.
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
        """The same cache, weights shared, for compilers that fuse operators: with fewer kernels to launch."""
        other = copy.copy(self)
        other._modules = {**self._modules, "selector": unsorted(self.selector)}
        return other

    def forward(self, hidden: Shaped[Tensor, "b ..."]) -> tuple[Float[Tensor, "b k"], Float[Tensor, " b"]]:
        """Look up [B, *hidden_shape]: probabilities of the K classes, and scores."""
        probabilities = self.predictor(hidden).softmax(1)
        return probabilities, self.selector(probabilities)
