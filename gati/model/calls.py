"""The operators that a network calls, listed while it runs.

Every call of an operator passes by a mode of torch. What torch itself has in Python, such as
`functional.batch_norm`, is entered, so that the list holds what it calls in turn. Calls that only ask for
shapes are left out, and so is what gives back what it was given, as dropout does in evaluation mode.

Scripted functions, extensions and other threads do not pass by the mode. What they return is a tensor that no
call gave; what they write to is found by the versions that torch counts for each tensor, or because nothing
else wrote to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gati.errors import ModelError
from gati.model.bindings import storage, storages

_OVERRIDDEN = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
# What a network may know of a tensor without looking at its values.
_ABOUT_FORM = frozenset({
    "__get__", "can_cast", "dim", "element_size", "get_device", "is_complex", "is_conj", "is_contiguous",
    "is_floating_point", "is_inference", "is_neg", "is_same_size", "is_signed", "ndimension", "nelement",
    "numel", "result_type", "size", "storage_offset", "stride", "type",
})  # fmt: skip
# Calls that give a tensor of as many numbers as the values say.
_OF_ANY_SIZE = frozenset({
    "_unique", "_unique2", "argwhere", "bincount", "masked_select", "nonzero", "unique_consecutive",
    "unique_dim",
})  # fmt: skip
_GIVES_ANYTHING = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "new", "new_empty", "new_empty_strided",
})  # fmt: skip
_GIVES_BACK_BY_LAYOUT = frozenset({"contiguous"})  # of an input in another layout it gives a copy


class Computed(NamedTuple):
    """What call number `call` gave, or its part number `part` where it gave several tensors."""

    call: int
    part: int | None = None


INPUT = Computed(-1)  # of the network


class Form(NamedTuple):
    """What is known of a tensor that a call gave; `memories` are unique within the calls of one batch."""

    shape: tuple[int, ...]
    memories: frozenset[int]


@dataclass(frozen=True)
class Call:
    """One call; in its arguments, however nested, a `Computed` stands for each tensor that another call gave.

    It gave a tensor of the form `gave`, several of them, or nothing. `scopes` are the qualified names of the
    modules that it is part of, `changed` the memories it wrote to.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    gave: Form | tuple[Form | None, ...] | None
    scopes: frozenset[str]
    changed: frozenset[int]


@dataclass(frozen=True)
class Calls:
    """What a network calls for one batch."""

    x: Tensor
    every: list[Call]
    outputs: Sequence[Any]
    given: tuple[Any, ...]  # the same, as `Call` has its arguments


def calls_of(module: nn.Module, x: Tensor) -> Calls:
    """Run `module` on `x` [B, ...], and list its calls. It needs a network that stays as it is meanwhile.

    **Raises:** `ModelError` for a network that looks at values, casts automatically, or changes tensors by
    what no call shows; and whatever the network raises.
    """
    with _scopes_of(module) as scopes, torch.inference_mode(False), torch.no_grad():
        mode = _Listing(x, scopes)
        owned = [x, *module.parameters(), *module.buffers()]
        mode.expect(owned)
        with mode:
            outputs = module(x)
        leaves = torch.utils._pytree.tree_leaves(outputs)
        mode.expect([*owned, *_tensors(leaves)])
        mode.check_read(_tensors(leaves))
        return Calls(x, mode.calls, leaves, tuple(map(mode.noted, leaves)))


@contextmanager
def _scopes_of(module: nn.Module) -> Iterator[list[str]]:
    """The names of the modules that the calling thread is in."""
    inside: list[str] = []
    thread = threading.get_ident()

    def entering(name: str) -> Callable[[nn.Module, Any], None]:
        def enter(_module: nn.Module, _arguments: Any) -> None:
            if threading.get_ident() == thread:
                inside.append(name)

        return enter

    def leave(_module: nn.Module, _arguments: Any, _output: Any) -> None:
        if threading.get_ident() == thread:
            inside.pop()

    with ExitStack() as handles:
        for name, child in module.named_modules():
            if name:
                handles.enter_context(child.register_forward_pre_hook(entering(name)))
                handles.enter_context(child.register_forward_hook(leave))
        yield inside


@dataclass(eq=False)
class _Listing(TorchFunctionMode):
    """Lists calls; tensors are told by identity, so all of them are kept as long as it lists."""

    x: Tensor
    scopes: list[str]
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._known: dict[int, Computed] = {id(self.x): INPUT}
        self._inside: list[FunctionType] = []
        self._kept: list[Any] = []
        self._writes: dict[int, int] = {}  # how many calls made, by memory
        self._other_writes: dict[int, int] = {}  # how many others made before it was known, by tensor
        self._unwritten: set[int] = set()  # memories that may hold anything

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """As torch calls it, for every function that can be overridden."""
        kwargs = kwargs or {}
        if isinstance(func, FunctionType) and func not in self._inside:
            self._inside.append(func)
            try:
                with self:
                    return _entered(func)(*args, **kwargs)
            finally:
                self._inside.pop()
        taken = list(_tensors((args, kwargs)))
        self.expect(taken)
        versions = [each._version for each in taken]  # those of inference mode have none, and raise
        arguments, keywords = self.noted(args), self.noted(kwargs)
        result = func(*args, **kwargs)
        changed = [each for each, before in zip(taken, versions, strict=True) if each._version != before]
        if changed or self._computed(func, taken, result):
            self._check(func, args, kwargs, taken)
            self._write(
                {storage(each): each._version - before for each, before in zip(taken, versions, strict=True)}
            )
            self.check_read(taken, result)
            if name_of(func) in _GIVES_ANYTHING and isinstance(result, Tensor) and result.numel():
                self._unwritten.add(storage(result))
            self._know(result)
            scopes, memories = frozenset(self.scopes), frozenset(storages(changed))
            self.calls.append(Call(func, arguments, keywords, _forms(result), scopes, memories))
        return result

    def noted(self, value: Any) -> Any:
        """Nested arguments with a `Computed` for every tensor that was computed."""
        if isinstance(value, Tensor):
            return self._known.get(id(value), value)
        if isinstance(value, slice):
            return slice(*map(self.noted, (value.start, value.stop, value.step)))
        if isinstance(value, dict):
            return {key: self.noted(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return (list if isinstance(value, list) else tuple)(map(self.noted, value))
        return value

    def expect(self, tensors: Iterable[Tensor]) -> None:
        """Keep tensors, and raise ModelError if one was changed, since the last time, by no call."""
        for each in tensors:
            others = each._version - self._writes.get(storage(each), 0)
            if self._other_writes.setdefault(id(each), others) != others:
                raise ModelError("a tensor is changed by what no call shows")
            self._kept.append(each)

    def _write(self, times: dict[int, int]) -> None:
        """Count how many times a call wrote to each memory."""
        for memory, count in times.items():
            if count:
                self._writes[memory] = self._writes.get(memory, 0) + count
                self._unwritten.discard(memory)

    def check_read(self, tensors: Iterable[Tensor], result: Any = None) -> None:
        """Raise ModelError for tensors that no call wrote to, unless `result` is another view of them."""
        if self._unwritten.intersection(storages(list(tensors))).difference(storages(result)):
            raise ModelError("a tensor is read that no call wrote to")

    def _check(
        self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], taken: Sequence[Tensor]
    ) -> None:
        """Raise ModelError for a call that would not be the same in a program."""
        if torch.is_autocast_enabled(self.x.device.type):
            raise ModelError("automatic casts are switched on")
        computed = any(id(each) in self._known for each in taken)
        if computed and _is_of_any_size(name_of(function), args, kwargs, taken):
            raise ModelError(f"the size of what {name_of(function)} gives depends on values")

    def _computed(self, function: Callable[..., Any], taken: Sequence[Tensor], result: Any) -> bool:
        """Whether the call is to be listed, having changed nothing. Raises ModelError as `calls_of`."""
        if isinstance(result, Tensor):
            return name_of(function) in _GIVES_BACK_BY_LAYOUT or not any(result is each for each in taken)
        if next(_tensors(result), None) is not None:
            return True
        if taken and result is not None and name_of(function) not in _ABOUT_FORM:
            raise ModelError(f"{name_of(function) or function} looks at values")
        return False

    def _know(self, result: Any) -> None:
        number = len(self.calls)
        self.expect(_tensors(result))
        if isinstance(result, Tensor):
            self._known[id(result)] = Computed(number)
        elif isinstance(result, (list, tuple)):
            for part, each in enumerate(result):
                if not (each is None or isinstance(each, Tensor)):
                    raise ModelError(f"a call gives a {type(each).__name__} among tensors")
                if each is not None:
                    self._known[id(each)] = Computed(number, part)
        elif result is not None:
            raise ModelError(f"a call that changes a tensor gives a {type(result).__name__}")


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called; empty where it has no name."""
    return str(getattr(function, "__name__", ""))


def _is_of_any_size(name: str, args: Any, kwargs: dict[str, Any], taken: Sequence[Tensor]) -> bool:
    """Whether the size of what a call gives depends on values."""
    given = (*args, *kwargs.values())
    if name == "__getitem__":
        return any(each.dtype in (torch.bool, torch.uint8) for each in taken[1:])
    if name == "where":
        return len(given) == 1
    if name == "one_hot":
        return len(given) == 1 or -1 in given[1:]
    if name == "repeat_interleave":
        return (len(taken) > 1 or len(given) == 1) and "output_size" not in kwargs
    return name in _OF_ANY_SIZE


def _forms(result: Any) -> Form | tuple[Form | None, ...] | None:
    if isinstance(result, Tensor):
        return _form(result)
    return None if result is None else tuple(None if each is None else _form(each) for each in result)


def _form(tensor: Tensor) -> Form:
    return Form(tuple(tensor.shape), frozenset(storages(tensor)))


def _entered(function: FunctionType) -> FunctionType:
    """The same function of torch, which goes on where it would let a mode take over."""
    cells = []
    for cell in function.__closure__ or ():
        inner = cell.cell_contents
        is_inner = isinstance(inner, FunctionType) and inner is not function
        cells.append(CellType(_entered(inner)) if is_inner else cell)
    known = {**function.__globals__, **dict.fromkeys(_OVERRIDDEN, _never)}
    entered = FunctionType(function.__code__, known, function.__name__, function.__defaults__, tuple(cells))
    entered.__kwdefaults__ = function.__kwdefaults__
    return entered


def _never(*_: object) -> bool:
    return False


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors of nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, slice):
        yield from _tensors([value.start, value.stop, value.step])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
