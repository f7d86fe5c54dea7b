"""A network as a list of statements, and stretches of it as Python functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

__all__ = ["FlatFunction", "Program", "Statement", "compiled", "packed"]

FlatFunction: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Statement:
    """One operator of the network: `name = function(*arguments)` as Python text.

    `storages` are the memories its tensors live in and `mutated` those it changes in place, both as seen
    while the example ran; `scopes` are the qualified names of the modules it belongs to. `batched` says
    that the first dimension is the batch, `batch_free` that no dimension depends on it.
    """

    name: str
    text: str
    uses: tuple[str, ...]
    scopes: frozenset[str]
    shape: tuple[int, ...] | None  # None: no single tensor
    batched: bool
    batch_free: bool
    scalar: str | None  # the Python expression in terms of `batch`, where the value is a number
    storages: frozenset[int]
    mutated: frozenset[int]


@dataclass(frozen=True)
class Program:
    """A network as statements: `input` -> statements -> `output` (Python text)."""

    input: str
    input_shape: tuple[int, ...]  # of the example
    input_storage: int
    statements: tuple[Statement, ...]
    output: str
    output_uses: tuple[str, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    constants: Mapping[str, Any] = field(repr=False)
    weights: Mapping[str, str] = field(default_factory=dict, repr=False)  # constants that the module owns

    def with_weights(self, tensors: Mapping[str, Any]) -> Program:
        """The same program for a module of the same structure, whose weights by name are `tensors`."""
        bound = {name: tensors[key] for name, key in self.weights.items()}
        return replace(self, constants={**self.constants, **bound})

    def first_output(self) -> Program:
        """The same program with its first output alone: what only others need is left out of functions."""
        return replace(
            self,
            output=self.output_uses[0],
            output_uses=self.output_uses[:1],
            output_shapes=self.output_shapes[:1],
        )

    def function(
        self,
        name: str,
        parameters: Sequence[str],
        body: Sequence[Statement],
        result: str,
        result_uses: Iterable[str],
        prologue: Sequence[str] = (),
    ) -> FlatFunction:
        """Compile what `result` needs of `body` into one function; locals are dropped after their last use.

        The source is kept as the attribute `source` for a reader who wants to see what runs.
        """
        kept = frozenset(result_uses)
        lines = [*prologue, *_with_releases(parameters, _needed(body, kept), kept), f"return {result}"]
        source = f"def {name}({', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in lines)
        return compiled(name, source, self.constants)

    def steps(self, x: Any) -> Iterator[tuple[Statement, Any]]:
        """Run the network on `x` [B, ...], and give each statement with what it computed, at that moment."""
        values = {**self.constants, self.input: x}
        for statement in self.statements:
            exec(statement.text, values)
            yield statement, values[statement.name]

    def whole(self, name: str = "network") -> FlatFunction:
        """The whole network as one function."""
        return self.function(name, (self.input,), self.statements, self.output, self.output_uses)


def compiled(name: str, source: str, constants: Mapping[str, Any]) -> FlatFunction:
    """The function `name` that `source` defines; it keeps the source."""
    namespace = dict(constants)
    exec(compile(source, f"<gati {name}>", "exec"), namespace)
    function: FlatFunction = namespace[name]
    function.source = source  # type: ignore[attr-defined]
    return function


def packed(function: FlatFunction) -> tuple[str, str, dict[str, Any]]:
    """What `compiled` makes the same function of, with no more constants than it uses."""
    source: str = function.source  # type: ignore[attr-defined]
    known = function.__globals__
    used = sorted(set(re.findall(r"[A-Za-z_]\w*", source)) & set(known))
    return function.__name__, source, {name: known[name] for name in used if name != function.__name__}


def _needed(body: Sequence[Statement], wanted: frozenset[str]) -> list[Statement]:
    """The statements that give what is wanted or change memory, and those that they use."""
    needed, used = [], set(wanted)
    for statement in reversed(body):
        if statement.name in used or statement.mutated:
            needed.append(statement)
            used.update(statement.uses)
    return needed[::-1]


def _with_releases(
    parameters: Sequence[str], body: Sequence[Statement], kept: frozenset[str]
) -> Iterator[str]:
    """The lines of `body`, each followed by a `del` of what nobody reads later."""
    last_use = {name: index for index, statement in enumerate(body) for name in statement.uses}
    known = set(parameters)
    for index, statement in enumerate(body):
        yield statement.text
        known.add(statement.name)
        read = {*statement.uses, statement.name}
        dead = sorted(n for n in read & known - kept if last_use.get(n, -1) <= index)
        if dead:
            yield f"del {', '.join(dead)}"
            known.difference_update(dead)
