"""Adapting a network of several arrays to a single packed tensor, and checking what it accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gati.errors import DataError, ModelError, one_line
from gati.model.adapted import Forward, adapted
from gati.model.inputs import ALONE, TensorInputs
from gati.model.load import LoadedModel
from gati.model.masks import MASK, set_mask
from gati.model.text import IDS, KINDS, TextTokens


def fit_tensors(
    loaded: LoadedModel, inputs: TensorInputs, what: str, few: Tensor | None = None
) -> LoadedModel:
    """Adapt the network and its preprocessing to packed `inputs`.

    The preprocessing records the size of the embeddings that read them. `what` begins the messages, which say
    more if a `few` of the inputs are given.

    **Raises:** `ModelError` for names that are not arguments of the network, `DataError` for sequences that
    are too long and ids that are too large.
    """
    plain = inputs.without_ranges()
    module = packed(loaded.module, plain)
    tried = (inputs, plain) if inputs.has_codes else (plain, inputs)
    inputs = next((each for each in tried if _computes(module, each)), plain)
    probe = inputs.example(binary=True)
    seen: list[tuple[Tensor, int]] = []
    with _embeddings_watched(module, seen):
        _accepted(module, inputs, probe, loaded, what, few)
    parts = tuple(replace(part, rows=_rows(part.name, inputs.unpack(probe), seen)) for part in inputs.parts)
    for part in parts:
        if part.rows is not None and not (part.low >= 0 and part.high < part.rows):
            wrong = part.low if part.low < 0 else part.high
            raise DataError(
                f"{what}: {part.name} holds {wrong}; ids run from 0 to {part.rows - 1}, the rows of the "
                "network's embedding: is this the network's tokenizer?"
            )
    text = _fitted_text(loaded.preprocessing.text, inputs)
    preprocessing = replace(loaded.preprocessing, tensors=TensorInputs(parts), text=text)
    return replace(loaded, module=module, preprocessing=preprocessing, preprocessing_from="told")


def fit_text(loaded: LoadedModel) -> LoadedModel:
    """Fit the tokenizer to the network's arguments and maximum length.

    **Raises:** `ModelError` for a network that takes no ids; `DataError` for a length that the user gave and
    the network does not take.
    """
    text = loaded.preprocessing.text
    if text is None or text.arrays:
        return loaded
    text = replace(text, arrays=_text_arrays(loaded.module, loaded.source))
    shape = (1, text.length)
    probe = TensorInputs.of({name: np.ones(shape, np.int64) for name in text.arrays}, "text")
    module = packed(loaded.module, probe)
    example = probe.example(binary=True)
    if _tried(module, example) is None and (length := _longest(module, probe, example)):
        if text.asked:
            raise DataError(
                f"--max-length is {text.length}, but {loaded.source} takes at most {length} tokens; "
                f"give --max-length {length}, or leave it out"
            )
        text = replace(text, length=length)
    return replace(loaded, preprocessing=replace(loaded.preprocessing, text=text))


def _text_arrays(module: nn.Module, source: str) -> tuple[str, ...]:
    """The arguments of a forward: ids, the mask if it takes one, token types if it requires them."""
    names = _arguments(module)
    if names is None:
        return (IDS, MASK)
    if IDS not in names:
        if len(_needed(module)) > 1 or not names:
            raise ModelError(
                f"{source} takes {', '.join(names) or 'nothing'} and text gives {IDS}, {MASK}, {KINDS}: "
                "rename the arguments of its forward"
            )
        return (ALONE,)
    kinds = (KINDS,) if KINDS in _needed(module) else ()
    return (IDS, *((MASK,) if MASK in names else ()), *kinds)


def _needed(module: nn.Module) -> list[str]:
    """The arguments of a forward without a default."""
    parameters = inspect.signature(module.forward).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each.name for each in parameters if each.kind in named and each.default is each.empty]


def _fitted_text(text: TextTokens | None, inputs: TensorInputs) -> TextTokens | None:
    """The tokenizer at the length of `inputs`; None if these are not its output."""
    lengths = {part.shape for part in inputs.parts}
    if text is None or len(lengths) > 1 or {part.name for part in inputs.parts} != set(text.arrays):
        return None
    (shape,) = lengths
    return replace(text, length=shape[0]) if len(shape) == 1 else None


def packed(module: nn.Module, inputs: TensorInputs) -> nn.Module:
    """`module` as a network from one packed tensor [B, ...] to class scores, sharing its weights.

    Modules and weights keep their names. A network that already has this form is returned unchanged.

    **Raises:** `ModelError` if its forward has no arguments of those names.
    """
    (first, *_) = inputs.parts
    names = _arguments(module)
    if inputs.alone and first.dtype != "bool" and (names is None or first.name in (ALONE, *names[:1])):
        return module
    if not (inputs.alone and first.name == ALONE):
        _check_names(module, inputs, names)
    return _adapted(module, inputs)


def _adapted(module: nn.Module, inputs: TensorInputs) -> nn.Module:
    by_name = not (inputs.alone and inputs.parts[0].name == ALONE)

    def unpacking(module: nn.Module) -> Forward:
        def forward(x: Tensor) -> Any:
            tensors = inputs.unpack(x)
            return module(**tensors) if by_name else module(*tensors.values())

        return forward

    found = adapted(module, unpacking)
    mask = next((part for part in inputs.parts if part.name == MASK and len(part.shape) == 1), None)
    if mask is not None:
        set_mask(found, lambda x: inputs.split(x)[MASK] != 0)
    return found


def _arguments(module: nn.Module) -> list[str] | None:
    """The named arguments of its forward; None if it takes any."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in named]


def _check_names(module: nn.Module, inputs: TensorInputs, names: list[str] | None) -> None:
    unknown = [part.name for part in inputs.parts if names is not None and part.name not in names]
    if unknown:
        raise ModelError(
            f"{type(module).__name__} takes {', '.join(names or ()) or 'nothing by name'}, not "
            f"{', '.join(unknown)}; name the arrays of the data after the arguments of its forward"
        )


def _tried(module: nn.Module, example: Tensor) -> Any:
    """The network's output, or None if it raises: `_accepted` says why."""
    try:
        with torch.inference_mode():
            return module(example.clone())
    except Exception:  # user code may raise anything; `_accepted` explains it
        return None


def _computes(module: nn.Module, inputs: TensorInputs) -> bool:
    """Whether the network takes random inputs, and returns numbers for them."""
    found = _tried(module, inputs.example())
    return isinstance(found, Tensor) and bool(found.isfinite().all())


def _accepted(
    module: nn.Module,
    inputs: TensorInputs,
    probe: Tensor,
    loaded: LoadedModel,
    what: str,
    few: Tensor | None,
) -> None:
    source, text = loaded.source, loaded.preprocessing.text
    try:
        with torch.inference_mode():
            module(probe.clone())
        return
    except ModelError:  # about what it returns
        raise
    except Exception as error:
        refusal = one_line(error)
    length = _longest(module, inputs, probe)
    if length:
        raise DataError(
            f"{what}: inputs are {inputs.parts[0].shape[-1]} long, {source} takes at most {length}; cut them"
            f"{f', with --max-length {length}' if text else ''}"
        )
    if few is not None and _tried(module, few) is not None:
        raise ModelError(
            f"{source} takes the inputs of {what}, but not others of the same shapes ({refusal}), and Gati "
            "traces it on random ones: wrap it so that it requires no particular values, such as an end of "
            "text"
        )
    raise ModelError(
        f"{source} does not take {inputs.described()} ({refusal}); check names, lengths and types"
    )


def _longest(module: nn.Module, inputs: TensorInputs, probe: Tensor) -> int:
    """The maximum length, if sequences are too long; 0 if something else is wrong."""
    if len({part.shape for part in inputs.parts}) > 1 or len(inputs.parts[0].shape) != 1:
        return 0
    probe = torch.cat((probe[:1], probe[:1]))  # equal rows: it is not values that are wrong
    if _tried(module, probe) is not None:
        return 0
    fits, too_long = 0, inputs.parts[0].shape[0]
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        taken = _tried(module, probe[..., :middle]) is not None
        fits, too_long = (middle, too_long) if taken else (fits, middle)
    return fits


@contextmanager
def _embeddings_watched(module: nn.Module, seen: list[tuple[Tensor, int]]) -> Iterator[None]:
    """Record the input of every embedding, and its number of rows."""

    def noting(rows: int) -> Callable[[nn.Module, Any], None]:
        return lambda _module, arguments: seen.append((arguments[0].clone(), rows))

    with ExitStack() as handles:
        for layer in module.modules():
            if isinstance(layer, nn.Embedding):
                handles.enter_context(layer.register_forward_pre_hook(noting(layer.num_embeddings)))
        yield


def _rows(name: str, given: Mapping[str, Tensor], seen: list[tuple[Tensor, int]]) -> int | None:
    """The size of the smallest embedding that reads this array; None if it is unknown."""

    def same(ids: Tensor, values: Tensor) -> bool:
        return ids.shape == values.shape and bool((ids == values).all())

    values = given[name]
    if values.is_floating_point() or any(same(given[other], values) for other in given if other != name):
        return None
    return min((rows for ids, rows in seen if same(ids, values)), default=None)
