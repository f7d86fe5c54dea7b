"""Running the user's network, which may raise anything, and objects of the user's that are loaded into."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    Only then: closures and hooks of a copy still use the weights of the original.

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

    **Raises:** whatever the network's code raises.
    """
    kept = (value for part in module.modules() for value in vars(part).values())
    memo = {id(each): each.detach().clone() for each in kept if isinstance(each, Tensor) and not each.is_leaf}
    return copy.deepcopy(module, memo)


def note_weights(module: nn.Module, sha256: str) -> None:
    """Note that the user's own object, or a copy of it, has the weights of the checkpoint with this hash."""
    _HELD[module] = sha256
