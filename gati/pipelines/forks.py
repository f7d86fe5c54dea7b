"""Forks, where stages start to run in parallel, and the joins where they meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gati.errors import PipelineError
from gati.pipelines.check import outcomes
from gati.pipelines.pipeline import Pipeline


class Follow(NamedTuple):
    """A possible continuation: with probability `share`, all of `targets` run, and meet again at `join`.

    `join` is None unless there are several targets. Without targets, the query or its branch ends here.
    """

    share: float
    targets: tuple[str, ...]
    join: str | None


def follows(pipeline: Pipeline) -> dict[str, tuple[Follow, ...]]:
    """The possible continuations of each stage.

    **Raises:** `PipelineError` if branches that run in parallel share a stage, or never meet again.
    """
    after = _always_after(pipeline)
    found = {}
    for name, stage in pipeline.stages.items():
        found[name] = tuple(
            _follow(pipeline, name, targets, sum(stage.shares[index] for index in labels), after)
            for targets, labels in outcomes(stage, pipeline.edges_from[name]).items()
        )
    return found


def _follow(
    pipeline: Pipeline, stage: str, targets: frozenset[str], share: float, after: Mapping[str, frozenset[str]]
) -> Follow:
    order = list(pipeline.stages)
    listed = tuple(sorted(targets, key=order.index))
    if len(listed) < 2:
        return Follow(share, listed, None)
    common = frozenset.intersection(*(after[target] for target in listed))
    if not common:
        raise _unplannable(stage, listed, "end in different outputs")
    join = min(common, key=order.index)
    seen: set[str] = set()
    for target in listed:
        inside = _before(pipeline, target, join)
        if seen & inside:
            raise _unplannable(stage, listed, f"share stage '{min(seen & inside, key=order.index)}'")
        seen |= inside
    return Follow(share, listed, join)


def _unplannable(stage: str, targets: tuple[str, ...], problem: str) -> PipelineError:
    return PipelineError(
        f"the branches {', '.join(targets)} after stage '{stage}' {problem} before they meet, but policy "
        "'dynamic' plans only chains and fork-joins; join them in one stage, or use policy 'proportional'"
    )


def _always_after(pipeline: Pipeline) -> dict[str, frozenset[str]]:
    """The post-dominators of each stage: the stages on every path from it to an output, itself included."""
    found: dict[str, frozenset[str]] = {}
    for name in reversed(list(pipeline.stages)):
        onward = [found[edge.target] for edge in pipeline.edges_from[name]]
        found[name] = frozenset([name]) | (frozenset.intersection(*onward) if onward else frozenset())
    return found


def _before(pipeline: Pipeline, stage: str, join: str) -> set[str]:
    """The stages that can be reached from `stage` without passing `join`, `stage` included."""
    found: set[str] = set()
    pending = [stage]
    while pending:
        name = pending.pop()
        if name != join and name not in found:
            found.add(name)
            pending += [edge.target for edge in pipeline.edges_from[name]]
    return found
