"""A traced network as flat Python source.

At batch size 1 a small network spends most of its time between the operators: module calls, attribute
look-ups, dispatch through Python wrappers. Here it becomes a list of statements, and any range of them
becomes one Python function over locals. Most networks are traced by listing what eager mode calls; for the
others, a `torch.export` graph in training IR has eager mode's operators, in-place ones included. Every
operator is bound to the fastest callable that is equal bit for bit.
"""

from __future__ import annotations

import logging
import math
import operator
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from gati.errors import ModelError, one_line
from gati.model.bindings import (
    candidates,
    copies,
    equal_values,
    mutated_storages,
    slice_index,
    storage,
    storages,
)
from gati.model.eager import eager_program, plain_attention
from gati.model.program import FlatFunction, Program, Statement
from gati.model.user_code import running_user_code

# Checks that export inserts; requests are checked once, on arrival.
_CHECKS = ("_assert", "sym_constrain_range", "_check", "_guards")
_MOST_PROGRAMS = 256
_MANY_INPUTS = 65_535  # cuDNN's own limit for batch_norm
_PROGRAMS: dict[Hashable, Program] = {}  # by structure, without weights
_DROPOUTS = ("dropout", "dropout_", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


def lower(
    module: nn.Module, example: Tensor, *, observe: Callable[[str, frozenset[str], Any], None] | None = None
) -> Program:
    """Trace `module` on `example` [2 or more, ...] with a free batch dimension and lower it to statements.

    `observe(name, scopes, value)` is called with every intermediate value on the example, as it is computed
    (later operators may change it in place). The weights are shared.

    Raises:
        ModelError: `torch.export` cannot trace the network, or fixes its batch size.
    """
    program = eager_program(module, example)
    if program is None:
        exported = export_program(module, example)
        # operators that have no values of their own, such as those of vmap, raise
        with running_user_code(lambda error: f"cannot trace {type(module).__name__}: {one_line(error)}"):
            return _Lowering(exported, example.clone(), observe).run()  # it may change its input in place
    if observe is not None:
        with torch.inference_mode():
            for statement, value in program.steps(example.clone()):
                observe(statement.name, statement.scopes, value)
    return program


def flatten(module: nn.Module, example: Tensor, structure: Hashable = None) -> FlatFunction:
    """`module` as a flat function of one tensor, equal bit for bit on `example` [B, ...].

    A module that cannot be traced, or whose flat form differs, is returned unchanged. Modules of equal
    `structure` differ only in their weights and are traced once: tracing is slow and never freed.
    """
    rows = example if example.shape[0] > 1 else torch.cat([example, example])
    try:
        flat = _program(module, rows, structure).whole("lookup")
        with torch.inference_mode():
            same = all(equal_values(flat(x.clone()), module(x.clone())) for x in (rows, rows[:1]))
    except ModelError:
        return module
    return flat if same else module


def _program(module: nn.Module, rows: Tensor, structure: Hashable) -> Program:
    if structure is None:
        return lower(module, rows)
    key = (structure, rows.shape[1:], rows.dtype, rows.device)
    if key not in _PROGRAMS:
        while len(_PROGRAMS) >= _MOST_PROGRAMS:
            _PROGRAMS.pop(next(iter(_PROGRAMS)), None)
        program = lower(module, rows)
        _PROGRAMS[key] = program.with_weights(dict.fromkeys(program.weights.values()))
    found = _PROGRAMS.get(key) or lower(module, rows)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return found.with_weights({name: tensor.detach() for name, tensor in tensors.items()})


def export_program(module: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """Export `module` as traced on `example` [2 or more, ...], with a free batch dimension.

    Raises:
        ModelError: `torch.export` cannot trace the network.
    """
    batch = torch.export.Dim.DYNAMIC
    try:
        with torch.no_grad(), plain_attention(), _quiet(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export")  # of an RNN
            exported = torch.export.export(module, (example,), dynamic_shapes=({0: batch},), strict=False)
    except Exception as error:  # torch.export raises many unrelated types
        message = (
            f"cannot trace {type(module).__name__} with a free batch size: {one_line(error)}; remove "
            "data-dependent control flow or fixed batch sizes from its forward"
        )
    else:
        _check_any_batch(module, exported)
        return exported
    raise ModelError(message)


def _check_any_batch(module: nn.Module, exported: torch.export.ExportedProgram) -> None:
    """Raise ModelError for a network that takes larger batches in parts: only the first part is exported."""
    inputs = exported.graph_signature.user_inputs
    nodes = (node for node in exported.graph.nodes if node.op == "placeholder" and node.name in inputs)
    batches = {str(node.meta["val"].shape[0]) for node in nodes}
    for symbol, limits in exported.range_constraints.items():
        largest = str(limits.upper)
        if str(symbol) in batches and largest.isdecimal() and int(largest) < _MANY_INPUTS:
            raise ModelError(
                f"{type(module).__name__} runs otherwise for more than {largest} inputs at a time; remove "
                "what depends on the batch size from its forward"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what `torch.export` prints about a network that it cannot trace off stderr: the error says it.

    It logs a warning and prints the graph so far, by the only `print` of its module. That one is replaced:
    redirecting stderr would also swallow what other threads and the network itself write. One thread at a
    time may be inside, which `plain_attention` ensures.
    """
    try:
        from torch.export import _trace  # takes seconds to import

        names = vars(_trace)
    except ImportError:  # another torch has it elsewhere; its print is then seen
        names = {}
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")

    def no_record(record: logging.LogRecord) -> bool:
        return False

    def no_print(*values: Any, **options: Any) -> None:
        return None

    logger.addFilter(no_record)
    names["print"] = no_print
    try:
        yield
    finally:
        names.pop("print", None)
        logger.removeFilter(no_record)


class _Lowering:
    """Walks the exported graph once, running it on the example, and collects statements."""

    def __init__(
        self,
        exported: torch.export.ExportedProgram,
        example: Tensor,
        observe: Callable[[str, frozenset[str], Any], None] | None,
    ) -> None:
        self._exported = exported
        self._example = example
        self._observe = observe
        self._values: dict[fx.Node, Any] = {}
        self._texts: dict[fx.Node, str] = {}
        self._constants: dict[str, Any] = {}
        self._weights: dict[str, str] = {}
        self._statements: list[Statement] = []
        self._input = ""
        self._batch = ""

    def run(self) -> Program:
        graph = self._exported.graph_module.graph
        live = _live_nodes(graph)
        with torch.inference_mode():
            for node in graph.nodes:
                if node.op == "placeholder":
                    self._placeholder(node)
                elif node.op == "get_attr":
                    self._constant(node, _attribute(self._exported.graph_module, str(node.target)))
                elif node.op == "call_function" and node in live:
                    self._call(node)
        return self._finish(graph)

    def _finish(self, graph: fx.Graph) -> Program:
        (output,) = (node for node in graph.nodes if node.op == "output")
        specs = self._exported.graph_signature.output_specs
        outputs = zip(output.args[0], specs, strict=True)
        results = [node for node, spec in outputs if spec.kind.name == "USER_OUTPUT"]
        if not results or not all(isinstance(node, fx.Node) for node in results):
            raise ModelError(
                "the network returns values that are not tensors; wrap it to return class scores"
            )
        texts = [self._texts[node] for node in results]
        return Program(
            input=self._input,
            input_shape=tuple(self._example.shape),
            input_storage=storage(self._example),
            statements=tuple(self._statements),
            output=texts[0] if len(texts) == 1 else f"({', '.join(texts)})",
            output_uses=tuple(t for t in texts if t not in self._constants),
            output_shapes=tuple(tuple(self._values[node].shape) for node in results),
            constants=self._constants,
            weights=self._weights,
        )

    def _placeholder(self, node: fx.Node) -> None:
        signature, exported = self._exported.graph_signature, self._exported
        for table in (
            signature.inputs_to_parameters,
            signature.inputs_to_buffers,
            signature.inputs_to_lifted_tensor_constants,
        ):
            if node.name in table:
                key = table[node.name]
                is_weight = key in exported.state_dict
                source = exported.state_dict if is_weight else exported.constants
                self._constant(node, source[key].detach())
                if is_weight:
                    self._weights[self._texts[node]] = key
                return None
        self._input = self._texts[node] = node.name
        self._values[node] = self._example
        self._batch = str(node.meta["val"].shape[0])
        return None

    def _constant(self, node: fx.Node, value: Any) -> None:
        self._values[node] = value
        self._texts[node] = self._name_constant(node.name, value)

    def _name_constant(self, name: str, value: Any) -> str:
        """A global name for `value`; the same value keeps its name."""
        while name in self._constants and self._constants[name] is not value:
            name += "_"
        self._constants[name] = value
        return name

    def _call(self, node: fx.Node) -> None:
        alias = _skipped_dropout(node)
        if alias is not None:
            self._values[node], self._texts[node] = self._values[alias], self._texts[alias]
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        function, text = self._bind(node, args, kwargs)
        mutated = mutated_storages(node, args, kwargs)
        value = function(*args, **kwargs)
        self._values[node] = value
        self._texts[node] = node.name
        self._statements.append(self._statement(node, f"{node.name} = {text}", value, mutated))
        if self._observe is not None:
            self._observe(node.name, self._statements[-1].scopes, value)

    def _statement(self, node: fx.Node, text: str, value: Any, mutated: frozenset[int]) -> Statement:
        symbolic = node.meta.get("val")
        sizes = [str(size) for size in symbolic.shape] if isinstance(symbolic, Tensor) else []
        dynamic = [size for size in sizes if not size.lstrip("-").isdigit()]
        is_tensor = isinstance(value, Tensor)
        return Statement(
            name=node.name,
            text=text,
            uses=tuple(
                dict.fromkeys(t for n in node.all_input_nodes if (t := self._texts[n]) not in self._constants)
            ),
            scopes=frozenset(
                path.removeprefix("L['self'].") for path, _ in node.meta.get("nn_module_stack", {}).values()
            ),
            shape=tuple(value.shape) if is_tensor else None,
            batched=is_tensor and dynamic[:1] == sizes[:1] == [self._batch] and len(dynamic) == 1,
            batch_free=is_tensor and not dynamic,
            scalar=str(symbolic).replace(self._batch, "batch")
            if isinstance(symbolic, (int, float, torch.SymInt, torch.SymFloat))
            else None,
            storages=frozenset(storages(value)),
            mutated=mutated,
        )

    def _bind(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[FlatFunction, str]:
        """The fastest callable that is equal on the example, and the text of its call."""
        target: Any = node.target
        if not isinstance(target, OpOverload):
            return target, self._call_text(node, getattr(target, "__name__", "function"), target)
        name = target._schema.name.split("::")[-1]
        if name == "sym_size":
            return target, f"{self._text(node.args[0])}.size({node.args[1]})"
        if name == "slice" and all(a is None or isinstance(a, int) for a in node.args[1:]):
            bounds: Any = node.args[1:]
            index = slice_index(*bounds)
            return (lambda *a, **k: a[0][index]), (
                f"{self._text(node.args[0])}[{self._name_constant(f'{node.name}_index', index)}]"
            )
        expected = target(*copies(args), **copies(kwargs))
        for candidate in candidates(name, target):
            try:
                same = equal_values(candidate(*copies(args), **copies(kwargs)), expected)
            except (TypeError, RuntimeError, ValueError):
                continue
            if same:
                return candidate, self._call_text(node, name, candidate)
        return target, self._call_text(node, name, target)

    def _call_text(self, node: fx.Node, name: str, function: FlatFunction) -> str:
        arguments = [self._text(a) for a in node.args]
        arguments += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
        return f"{self._name_constant(f'op_{name}', function)}({', '.join(arguments)})"

    def _text(self, argument: Any) -> str:
        """An argument of a graph node as Python text."""
        if isinstance(argument, fx.Node):
            return self._texts[argument]
        if isinstance(argument, (list, tuple)):
            return "(" + "".join(f"{self._text(item)}, " for item in argument) + ")"
        if argument is None or isinstance(argument, (bool, int, str)):
            return repr(argument)
        if isinstance(argument, float) and math.isfinite(argument):
            return repr(argument)
        return self._name_constant(f"constant_{type(argument).__name__}", argument)


def _live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Calls whose result is used or that mutate something, except checks."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        name = getattr(node.target, "__name__", str(node.target))
        needed = node.op == "output" or any(user in live for user in node.users)
        changes = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        if node.op == "call_function" and name.startswith(_CHECKS):
            continue
        if needed or changes:
            live.add(node)
    return live


def _skipped_dropout(node: fx.Node) -> fx.Node | None:
    """The input of a dropout that does nothing in evaluation mode."""
    target = node.target
    if not isinstance(target, OpOverload) or target._schema.name.split("::")[-1] not in _DROPOUTS:
        return None
    source, train = node.args[0], node.args[2] if len(node.args) > 2 else node.kwargs.get("train")
    return source if train is False and isinstance(source, fx.Node) else None


def _attribute(module: nn.Module, path: str) -> Any:
    return operator.attrgetter(path)(module)
