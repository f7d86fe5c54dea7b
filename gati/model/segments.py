"""Cut a network at the hidden outputs of its blocks, without changing what it computes.

`trace` finds the hidden output of each block in the flat program of a network. `cut` turns the statements
between chosen blocks into segments: functions that take and return the tensors alive at the cut. Run in
sequence they compute exactly what the whole network does. The block `input` is the network's input; the
segment that ends there does nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gati.errors import CutError, DataError, ModelError, one_line
from gati.model.adapted import giving_hidden
from gati.model.bindings import equal_values, storages
from gati.model.cuts import Segment, cut_program
from gati.model.entry import INPUT, INPUT_KIND, means_input
from gati.model.flatten import lower
from gati.model.hooks import first_tensor
from gati.model.masks import mask_of, without_padding
from gati.model.outputs import check_not_one_score, class_scores
from gati.model.program import FlatFunction, Program
from gati.model.user_code import running_user_code
from gati.types import why_no_exits

_BEFORE_ALL = -1  # the input's position among the statements
# A batch may run other kernels than a single row; larger differences are not due to rounding.
_ROW_TOLERANCE = {"cpu": 1e-3, "cuda": 3e-2}  # TF32 on CUDA
_LEAST_SCALE = 1e-4  # of scores; below it, rounding may be all there is
_RELATIVE_ROUNDING = 1e-5  # of small scores among large ones, which came from large numbers, too
_ROUNDINGS = 4  # of a type narrower than float32, that another kernel may change
_ALONE = threading.RLock()  # one for all networks: traces of a network at several lengths share its tensors


@dataclass(frozen=True)
class TracedModel:
    """A network as one flat function, `base(x [B, ...]) -> class scores [B, K]`, to be cut at `blocks`."""

    base: FlatFunction
    blocks: tuple[str, ...]  # in the order in which the network computes them
    hidden_shapes: dict[str, tuple[int, ...]]  # without the batch dimension
    block_kinds: dict[str, str]
    input_shape: tuple[int, ...]  # without the batch dimension
    dtype: torch.dtype  # of the input
    computes_in: torch.dtype  # of the class scores
    device: torch.device
    classes: int
    changes_input: bool  # an operator changes the request in place
    changes_itself: bool  # an operator writes to a tensor of the network: not thread-safe
    _program: Program = field(repr=False)
    _positions: dict[str, int] = field(repr=False)
    _example: Tensor = field(repr=False)
    _cut_before: dict[tuple[str, ...], tuple[Segment, ...]] = field(default_factory=dict, repr=False)

    def example(self) -> Tensor:
        """The first row of the example it was traced with [1, ...]."""
        return self._example[:1].clone()

    def alone(self) -> AbstractContextManager[Any]:
        """A context for running the network or its segments, reentrant.

        If the network writes to its own tensors, one thread is inside at a time. Results may share memory
        with these tensors, so copy what is needed outside.
        """
        return _ALONE if self.changes_itself else nullcontext()

    def hidden_example(self, block: str) -> Tensor:
        """A random tensor of the shape of a block's hidden output [1, ...]; at the input, the example."""
        if self.block_kinds[block] == INPUT_KIND:
            return self.example()
        return torch.rand(1, *self.hidden_shapes[block], device=self.device)

    def cut(self, names: Sequence[str]) -> tuple[Segment, ...]:
        """The segments between the named blocks, one more than names, checked bit for bit on the example.

        Raises:
            CutError: an unknown block, blocks out of order, or a block at which the network cannot be cut.
        """
        if tuple(names) in self._cut_before:
            return self._cut_before[tuple(names)]
        positions = [self._position(name) for name in names]
        for earlier, later in zip(names, names[1:], strict=False):
            if self._positions[earlier] == self._positions[later]:
                raise CutError(f"blocks '{earlier}' and '{later}' end with the same tensor; name one of them")
            if self._positions[earlier] > self._positions[later]:
                raise CutError(
                    f"cannot cut at '{earlier}' before '{later}': the network computes them the "
                    "other way round; name blocks in forward order"
                )
        segments = cut_program(self._program, tuple(names), positions)
        self._verify(segments)
        self._cut_before[tuple(names)] = segments
        return segments

    def _position(self, name: str) -> int:
        if name not in self._positions:
            known = ", ".join(self.blocks)
            raise CutError(f"no block '{name}' in the traced network; its blocks are {known}")
        return self._positions[name]

    def _verify(self, segments: tuple[Segment, ...]) -> None:
        with torch.inference_mode(), self.alone():
            for rows in (self._example, self._example[:1]):
                carried: Any = (rows.clone(),)
                for segment in segments:
                    carried = segment.run(*carried)
                if not equal_values(carried, self.base(rows.clone())):
                    names = ", ".join(str(segment.block) for segment in segments[:-1])
                    raise CutError(
                        f"the segments cut at {names} do not compute what the whole network does; "
                        "choose other blocks"
                    )


def trace(module: nn.Module, example: Tensor, blocks: Sequence[str]) -> TracedModel:
    """Trace `module` on `example` [2 or more, ...] and find the hidden output of each of `blocks`.

    The block `input` is the example itself, and comes first, unless there is a submodule of that name.
    Padding of masked sequences is zero in hidden outputs; random masks in the example distinguish these from
    the blocks' outputs. The module must be in evaluation mode; it is not changed, and its weights are shared.
    The caller's autocast is off meanwhile.

    Raises:
        ModelError: the network cannot be traced, or an input's result depends on the rest of its batch.
        CutError: a block's output is not a value of the traced network, or not float32.
        DataError: an example of fewer than two rows.
    """
    with torch.autocast(example.device.type, enabled=False):
        return _traced(module, example, blocks)


def _traced(module: nn.Module, example: Tensor, blocks: Sequence[str]) -> TracedModel:
    if reason := why_no_exits(blocks):
        raise CutError(reason)
    _check_traceable(module, example)
    with torch.inference_mode():
        inner = [name for name in blocks if not means_input(module, name)]
        captured, expected = _run_with_hooks(module, example, inner)
    for name in inner:
        if reason := _unreadable(name, captured, example):
            raise CutError(reason)
    finder = _BlockFinder(captured)
    if mask_of(module) is None or not inner:
        program = lower(module, example, observe=finder.observe)
    else:
        program = lower(giving_hidden(module, inner), example, observe=finder.observe).first_output()
    if len(program.output_shapes) == 1:
        check_not_one_score(program.output_shapes[0])
    if len(program.output_shapes) != 1 or len(program.output_shapes[0]) != 2:
        raise ModelError(
            f"the network returns tensors of shapes {list(program.output_shapes)}; one of shape "
            "[batch, classes] is needed; wrap it to return its class scores"
        )
    base = program.whole()
    _check_base(base, example, expected, finder.rounding)
    positions = finder.positions(program)
    kinds = {name: type(module.get_submodule(name)).__name__ for name in positions}
    if len(inner) < len(blocks):
        positions[INPUT], kinds[INPUT], captured[INPUT] = _BEFORE_ALL, INPUT_KIND, example
    order = tuple(sorted(positions, key=positions.__getitem__))
    changed = frozenset().union(*(statement.mutated for statement in program.statements))
    return TracedModel(
        base=base,
        blocks=order,
        hidden_shapes={name: tuple(captured[name].shape[1:]) for name in order},
        block_kinds={name: kinds[name] for name in order},
        input_shape=tuple(example.shape[1:]),
        dtype=example.dtype,
        computes_in=expected.dtype,
        device=example.device,
        classes=program.output_shapes[0][1],
        changes_input=program.input_storage in changed,
        changes_itself=bool(changed.intersection(storages(list(program.constants.values())))),
        _program=program,
        _positions=positions,
        _example=example[:2].clone(),
    )


class ReadableBlocks(NamedTuple):
    """Names of blocks whose output caches can read.

    `others_curable` says that another one returns a tensor [batch, ...], but not float32, or NaN.
    """

    names: tuple[str, ...]
    others_curable: bool


def readable_blocks(module: nn.Module, example: Tensor, blocks: Sequence[str]) -> ReadableBlocks:
    """Those of `blocks` whose output caches can read: a float32 tensor with a batch dimension."""
    with torch.inference_mode(), torch.autocast(example.device.type, enabled=False):
        captured, _ = _run_with_hooks(module, example, blocks)
    names = tuple(name for name in blocks if not _unreadable(name, captured, example))
    batched = [name for name in blocks if not _without_batch(name, captured, example)]
    return ReadableBlocks(names, len(names) < len(batched))


def _check_traceable(module: nn.Module, example: Tensor) -> None:
    if example.ndim < 2 or example.shape[0] < 2:
        raise DataError(
            f"an example of shape {list(example.shape)} cannot be traced with a free batch size; "
            "give at least two inputs"
        )
    training = next((name for name, child in module.named_modules() if child.training), None)
    if training is not None:
        raise ModelError(
            f"module '{training or type(module).__name__}' is in training mode; "
            "call .eval() on the network first"
        )


def _run_with_hooks(
    module: nn.Module, example: Tensor, blocks: Sequence[str]
) -> tuple[dict[str, Tensor], Tensor]:
    """The hidden outputs of the module's own forward, and its result."""
    captured: dict[str, Tensor] = {}
    mask = mask_of(module)
    with ExitStack() as handles:
        for name in blocks:

            def hook(_module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
                with suppress(ModelError):  # `_unreadable` says that there is no tensor
                    hidden = first_tensor(output, name)
                    hidden = hidden if mask is None else without_padding(hidden, mask(example))
                    captured[name] = hidden.clone()  # a later operator may change it in place

            handles.enter_context(_submodule(module, name).register_forward_hook(hook))
        with running_user_code(lambda error: _refusal(module, example, error)):
            result = class_scores(module(example.clone()))
    return captured, result


def _refusal(module: nn.Module, example: Tensor, error: Exception) -> str:
    runs = _runs_outside_inference_mode(module, example)
    advice = "its forward must not compute gradients" if runs else "fix its forward, or check the inputs"
    return f"the network does not run in inference mode ({one_line(error)}); {advice}"


def _runs_outside_inference_mode(module: nn.Module, example: Tensor) -> bool:
    with torch.inference_mode(False), torch.no_grad(), suppress(Exception):
        module(example.clone())
        return True
    return False


def _unreadable(name: str, captured: dict[str, Tensor], example: Tensor) -> str:
    """Why caches cannot read the output of a block, or an empty string."""
    if reason := _without_batch(name, captured, example):
        return reason
    if captured[name].dtype != torch.float32:
        return (
            f"the output of block '{name}' is {str(captured[name].dtype).removeprefix('torch.')}, and "
            "caches read float32; let the network compute in float32, or name others with --blocks"
        )
    if bool(captured[name].isnan().any()):
        return (
            f"the output of block '{name}' is NaN; check the checkpoint and the preprocessing (--mean, --std)"
        )
    return ""


def _without_batch(name: str, captured: dict[str, Tensor], example: Tensor) -> str:
    """Why the output of a block is no tensor [batch, ...], or an empty string."""
    if name not in captured:
        return f"block '{name}' returned no tensor; choose blocks that return one tensor"
    if captured[name].shape[:1] != example.shape[:1]:
        return (
            f"the output of block '{name}' has shape {list(captured[name].shape)}, its first "
            f"dimension is not the batch of {example.shape[0]}; choose another block"
        )
    return ""


def _submodule(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        known = ", ".join(child for child, _ in module.named_modules() if child)[:300]
    raise CutError(f"the network has no module '{name}'; its modules are {known}")


def _check_base(base: FlatFunction, example: Tensor, expected: Tensor, rounding: float) -> None:
    """Check that the flat network equals the module, and that the rows of a batch are independent.

    `rounding` is the epsilon of the narrowest type it computes in.
    """
    with torch.inference_mode():
        whole, again = base(example.clone()), base(example.clone())
        alone = torch.cat([base(example[row : row + 1].clone()) for row in range(2)])
    if alone.shape != whole[:2].shape:
        raise ModelError(
            f"the network returns shape {list(whole.shape)} for {len(whole)} inputs, and another for one; "
            "let its forward keep the batch, as `flatten(1)` does and `squeeze()` does not"
        )
    if not equal_values(whole, again):
        raise ModelError(
            "the network computes another result each time, even for the same inputs; remove from its "
            "forward what is random or remembers earlier inputs"
        )
    if not torch.allclose(whole, expected, 1e-4, 1e-5, equal_nan=True):
        raise ModelError(
            "the traced network does not compute what the module's own forward does; "
            "its forward depends on something other than its input and its weights"
        )
    tolerance = max(_ROW_TOLERANCE.get(example.device.type, 1e-3), _ROUNDINGS * rounding)
    scale = 1.0
    if rounding <= torch.finfo(torch.float32).eps:
        # Probabilities of many classes are small.
        scale = min(1.0, max(_LEAST_SCALE, float(whole.abs().max())))
    usual = whole[:2][alone != whole[:2]].abs().nanmedian()  # not the largest: it may be that of a mask
    rounded = max(tolerance * scale, _RELATIVE_ROUNDING * float(usual))
    independent = torch.allclose(alone, whole[:2], tolerance, rounded, equal_nan=True)
    if independent and rounded > tolerance * scale:  # a mask that is added to most scores hides the others
        for row in (slice(0, 1), slice(-1, None)):  # it may depend on those before it only, or after it
            with torch.inference_mode():
                copies = base(example[row].expand_as(example).clone())[row]  # same kernels, same rounding
            independent &= torch.allclose(copies, whole[row], tolerance, tolerance * scale, equal_nan=True)
    if not independent:
        raise ModelError(
            "the network's result for an input depends on the other inputs of its batch; "
            "Gati needs networks whose results for an input do not depend on the batch"
        )


class _BlockFinder:
    """Finds the traced values that equal a block's captured output."""

    def __init__(self, captured: dict[str, Tensor]) -> None:
        self._captured = captured
        self.rounding = 0.0  # the largest epsilon of the types of the values
        self._exact: dict[str, str] = {}
        self._exact_elsewhere: dict[str, str] = {}
        self._close: dict[str, str] = {}

    def observe(self, name: str, scopes: frozenset[str], value: Any) -> None:
        if not isinstance(value, Tensor):
            return
        if value.is_floating_point():
            self.rounding = max(self.rounding, torch.finfo(value.dtype).eps)
        for block, hidden in self._captured.items():
            if value.shape != hidden.shape or value.dtype != hidden.dtype:
                continue
            inside = block in scopes
            if torch.equal(value, hidden):
                (self._exact if inside else self._exact_elsewhere).setdefault(block, name)
                if inside:
                    self._exact[block] = name
            elif inside and torch.allclose(value, hidden, 1e-4, 1e-5):
                self._close[block] = name

    def positions(self, program: Program) -> dict[str, int]:
        index_of = {statement.name: index for index, statement in enumerate(program.statements)}
        positions = {}
        for block, hidden in self._captured.items():
            name = self._exact.get(block) or self._exact_elsewhere.get(block) or self._close.get(block)
            if name is None:
                raise CutError(
                    f"cannot cut the network at block '{block}': its output of shape "
                    f"{list(hidden.shape)} is not a value of the traced network; choose another block"
                )
            positions[block] = index_of[name]
        return positions
