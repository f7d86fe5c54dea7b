"""The class scores that the base model returns: are they usable, and are they logits or probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gati.errors import DataError, ModelError
from gati.types import OutputsKind

_SUM_TOLERANCE = 1e-3


def class_scores(output: Any) -> Tensor:
    """The class scores in what a network returns: a tensor, alone, as `logits`, or in a tuple of one.

    **Raises:** `ModelError` if there is no such tensor.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)) and len(output) == 1:
        return class_scores(output[0])
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(found, Tensor):
        return found
    described = _described(output)
    if found is not None:
        described = f"{type(output).__name__} whose logits are a {_described(found)}"
    raise ModelError(
        f"the network returns {described}; a classifier must return one tensor [batch, classes], alone or as "
        "`logits`"
    )


def _described(output: Any) -> str:
    kind = type(output).__name__
    if isinstance(output, Mapping):
        return f"{kind} with {', '.join(map(str, output)) or 'nothing'}"
    if isinstance(output, (tuple, list)):
        return f"{kind} of {', '.join(type(each).__name__ for each in output) or 'nothing'}"
    return kind


def check_base_outputs(outputs: Tensor) -> Tensor:
    """Return `outputs` if it is finite and of shape [B, K] with K >= 2.

    **Raises:** `ModelError` otherwise.
    """
    check_not_one_score(outputs.shape)
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        raise ModelError(
            f"the network returns shape {list(outputs.shape)}; "
            "a classifier must return [batch, classes] with at least 2 classes"
        )
    if not outputs.is_floating_point():
        raise ModelError(
            f"the network returns dtype {outputs.dtype}; a classifier must return scores, not class numbers"
        )
    finite = torch.isfinite(outputs).all(dim=1)
    if not bool(finite.all()):
        count = int((~finite).sum())
        raise ModelError(
            f"the network returns NaN or infinity for {count} of {len(outputs)} inputs; "
            "check the checkpoint and the preprocessing (--mean, --std)"
        )
    return outputs


def check_not_one_score(shape: Sequence[int]) -> None:
    """Raise `ModelError` for outputs of one score per input, as of a network that tells two classes apart."""
    if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1):
        raise ModelError(
            f"the network returns shape {list(shape)}, one score per input; return one for each class: for a "
            "logit x [batch, 1] torch.cat([torch.zeros_like(x), x], 1), for a probability "
            "torch.cat([1 - x, x], 1)"
        )


def outputs_kind(outputs: Tensor) -> OutputsKind:
    """Tell whether rows [B, K] are probabilities (no value below 0, each row sums to 1) or logits."""
    if len(outputs) == 0 or bool((outputs < 0).any()):
        return "logits"
    sums = outputs.double().sum(dim=1)
    return "probabilities" if bool(((sums - 1).abs() <= _SUM_TOLERANCE).all()) else "logits"


def as_logits(outputs: Tensor, kind: OutputsKind) -> Tensor:
    """Convert rows [B, K] of that kind to logits; probabilities become their logarithms."""
    return outputs.clamp_min(1e-12).log() if kind == "probabilities" else outputs


def check_more_than_one_class(base_class: NDArray[Any] | Tensor, what: str = "data") -> None:
    """Raise `DataError` for no inputs, or if the base model predicts one class for all of them.

    Inputs of a single class do not show when an early exit is right.
    """
    classes = np.unique(np.asarray(base_class))
    if len(classes) == 0:
        raise DataError(f"{what} is empty; give at least a few hundred images")
    if len(classes) == 1:
        raise DataError(
            f"the network answers class {int(classes[0])} for all {len(base_class)} images of {what}; "
            "give images of several classes, or check the checkpoint and the preprocessing"
        )
