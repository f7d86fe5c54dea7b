"""Small pipelines to test on, and every policy there is for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from hypothesis import strategies as st

from gati.pipelines import Pipeline, parse_pipeline
from gati.pipelines.forks import follows


def option(accuracy: float, *latency_ms: float) -> dict[str, Any]:
    return {"model": "m", "accuracy": accuracy, "latency_ms": list(latency_ms)}


def stage(*options: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"classes": ["x", "y"], "options": {f"o{i}": value for i, value in enumerate(options)}, **more}


def pipeline(stages: dict[str, Any], *edges: tuple[str, ...]) -> Pipeline:
    """Edges as ("a", "b") or ("a", "b", "x"), the third being the label that lets b run."""
    listed = [{"from": edge[0], "to": edge[1], **({"when": edge[2]} if edge[2:] else {})} for edge in edges]
    return parse_pipeline({"class_names": ["x", "y"], "stages": stages, "edges": listed}, "test.toml")


SHAPES: dict[str, list[tuple[str, ...]]] = {
    "one stage": [],
    "chain": [("a", "b"), ("b", "c")],
    "conditional tree": [("a", "b", "x"), ("a", "c", "y")],
    "exclusive branches that meet": [("a", "b", "x"), ("a", "c", "y"), ("b", "d"), ("c", "d")],
    "a stage that may be left out": [("a", "b", "x"), ("a", "c"), ("b", "c")],
    "fork and join": [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")],
    "fork with a branch that may end": [("a", "b"), ("a", "c"), ("b", "e", "x"), ("e", "d"), ("c", "d")],
    "fork in a fork": [
        ("a", "b"),
        ("a", "c"),
        ("b", "e"),
        ("b", "f"),
        ("e", "g"),
        ("f", "g"),
        ("g", "d"),
        ("c", "d"),
    ],
}
SEQUENTIAL = [*SHAPES][:4]

_latency = st.lists(st.integers(1, 6), min_size=1, max_size=2)
_options = st.lists(st.tuples(st.integers(50, 100), _latency), min_size=1, max_size=2)


@st.composite
def pipelines(draw: st.DrawFn, shapes: list[str] | None = None) -> Pipeline:
    """A pipeline of some shape, with small whole latencies in milliseconds."""
    edges = SHAPES[draw(st.sampled_from(shapes or [*SHAPES]))]
    names = sorted({"a", *(name for edge in edges for name in edge[:2])})
    stages = {}
    for name in names:
        options = [option(accuracy / 100, *latency) for accuracy, latency in draw(_options)]
        share = draw(st.integers(1, 3)) / 4
        stages[name] = stage(*options, shares={"x": share, "y": 1 - share})
    return pipeline(stages, *edges)


def every_policy(found: Pipeline, name: str, left_ms: float) -> Iterator[tuple[float, float]]:
    """(probability of right in time, of in time) of each deterministic policy from `name` on.

    A policy may choose by everything that has happened, so there is one for each choice after each history.
    """
    for one in found.stages[name].options.values():
        latency = one.measured_latency
        branches = []  # of (probability, every policy afterwards)
        for taken_ms, probability in zip(latency.values_ms, latency.probabilities, strict=True):
            for follow in follows(found)[name]:
                left = left_ms - taken_ms
                in_time = float(left >= 0.0)
                after = [(in_time, in_time)]
                if follow.targets:
                    after = list(dict.fromkeys(every_policy(found, follow.targets[0], left)))
                branches.append((probability * follow.share, after))
        for combination in product(*(after for _, after in branches)):
            both = [
                sum(weight * value[i] for (weight, _), value in zip(branches, combination, strict=True))
                for i in (0, 1)
            ]
            yield one.measured_accuracy * both[0], both[1]
