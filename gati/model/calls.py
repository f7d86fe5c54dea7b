"""Recording the operators that a network calls while it runs.

A torch function mode sees every operator call. Torch functions that are written in Python, such as
`functional.batch_norm`, are entered, so the record holds the operators that they call. Calls that only query
metadata, such as shapes, are left out, and so are calls that return their argument unchanged, such as dropout
in evaluation mode.

Scripted functions, extensions and other threads bypass the mode. The tensors that they return belong to no
recorded call. Their writes are detected by torch's version counter of each tensor, or because a tensor is
read that no recorded call has written to.
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
# Calls that query metadata of a tensor without reading its values.
_METADATA_QUERIES = frozenset({
    "__get__", "can_cast", "dim", "element_size", "get_device", "is_complex", "is_conj", "is_contiguous",
    "is_floating_point", "is_inference", "is_neg", "is_same_size", "is_signed", "ndimension", "nelement",
    "numel", "result_type", "size", "storage_offset", "stride", "type",
})  # fmt: skip
# Calls whose output size depends on the values.
_DATA_DEPENDENT_SIZE = frozenset({
    "_unique", "_unique2", "argwhere", "bincount", "masked_select", "nonzero", "unique_consecutive",
    "unique_dim",
})  # fmt: skip
_UNINITIALISED = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "new", "new_empty", "new_empty_strided",
})  # fmt: skip
_MAY_COPY = frozenset({"contiguous"})  # returns its argument, or a copy if the memory layout differs


class Computed(NamedTuple):
    """The result of call number `call`, or its item `part` if the call returned several tensors."""

    call: int
    part: int | None = None


INPUT = Computed(-1)  # the network's input


class Form(NamedTuple):
    """Shape and storages of a tensor that a call returned; storage ids are unique within one run."""

    shape: tuple[int, ...]
    memory_ids: frozenset[int]


@dataclass(frozen=True)
class Call:
    """One recorded call. In its nested arguments, a `Computed` stands for each computed tensor.

    `returned` is the form of the tensor that it returned, a tuple for several tensors, None for no tensor.
    `scopes` are the qualified names of the modules in which it ran, `changed` the storages it wrote to.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    returned: Form | tuple[Form | None, ...] | None
    scopes: frozenset[str]
    changed: frozenset[int]


@dataclass(frozen=True)
class Calls:
    """The calls of a network for one batch."""

    x: Tensor
    every: list[Call]
    outputs: Sequence[Any]
    output_sources: tuple[Any, ...]  # the outputs, each as a `Computed` if a call computed it


def calls_of(module: nn.Module, x: Tensor) -> Calls:
    """Run `module` on `x` [B, ...] and record its calls. The network must not be modified meanwhile.

    **Raises:** `ModelError` for a network that reads values, uses autocast, or changes tensors outside the
    recorded calls; and whatever the network raises.
    """
    with _running_modules(module) as scopes, torch.inference_mode(False), torch.no_grad():
        mode = _Recorder(x, scopes)
        owned = [x, *module.parameters(), *module.buffers()]
        mode.expect(owned)
        with mode:
            outputs = module(x)
        leaves = torch.utils._pytree.tree_leaves(outputs)
        mode.expect([*owned, *_tensors(leaves)])
        mode.check_read(_tensors(leaves))
        return Calls(x, mode.calls, leaves, tuple(map(mode.noted, leaves)))


@contextmanager
def _running_modules(module: nn.Module) -> Iterator[list[str]]:
    """Yield the names of the modules whose forward the calling thread is running."""
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
class _Recorder(TorchFunctionMode):
    """Records calls. It identifies tensors by `id`, so it keeps all of them alive while it records."""

    x: Tensor
    scopes: list[str]
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._known: dict[int, Computed] = {id(self.x): INPUT}
        self._inside: list[FunctionType] = []
        self._kept: list[Any] = []
        self._writes: dict[int, int] = {}  # by storage: writes by recorded calls
        self._other_writes: dict[int, int] = {}  # by tensor: writes before the recorder saw it
        self._unwritten: set[int] = set()  # storages that are not initialised yet

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record one call. Torch calls this for every function that can be overridden."""
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
        versions = [each._version for each in taken]  # inference tensors have none and raise
        arguments, keywords = self.noted(args), self.noted(kwargs)
        result = func(*args, **kwargs)
        changed = [each for each, before in zip(taken, versions, strict=True) if each._version != before]
        if changed or self._is_computation(func, taken, result):
            self._check(func, args, kwargs, taken)
            self._write(
                {storage(each): each._version - before for each, before in zip(taken, versions, strict=True)}
            )
            self.check_read(taken, result)
            if name_of(func) in _UNINITIALISED and isinstance(result, Tensor) and result.numel():
                self._unwritten.add(storage(result))
            self._know(result)
            scopes, memory_ids = frozenset(self.scopes), frozenset(storages(changed))
            self.calls.append(Call(func, arguments, keywords, _forms(result), scopes, memory_ids))
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
        """Keep tensors alive. Raises ModelError if one has changed, and no recorded call wrote to it."""
        for each in tensors:
            others = each._version - self._writes.get(storage(each), 0)
            if self._other_writes.setdefault(id(each), others) != others:
                raise ModelError("a tensor is changed outside the recorded calls")
            self._kept.append(each)

    def _write(self, times: dict[int, int]) -> None:
        """Add a call's number of writes to each storage."""
        for memory, count in times.items():
            if count:
                self._writes[memory] = self._writes.get(memory, 0) + count
                self._unwritten.discard(memory)

    def check_read(self, tensors: Iterable[Tensor], result: Any = None) -> None:
        """Raise ModelError for a read of uninitialised tensors, unless `result` is another view of them."""
        if self._unwritten.intersection(storages(list(tensors))).difference(storages(result)):
            raise ModelError("a tensor is read before a recorded call writes to it")

    def _check(
        self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], taken: Sequence[Tensor]
    ) -> None:
        """Raise ModelError for a call that a program cannot repeat."""
        if torch.is_autocast_enabled(self.x.device.type):
            raise ModelError("autocast is enabled")
        computed = any(id(each) in self._known for each in taken)
        if computed and _has_data_dependent_size(name_of(function), args, kwargs, taken):
            raise ModelError(f"the output size of {name_of(function)} depends on values")

    def _is_computation(self, function: Callable[..., Any], taken: Sequence[Tensor], result: Any) -> bool:
        """Whether to record a call that changed no tensor. Raises ModelError as `calls_of`."""
        if isinstance(result, Tensor):
            return name_of(function) in _MAY_COPY or not any(result is each for each in taken)
        if next(_tensors(result), None) is not None:
            return True
        if taken and result is not None and name_of(function) not in _METADATA_QUERIES:
            raise ModelError(f"{name_of(function) or function} reads values")
        return False

    def _know(self, result: Any) -> None:
        number = len(self.calls)
        self.expect(_tensors(result))
        if isinstance(result, Tensor):
            self._known[id(result)] = Computed(number)
        elif isinstance(result, (list, tuple)):
            for part, each in enumerate(result):
                if not (each is None or isinstance(each, Tensor)):
                    raise ModelError(f"a call returns a {type(each).__name__} among tensors")
                if each is not None:
                    self._known[id(each)] = Computed(number, part)
        elif result is not None:
            raise ModelError(f"a call that changes a tensor returns a {type(result).__name__}")


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function; empty if it has none."""
    return str(getattr(function, "__name__", ""))


def _has_data_dependent_size(name: str, args: Any, kwargs: dict[str, Any], taken: Sequence[Tensor]) -> bool:
    """Whether the size of a call's output depends on values."""
    given = (*args, *kwargs.values())
    if name == "__getitem__":
        return any(each.dtype in (torch.bool, torch.uint8) for each in taken[1:])
    if name == "where":
        return len(given) == 1
    if name == "one_hot":
        return len(given) == 1 or -1 in given[1:]
    if name == "repeat_interleave":
        return (len(taken) > 1 or len(given) == 1) and "output_size" not in kwargs
    return name in _DATA_DEPENDENT_SIZE


def _forms(result: Any) -> Form | tuple[Form | None, ...] | None:
    if isinstance(result, Tensor):
        return _form(result)
    return None if result is None else tuple(None if each is None else _form(each) for each in result)


def _form(tensor: Tensor) -> Form:
    return Form(tuple(tensor.shape), frozenset(storages(tensor)))


def _entered(function: FunctionType) -> FunctionType:
    """A copy of a torch function that runs its own body instead of dispatching to the mode."""
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
