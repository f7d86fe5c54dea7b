"""A network as the statements that eager mode runs, found by running it on two batches.

The calls for n and for n + 1 inputs may differ only in numbers that are multiples of the batch size, such as
a shape passed to `view`. This takes about as long as running the network. `torch.export` can trace more
networks, such as those that enable autocast, but importing its dependencies takes seconds.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket

from gati.errors import ModelError, one_line
from gati.model.bindings import equal_values, storage
from gati.model.calls import INPUT, Call, Calls, Computed, Form, calls_of, name_of
from gati.model.program import Program, Statement

_BATCH = "batch"
_SPLITS = ("split", "unsafe_split")
_NOT_IN_NAMES = re.compile(r"\W+")

_FASTPATH_LOCK = threading.RLock()  # torch has one switch of fused layers per process

_log = logging.getLogger(__name__)


def eager_program(module: nn.Module, example: Tensor) -> Program | None:
    """`module` as a program for any batch size; None if it cannot be traced in this way.

    The program equals the network bit for bit on three batches: `example` [2 or more, ...], the example with
    one more input, and its first input alone. A network that behaves differently for larger batches is not
    detected. The weights are shared.
    """
    with torch.inference_mode(False), torch.no_grad(), plain_attention():
        batches = [example.clone(), torch.cat([example, example[:1]])]
        try:
            few, many = (calls_of(module, x.clone()) for x in batches)
            program = _Lowering(module, few, many).run()
            flat = program.whole()
            alone = torch.utils._pytree.tree_leaves(module(example[:1].clone()))
            for x, outputs in zip(
                (*batches, example[:1].clone()), (few.outputs, many.outputs, alone), strict=True
            ):
                if not equal_values(torch.utils._pytree.tree_leaves(flat(x)), list(outputs)):
                    raise ModelError(f"the statements compute another result for {len(x)} inputs")
        except Exception as error:  # user code may raise anything
            _log.debug("%s is traced with torch.export instead: %s", type(module).__name__, one_line(error))
            return None
    return program


@contextmanager
def plain_attention() -> Iterator[None]:
    """Run transformer layers as plain operators, which every backend supports, not as torch's fused one.

    Only one thread at a time is inside: torch has one switch for the whole process.
    """
    with _FASTPATH_LOCK:
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


class _Lowering:
    """Turns the calls for n inputs (`few`) and for n + 1 inputs (`many`) into statements."""

    def __init__(self, module: nn.Module, few: Calls, many: Calls) -> None:
        self._few, self._many = few, many
        self._rows = few.x.shape[0]
        owned = [*module.named_parameters(), *module.named_buffers()]
        self._owned = {id(tensor): name for name, tensor in reversed(owned)}
        self._taken = {_BATCH, "slice", "Ellipsis"}
        self._constants: dict[str, Any] = {}
        self._named: dict[int, str] = {}  # constants by identity
        self._weights: dict[str, str] = {}
        self._names: dict[Computed, str] = {INPUT: self._new_name("x")}
        self._statements: list[Statement] = []
        self._uses: dict[str, None] = {}  # names that the current statement reads

    def run(self) -> Program:
        """Return the program. Raises ModelError if the runs differ in more than the batch size."""
        few, many = self._few, self._many
        if len(few.every) != len(many.every):
            raise ModelError("the number of calls depends on the batch size")
        for number, (one, other) in enumerate(zip(few.every, many.every, strict=True)):
            self._add(number, one, other)
        if not few.outputs or not all(isinstance(each, Tensor) for each in few.outputs):
            raise ModelError("the network returns values that are not tensors")
        texts = [
            self._text(one, other) for one, other in zip(few.output_sources, many.output_sources, strict=True)
        ]
        return Program(
            input=self._names[INPUT],
            input_shape=tuple(few.x.shape),
            input_storage=storage(few.x),
            statements=tuple(self._with_batch_size()),
            output=texts[0] if len(texts) == 1 else f"({', '.join(texts)})",
            output_uses=tuple(text for text in texts if text not in self._constants),
            output_shapes=tuple(tuple(each.shape) for each in few.outputs),
            constants=self._constants,
            weights=self._weights,
        )

    def _with_batch_size(self) -> Iterator[Statement]:
        if any(_BATCH in statement.uses for statement in self._statements):
            source = self._names[INPUT]
            yield Statement(
                name=_BATCH,
                text=f"{_BATCH} = {source}.size(0)",
                uses=(source,),
                scopes=frozenset(),
                shape=None,
                batched=False,
                batch_free=False,
                scalar=_BATCH,
                storages=frozenset(),
                mutated=frozenset(),
            )
        yield from self._statements

    def _add(self, number: int, one: Call, other: Call) -> None:
        if one.function != other.function or isinstance(one.function, (OpOverload, OpOverloadPacket)):
            raise ModelError("calls differ, or call operators of an exported program")
        label = _label(one.function)
        self._uses = {}
        text = self._call(one, other, label)
        name = self._names[Computed(number)] = self._new_name(label)
        if isinstance(one.returned, Form) and isinstance(other.returned, Form):
            self._add_statement(name, text, one, one.returned, other.returned)
            return
        parts = [] if one.returned is None else list(one.returned)
        other_parts = [] if other.returned is None else list(other.returned)
        self._add_statement(name, text, one)
        for part, (form, other_form) in enumerate(zip(parts, other_parts, strict=True)):
            if isinstance(form, Form) and isinstance(other_form, Form):
                self._uses = {name: None}
                part_name = self._names[Computed(number, part)] = self._new_name("getitem")
                taken = replace(one, changed=frozenset())
                self._add_statement(part_name, f"{name}[{part}]", taken, form, other_form)

    def _add_statement(
        self, name: str, text: str, call: Call, form: Form | None = None, other_form: Form | None = None
    ) -> None:
        """Add a statement that returns a tensor of `form` (`other_form` for n + 1 inputs), or no tensor."""
        shape = None if form is None else form.shape
        other_shape = None if other_form is None else other_form.shape
        batched = (
            shape is not None and shape[:1] == (self._rows,) and other_shape == (self._rows + 1, *shape[1:])
        )
        self._statements.append(
            Statement(
                name=name,
                text=f"{name} = {text}",
                uses=tuple(self._uses),
                scopes=call.scopes,
                shape=shape,
                batched=batched,
                batch_free=shape is not None and shape == other_shape,
                scalar=None,
                storages=frozenset() if form is None else form.memory_ids,
                mutated=call.changed,
            )
        )

    def _call(self, one: Call, other: Call, label: str) -> str:
        if len(one.arguments) != len(other.arguments) or one.keywords.keys() != other.keywords.keys():
            raise ModelError("arguments depend on the batch size")
        kind = name_of(one.function)
        if kind == "__set__":
            raise ModelError("an attribute of a tensor is set")
        self._check_parts(kind, one.arguments, other.arguments)
        if kind == "__getitem__":
            operand, index = zip(one.arguments, other.arguments, strict=True)
            return f"{self._text(*operand)}[{self._index(*index)}]"
        pairs = zip(one.arguments, other.arguments, strict=True)
        texts = [self._text(*pair) for pair in pairs]
        if kind == "__get__":
            return f"{texts[0]}.{label}"
        texts += [f"{key}={self._text(each, other.keywords[key])}" for key, each in one.keywords.items()]
        return f"{self._constant(f'op_{label}', one.function)}({', '.join(texts)})"

    def _check_parts(self, kind: str, one: Sequence[Any], other: Sequence[Any]) -> None:
        """Raise ModelError for a slice or split that may cover the whole batch only because it is small.

        Networks that process large batches in chunks do so in a loop; only its first iteration is recorded.
        """
        if not one:
            return
        shape, other_shape = _shape_of(self._few, one[0]), _shape_of(self._many, other[0])
        for cut, other_cut in zip(_ends(kind, one, shape), _ends(kind, other, other_shape), strict=True):
            dim, end = cut
            if cut == other_cut and shape[dim] != other_shape[dim] and end >= other_shape[dim]:
                raise ModelError(f"the first {end} inputs of the batch are taken, or all if there are fewer")

    def _index(self, one: Any, other: Any) -> str:
        """The text between square brackets; an index without computed values becomes a constant."""
        operand, self._uses = self._uses, {}
        text = self._text(one, other)
        fixed = not self._uses and not isinstance(one, (int, list, Tensor))
        self._uses = operand | self._uses
        return self._constant("index", one) if fixed else text

    def _text(self, one: Any, other: Any) -> str:
        """An argument as Python text. Its value is `one` for n inputs and `other` for n + 1 inputs."""
        if type(one) is not type(other):
            raise ModelError("the type of an argument depends on the batch size")
        if isinstance(one, Computed):
            if one != other:
                raise ModelError("which tensor an argument is depends on the batch size")
            return self._used(self._names[one])
        if isinstance(one, slice):
            ends = ((one.start, other.start), (one.stop, other.stop), (one.step, other.step))
            return f"slice({', '.join(self._text(*pair) for pair in ends)})"
        if isinstance(one, (list, tuple)):
            texts = "".join(f"{self._text(*pair)}, " for pair in zip(one, other, strict=True))
            return f"[{texts}]" if isinstance(one, list) else f"({texts})"
        if isinstance(one, int) and not isinstance(one, bool) and one != other:
            return self._used(_BATCH, _multiple_of_batch(self._rows, one, other))
        if one is None or isinstance(one, (bool, int, str)) or one is Ellipsis:
            return _equal(repr(one), repr(other))
        if isinstance(one, float) and math.isfinite(one):
            return _equal(repr(float(one)), repr(float(other)))  # NumPy's floats, too
        if one is not other and (isinstance(one, Tensor) or one != other):
            raise ModelError(f"a {type(one).__name__} is created anew for each batch")
        return self._constant(f"constant_{type(one).__name__}", one)

    def _used(self, name: str, text: str = "") -> str:
        self._uses[name] = None
        return text or name

    def _constant(self, name: str, value: Any) -> str:
        """A global name for `value`; the same value keeps its name."""
        if id(value) not in self._named:
            owner = self._owned.get(id(value)) if isinstance(value, Tensor) else None
            self._named[id(value)] = known = self._new_name(name if owner is None else f"own_{owner}")
            self._constants[known] = value.detach() if isinstance(value, Tensor) else value
            if owner is not None:
                self._weights[known] = owner
        return self._named[id(value)]

    def _new_name(self, wish: str) -> str:
        base = _NOT_IN_NAMES.sub("_", wish)
        name, count = base, 0
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return name


def _label(function: Callable[..., Any]) -> str:
    """The label of a call: the name of the function, or of the attribute that it reads."""
    name = function.__name__
    owner = getattr(function, "__self__", None)
    return str(owner.__name__) if name == "__get__" and owner is not None else str(name)


def _shape_of(calls: Calls, value: Any) -> tuple[int, ...]:
    """The shape of an argument; () if it is not a tensor."""
    if not isinstance(value, Computed):
        return tuple(value.shape) if isinstance(value, Tensor) else ()
    if value == INPUT:
        return tuple(calls.x.shape)
    returned = calls.every[value.call].returned
    form = (
        returned
        if value.part is None or isinstance(returned, Form) or returned is None
        else returned[value.part]
    )
    return form.shape if isinstance(form, Form) else ()


def _ends(kind: str, arguments: Sequence[Any], shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield each dimension that a call cuts at a constant, with the end of its first part."""
    if kind in _SPLITS and isinstance(arguments[1], int):
        yield (arguments[2] if len(arguments) > 2 else 0) % len(shape), arguments[1]
    if kind != "__getitem__":
        return
    index = arguments[1] if isinstance(arguments[1], tuple) else (arguments[1],)
    place = 0
    for number, each in enumerate(index):
        if each is Ellipsis:
            place = len(shape) - sum(later is not None for later in index[number + 1 :])
        elif each is not None:
            if isinstance(each, slice) and isinstance(each.stop, int):
                yield place, each.stop
            place += 1


def _multiple_of_batch(rows: int, one: int, other: int) -> str:
    """The text of a number that is `one` for `rows` inputs and `other` for one more input.

    **Raises:** `ModelError` if it is not a multiple of the batch size. Two batches do not show how other
    numbers depend on it, such as the size of a batch that is padded to a multiple of eight.
    """
    step = other - one
    if one != step * rows:
        raise ModelError(f"{one} becomes {other} for one more input")
    return _BATCH if step == 1 else f"({_BATCH} * {step})"


def _equal(one: str, other: str) -> str:
    if one != other:
        raise ModelError(f"{one} becomes {other} for another batch")
    return one
