"""Running the user's network, which may raise anything, and objects of the user's that are loaded into."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gati.errors import GatiError, ModelError, one_line

# Networks that users' modules hold as objects, with the hash of the checkpoint in them; "" without one.
_HELD: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@contextmanager
def running_user_code(message: Callable[[Exception], str]) -> Iterator[None]:
    """Inside the context, an error becomes a `ModelError` with the `message` about it.

    Gati's own errors pass unchanged, and so does a lack of memory: both say more than a message here could.
    """
    try:
        yield
    except (GatiError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(message(error)) from error


def unshared(module: nn.Module, sha256: str, source: str) -> nn.Module:
    """The user's own object, or a copy if it is in use with another checkpoint than that with this hash.

    Only then: what else a copy holds, such as values that its forward keeps, is that of the original.

    **Raises:** `ModelError` if it cannot be copied, or without a checkpoint if its own weights are lost.
    """
    held = _HELD.get(module, sha256)
    if held == sha256:
        return module
    if not sha256:
        raise ModelError(
            f"{source} holds the weights of a checkpoint that was loaded earlier in this program; give the "
            "checkpoint, or name a callable that returns a new network"
        )
    with running_user_code(
        lambda error: (
            f"{source} cannot be copied, to load another checkpoint ({one_line(error)}); name a callable "
            "that returns a new network"
        )
    ):
        return copied(module)


def copied(module: nn.Module) -> nn.Module:
    """A deep copy, also if layers keep tensors with a history, as those of `weight_norm` keep their weight.

    Functions that layers hold, such as hooks or a forward of their own, use the layers of the copy where they
    refer to layers themselves: what refers to a list of layers goes on with the original's.

    **Raises:** whatever the network's code raises.
    """
    kept = (value for part in module.modules() for value in vars(part).values())
    memo: dict[int, Any] = {
        id(each): each.detach().clone() for each in kept if isinstance(each, Tensor) and not each.is_leaf
    }
    made = copy.deepcopy(module, memo)
    for part in [each for each in memo.values() if isinstance(each, nn.Module)]:
        for held in [vars(part), *(each for each in vars(part).values() if isinstance(each, dict | list))]:
            for name, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
                if (anew := _in_copy(value, memo)) is not value:
                    held[name] = anew
    return made


def _in_copy(value: Any, memo: dict[int, Any]) -> Any:
    """What stands for `value` in a copy: `copy.deepcopy` shares functions, and so what these refer to.

    `memo` is that of `copy.deepcopy`: the copies by the identity of their originals.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, MethodType):
        function, owner = _in_copy(value.__func__, memo), _in_copy(value.__self__, memo)
        same = function is value.__func__ and owner is value.__self__
        return value if same else MethodType(function, owner)
    if not isinstance(value, FunctionType):
        return value
    named = {name: value.__globals__.get(name) for name in value.__code__.co_names}
    named = {name: _in_copy(each, memo) for name, each in named.items() if not isinstance(each, FunctionType)}
    named = {name: each for name, each in named.items() if each is not value.__globals__.get(name)}
    positional, by_name = value.__defaults__ or (), value.__kwdefaults__ or {}
    defaults = tuple(_in_copy(each, memo) for each in positional)
    keywords = {name: _in_copy(each, memo) for name, each in by_name.items()}
    are_same = all(map(operator.is_, (*defaults, *keywords.values()), (*positional, *by_name.values())))
    if not named and not value.__closure__ and are_same:
        return value
    cells = tuple(CellType() for _ in value.__closure__ or ())
    known = {**value.__globals__, **named} if named else value.__globals__
    made = FunctionType(value.__code__, known, value.__name__, defaults, cells)
    made.__kwdefaults__ = keywords
    made.__dict__.update(value.__dict__)
    memo[id(value)] = memo[id(made)] = made
    for cell, original in zip(cells, value.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing is in it yet
            cell.cell_contents = _in_copy(original.cell_contents, memo)
    return made


def note_weights(module: nn.Module, sha256: str) -> None:
    """Note that the user's own object, or a copy of it, has the weights of the checkpoint with this hash."""
    _HELD[module] = sha256
