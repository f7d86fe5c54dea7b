"""Cutting a program into segments: functions over the tensors that are alive at each cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gati.errors import CutError
from gati.model.program import Program, Statement, needed_for


@dataclass(frozen=True)
class Carried:
    """One tensor that crosses a cut; `batched` if its first dimension is the batch."""

    name: str
    shape: tuple[int, ...]
    batched: bool


@dataclass(frozen=True)
class Segment:
    """A part of the network that ends with the hidden output of `block` (None: with the class scores).

    `run(*tensors)` takes the previous segment's tensors (the first segment: the request) and returns a tuple
    of what the rest of the network needs, the hidden output first; the last segment returns the class scores
    [B, K]. `hidden_changes_later`: a later segment changes the hidden output in place. `rows_selectable` is
    False if rows of the carried tensors must not be selected, because two of them share memory that is
    changed later.
    """

    index: int
    block: str | None
    run: Callable[..., Any]
    carried: tuple[Carried, ...]
    hidden_changes_later: bool = False
    rows_selectable: bool = True

    @property
    def source(self) -> str:
        """The Python source of `run`."""
        return str(self.run.source)  # type: ignore[attr-defined]


def cut_program(program: Program, names: tuple[str, ...], positions: list[int]) -> tuple[Segment, ...]:
    """The segments of a program cut after the statements at `positions`, where blocks `names` end.

    **Raises:** `CutError` if something other than tensors with a batch dimension crosses a cut.
    """
    statements = program.statements
    bounds = [0, *(position + 1 for position in positions), len(statements)]
    ends = (*program.output_uses, *(statements[position].name for position in positions if position >= 0))
    needed = {statement.name for statement in needed_for(frozenset(ends), statements)}
    segments: list[Segment] = []
    parameters: tuple[str, ...] = (program.input,)
    for index, block in enumerate((*names, None)):
        body = [each for each in statements[bounds[index] : bounds[index + 1]] if each.name in needed]
        result_uses = program.output_uses
        later = [each for each in statements[bounds[index + 1] :] if each.name in needed]
        carried: tuple[Carried, ...] = ()
        result = program.output
        if block is not None:
            carried = _carried(program, block, bounds[index + 1], later)
            result_uses = tuple(tensor.name for tensor in carried)
            result = f"({', '.join(result_uses)},)"
        prologue = _scalars(body, bounds[index], statements, parameters, block)
        function = program.function(f"segment_{index}", parameters, body, result, result_uses, prologue)
        segments.append(Segment(index, block, function, carried, *_sharing(program, carried, later)))
        parameters = result_uses
    return tuple(segments)


def _carried(program: Program, block: str, bound: int, later: Sequence[Statement]) -> tuple[Carried, ...]:
    """The tensors alive after `statements[:bound]`, the hidden output first; `later` is what still runs."""
    if bound == 0:
        return (Carried(program.input, program.input_shape, batched=True),)
    statements = program.statements
    defined = {statement.name: statement for statement in statements[:bound]}
    hidden = statements[bound - 1]
    used = {name for statement in later for name in statement.uses} | set(program.output_uses)
    crossing = [
        statement
        for statement in defined.values()
        if statement is hidden or (statement.name in used and statement.scalar is None)
    ]
    wrong = [s for s in crossing if s.shape is None or not (s.batched or s.batch_free)]
    if not hidden.batched:
        wrong = [hidden]
    if wrong:
        listed = ", ".join(
            f"{s.name} {'(several tensors)' if s.shape is None else list(s.shape)}" for s in wrong
        )
        raise CutError(
            f"cannot cut the network after block '{block}': {listed} crosses the cut and its "
            "first dimension is not the batch; choose another block"
        )
    tensors = [Carried(s.name, tuple(s.shape or ()), s.batched) for s in crossing]
    if program.input in used:
        tensors.append(Carried(program.input, program.input_shape, batched=True))
    return tuple(sorted(tensors, key=lambda tensor: tensor.name != hidden.name))


def _scalars(
    body: Sequence[Statement],
    start: int,
    statements: Sequence[Statement],
    parameters: Sequence[str],
    block: str | None,
) -> tuple[str, ...]:
    """Lines that recompute, from the batch size, the numbers that earlier segments computed."""
    earlier = {statement.name: statement for statement in statements[:start] if statement.scalar is not None}
    needed = [earlier[name] for name in dict.fromkeys(n for s in body for n in s.uses) if name in earlier]
    if not needed:
        return ()
    lines = [f"batch = {parameters[0]}.size(0)"]
    for statement in needed:
        expression = str(statement.scalar)
        if set(re.findall(r"[A-Za-z_]\w*", expression)) - {"batch"}:
            raise CutError(
                f"cannot cut the network before block '{block or 'output'}': the number "
                f"{statement.name} = {expression} crosses the cut; choose another block"
            )
        if expression != statement.name:
            lines.append(f"{statement.name} = {expression}")
    return tuple(lines)


def _sharing(program: Program, carried: tuple[Carried, ...], later: Sequence[Statement]) -> tuple[bool, bool]:
    """Whether the hidden output changes in place later, and whether rows can be selected per tensor."""
    if not carried:
        return False, True
    memories = {s.name: s.storages for s in program.statements}
    memories[program.input] = frozenset({program.input_storage})
    changed = frozenset().union(*(statement.mutated for statement in later))
    crossing = [memories[tensor.name] & changed for tensor in carried]
    shared = sum(map(len, crossing)) > len(frozenset().union(*crossing))
    return bool(crossing[0]), not shared
