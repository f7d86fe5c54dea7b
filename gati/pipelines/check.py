"""Checks of a pipeline: a DAG with one input, every stage reachable, one output whatever the labels."""

from __future__ import annotations

import graphlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from gati.errors import PipelineError
from gati.pipelines.pipeline import Edge, Stage

_MOST_STATES = 20_000  # states of queries at one stage; chains and fork-joins have few


def check_graph(
    stages: Mapping[str, Stage], edges: Sequence[Edge], declared_input: str | None, where: str
) -> tuple[tuple[str, ...], str]:
    """Return the stages in topological order, and the input stage.

    **Raises:** `PipelineError`, with a message that begins with `where`.
    """
    _check_edges(stages, edges, where)
    order = _order(stages, edges, where)
    input_stage = _input(order, edges, declared_input, where)
    _check_runs(order, stages, edges, input_stage, where)
    return order, input_stage


def outputs_of(order: Sequence[str], edges: Sequence[Edge]) -> tuple[str, ...]:
    """The stages without successors."""
    sources = {edge.source for edge in edges}
    return tuple(name for name in order if name not in sources)


def outcomes(stage: Stage, edges_from: Sequence[Edge]) -> dict[frozenset[str], tuple[int, ...]]:
    """The sets of targets that can follow a stage, and the indices of the labels that lead to each set."""
    found: dict[frozenset[str], list[int]] = defaultdict(list)
    for index, label in enumerate(stage.labels):
        found[frozenset(edge.target for edge in edges_from if edge.holds(label))].append(index)
    return {targets: tuple(indices) for targets, indices in found.items()}


def _check_edges(stages: Mapping[str, Stage], edges: Sequence[Edge], where: str) -> None:
    seen = set()
    for edge in edges:
        for name in (edge.source, edge.target):
            if name not in stages:
                raise PipelineError(
                    f"{where}: edge {edge.source} -> {edge.target}: unknown stage '{name}'; "
                    f"the stages are {', '.join(stages)}"
                )
        if (edge.source, edge.target) in seen:
            raise PipelineError(
                f"{where}: two edges {edge.source} -> {edge.target}; write one, with the labels of both"
            )
        seen.add((edge.source, edge.target))
        labels = stages[edge.source].labels
        for label in sorted(edge.when or ()):
            if label not in labels:
                raise PipelineError(
                    f"{where}: edge {edge.source} -> {edge.target}: '{edge.source}' has no label '{label}'; "
                    f"its labels are {', '.join(labels)}"
                )


def _order(stages: Mapping[str, Stage], edges: Sequence[Edge], where: str) -> tuple[str, ...]:
    before: dict[str, list[str]] = {name: [] for name in stages}
    for edge in edges:
        before[edge.target].append(edge.source)
    try:
        sorter = graphlib.TopologicalSorter(before)
        sorter.prepare()
    except graphlib.CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        raise PipelineError(f"{where}: cycle {cycle}; remove one of these edges") from None
    order: list[str] = []
    position = list(stages).index
    while sorter.is_active():
        ready = sorted(
            sorter.get_ready(), key=position
        )  # in the order of the file, where the edges permit it
        order += ready
        sorter.done(*ready)
    return tuple(order)


def _input(order: Sequence[str], edges: Sequence[Edge], declared: str | None, where: str) -> str:
    targets = {edge.target for edge in edges}
    first = [name for name in order if name not in targets]
    if declared is None:
        if len(first) > 1:
            raise PipelineError(
                f"{where}: {_listed(first)} have no edge into them, and a pipeline has one input; "
                "add an edge, or remove a stage"
            )
        return first[0]
    if declared not in order:
        raise PipelineError(f"{where}: input '{declared}' is not a stage; the stages are {', '.join(order)}")
    if declared not in first:
        before = next(edge.source for edge in edges if edge.target == declared)
        raise PipelineError(
            f"{where}: input '{declared}' comes after '{before}'; name a stage without edges into it"
        )
    unreachable = [name for name in first if name != declared]
    if unreachable:
        raise PipelineError(
            f"{where}: stage '{unreachable[0]}' is unreachable: no edge leads to it; add one, or remove it"
        )
    return declared


def _check_runs(
    order: Sequence[str], stages: Mapping[str, Stage], edges: Sequence[Edge], first: str, where: str
) -> None:
    """Follow queries with every combination of labels; each must reach one output."""
    outputs = outputs_of(order, edges)
    for labels, ran in _every_query(order, stages, edges, first, where):
        answering = [name for name in outputs if name in ran]
        if len(answering) == 1:
            continue
        said = _when(labels)
        if not answering:
            raise PipelineError(
                f"{where}: no output{said}: no edge matches; add an edge, or remove the label"
            )
        if not labels:
            raise PipelineError(f"{where}: two outputs, {_listed(answering[:2])}; join them in one stage")
        raise PipelineError(
            f"{where}: two outputs{said}, {_listed(answering[:2])}; join them in one stage, "
            "or let their conditions exclude each other"
        )


_State = tuple[frozenset[str], frozenset[str]]  # stages with an incoming edge that holds; stages that ran


def _every_query(
    order: Sequence[str], stages: Mapping[str, Stage], edges: Sequence[Edge], first: str, where: str
) -> Iterator[tuple[dict[str, str], frozenset[str]]]:
    """Yield each possible set of stages that run, once, with labels that lead to it."""
    states: dict[_State, dict[str, str]] = {(frozenset([first]), frozenset()): {}}
    for name in order:
        follow = outcomes(stages[name], [edge for edge in edges if edge.source == name])
        advanced: dict[_State, dict[str, str]] = {}
        for (wanted, ran), labels in states.items():
            if name not in wanted:
                advanced.setdefault((wanted, ran), labels)
                continue
            for targets, indices in follow.items():
                said = labels if len(follow) == 1 else {**labels, name: stages[name].labels[indices[0]]}
                advanced.setdefault((wanted | targets, ran | {name}), said)
        if len(advanced) > _MOST_STATES:
            raise PipelineError(f"{where}: too many combinations of conditions by stage '{name}'; split it")
        states = advanced
    for (_, ran), labels in states.items():
        yield labels, ran


def _when(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return " when " + " and ".join(f"'{stage}' says '{label}'" for stage, label in labels.items())


def _listed(names: Sequence[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)
