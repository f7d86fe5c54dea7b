"""Operators of a traced network: their arguments, what they mutate, and faster equivalents."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from gati.model.program import FlatFunction

_BUILTINS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_LAST_INDEX = 2**63 - 1


def equal_values(first: Any, second: Any) -> bool:
    """Whether two operator results (tensors, numbers, nested sequences) are equal bit for bit."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        same_form = first.dtype == second.dtype and first.stride() == second.stride()
        return same_form and _equal_tensors(first, second)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(equal_values, first, second))
    return type(first) is type(second) and bool(first == second)


def _equal_tensors(first: Tensor, second: Tensor) -> bool:
    if torch.equal(first, second):
        return True
    # NaN != NaN, but NaN at the same position is an equal result.
    return (
        first.shape == second.shape
        and first.is_floating_point()
        and torch.equal(first.nan_to_num(nan=0.0), second.nan_to_num(nan=0.0))
        and torch.equal(first.isnan(), second.isnan())
    )


def candidates(name: str, target: OpOverload) -> Iterator[FlatFunction]:
    """Callables that may be equivalent to `target`, fastest first: generated bindings, then the operator."""
    for owner in (torch._C._VariableFunctions, torch._C._nn, torch.Tensor):
        function = getattr(owner, name, None)
        if isinstance(function, _BUILTINS):
            yield function
    yield target._op


def slice_index(dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    """The index that is equivalent to `aten.slice(tensor, dim, start, end, step)`."""
    stop = None if end is None or end == _LAST_INDEX else end
    index = slice(start, stop, step)
    if dim < 0:
        return (Ellipsis, index, *[slice(None)] * (-dim - 1))
    return (*[slice(None)] * dim, index)


def copies(arguments: Any) -> Any:
    """Nested arguments with every tensor copied, strides included, to try in-place operators on."""
    return torch.utils._pytree.tree_map_only(Tensor, _copy, arguments)


def _copy(tensor: Tensor) -> Tensor:
    # `clone` keeps the strides of dense tensors only, and operators choose their algorithm by strides.
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor) if 0 not in tensor.stride() else tensor.clone()


def mutated_storages(node: fx.Node, args: Any, kwargs: Any) -> frozenset[int]:
    """The storages that an operator writes to, by its schema."""
    if not isinstance(node.target, OpOverload):
        return frozenset()
    written: list[Any] = []
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.is_write:
            written.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return frozenset(storages(written))


def storages(value: Any) -> Iterator[int]:
    """The storages of all tensors in a nested value."""
    if isinstance(value, Tensor):
        yield storage(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from storages(item)


def storage(tensor: Tensor) -> int:
    """The id of a tensor's storage, unique while the storage is alive."""
    return int(tensor.untyped_storage()._cdata)
