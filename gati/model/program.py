"""A network as a list of statements, compiled to Python functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor, nn

FlatFunction: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Statement:
    """One operator of the network: `name = function(*arguments)` as Python text.

    `storages` are the storages of its tensors and `mutated` those that it changes in place, both as observed
    on the example; `scopes` are the qualified names of the modules it belongs to. `batched`: the first
    dimension is the batch. `batch_free`: no dimension depends on the batch.
    """

    name: str
    text: str
    uses: tuple[str, ...]
    scopes: frozenset[str]
    shape: tuple[int, ...] | None  # None: not a single tensor
    batched: bool
    batch_free: bool
    scalar: str | None  # for a number: a Python expression in terms of `batch`
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
    weights: Mapping[str, str] = field(
        default_factory=dict, repr=False
    )  # constants that are the module's weights

    def with_weights(self, tensors: Mapping[str, Any]) -> Program:
        """The same program with other weights, by name, from a module of equal structure."""
        bound = {name: tensors[key] for name, key in self.weights.items()}
        return replace(self, constants={**self.constants, **bound})

    def first_output(self) -> Program:
        """The same program with its first output only; functions omit statements that only others need."""
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
        """Compile those statements of `body` that `result` needs into one function.

        Locals are deleted after their last use. The function has its source as an attribute `source`.
        """
        kept = frozenset(result_uses)
        lines = [*prologue, *_with_releases(parameters, needed_for(kept, body), kept), f"return {result}"]
        source = f"def {name}({', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in lines)
        return compiled(name, source, self.constants)

    def steps(self, x: Any) -> Iterator[tuple[Statement, Any]]:
        """Run the network on `x` [B, ...]; yield each statement with its value, before the next one runs."""
        values = {**self.constants, self.input: x}
        for statement in self.statements:
            exec(statement.text, values)
            yield statement, values[statement.name]

    def whole(self, name: str = "network") -> FlatFunction:
        """The whole network as one function."""
        return self.function(name, (self.input,), self.statements, self.output, self.output_uses)


def compiled(name: str, source: str, constants: Mapping[str, Any]) -> FlatFunction:
    """The function `name` that `source` defines, with its source as an attribute."""
    namespace = dict(constants)
    exec(compile(source, f"<gati {name}>", "exec"), namespace)
    function: FlatFunction = namespace[name]
    function.source = source  # type: ignore[attr-defined]
    return function


def packed(function: FlatFunction) -> tuple[str, str, dict[str, Any]]:
    """The arguments from which `compiled` makes the same function, with only the constants it uses."""
    source: str = function.source  # type: ignore[attr-defined]
    known = function.__globals__
    used = sorted(set(re.findall(r"[A-Za-z_]\w*", source)) & set(known))
    return function.__name__, source, {name: known[name] for name in used if name != function.__name__}


def as_module(function: FlatFunction, *, persistent: bool = False) -> nn.Module:
    """The same function as a module whose tensors are buffers, which compilers take for constants.

    `persistent`: the buffers are part of its state dict.
    """
    name, source, constants = packed(function)
    tensors = {key: value for key, value in constants.items() if isinstance(value, Tensor)}
    head, body = source.split("\n", 1)
    attributes = "".join(f"    {key} = self.constant_{key}\n" for key in tensors)
    whole = "\n".join((head.replace("(", "(self, ", 1), attributes + body))
    others = {key: value for key, value in constants.items() if key not in tensors}
    # a class of its own: a compiler keeps few versions of one piece of code
    made: nn.Module = type("Flat", (nn.Module,), {"forward": compiled(name, whole, others)})()
    for key, value in tensors.items():
        made.register_buffer(f"constant_{key}", value, persistent=persistent)
    return made.eval()


def needed_for(wanted: frozenset[str], body: Sequence[Statement]) -> list[Statement]:
    """The statements that compute `wanted` or mutate tensors, and those they depend on."""
    needed, used = [], set(wanted)
    for statement in reversed(body):
        if statement.name in used or statement.mutated:
            needed.append(statement)
            used.update(statement.uses)
    return needed[::-1]


def _with_releases(
    parameters: Sequence[str], body: Sequence[Statement], kept: frozenset[str]
) -> Iterator[str]:
    """The lines of `body`, each followed by a `del` of locals that are not read again."""
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
