"""How long the planner takes to decide: 10 stages with 5 options each, every policy.

    python -m benchmarks.planning

Microseconds of `begin`, of one `start` and of one `finish` over whole queries, and how long building took.
For planners that follow the traffic (`live`) `finish` includes the observation, and `refresh_ms` is how long
planning again takes.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from gati.pipelines import LivePlanner, Pipeline, Planner, parse_pipeline

QUERIES = 2000
CHAIN = [(f"s{i}", f"s{i + 1}") for i in range(9)]
FORK = [edge for i in range(1, 9) for edge in (("s0", f"s{i}"), (f"s{i}", "s9"))]


def main() -> int:
    """Print one JSON document."""
    found = []
    for shape, edges in (("chain", CHAIN), ("fork-join", FORK)):
        pipeline = synthetic(edges)
        for policy in ("static", "equal", "proportional", "dynamic"):
            start = time.perf_counter()
            planner = Planner(pipeline, policy)
            building_s = time.perf_counter() - start
            head = {"shape": shape, "policy": policy, "building_s": round(building_s, 3)}
            found.append({**head, **decide(planner)})
            live = LivePlanner(pipeline, policy)
            head["policy"] += ", live"
            found.append({**head, **decide(live), "refresh_ms": refresh(live)})
    print(json.dumps(found, indent=1))
    return 0


def synthetic(edges: list[tuple[str, str]]) -> Pipeline:
    """Ten stages of five options, each with 400 latencies."""
    draw = np.random.default_rng(0)
    stages = {
        f"s{i}": {
            "options": {
                f"o{j}": {
                    "model": "synthetic",
                    "accuracy": 0.75 + 0.05 * j,
                    "latency_ms": (draw.gamma(3.0, 0.5 + j, 400) + 0.1).tolist(),
                }
                for j in range(5)
            }
        }
        for i in range(10)
    }
    listed = [{"from": source, "to": target} for source, target in edges]
    return parse_pipeline({"class_names": ["x", "y"], "stages": stages, "edges": listed})


def refresh(planner: LivePlanner) -> float:
    """Milliseconds of planning again, after the queries that `decide` ran."""
    start = time.perf_counter()
    if not planner.refresh():
        raise SystemExit("no figure has moved")
    return round(1e3 * (time.perf_counter() - start), 1)


def decide(planner: Planner | LivePlanner) -> dict[str, Any]:
    """Times of single calls in microseconds, over whole queries."""
    times: dict[str, list[int]] = {"begin": [], "start": [], "finish": []}
    draw = np.random.default_rng(1)
    for slo_ms in draw.uniform(10.0, 150.0, QUERIES).tolist():
        begun = time.perf_counter_ns()
        run = planner.begin(slo_ms)
        times["begin"].append(time.perf_counter_ns() - begun)
        elapsed_ms = 0.0
        while not run.done:
            stage = run.ready[0]
            begun = time.perf_counter_ns()
            run.start(stage, elapsed_ms)
            times["start"].append(time.perf_counter_ns() - begun)
            elapsed_ms += slo_ms / 11.0
            begun = time.perf_counter_ns()
            run.finish(stage, "x", elapsed_ms)
            times["finish"].append(time.perf_counter_ns() - begun)
    return {
        f"{name}_us": {f"p{q}": round(float(np.percentile(taken, q)) / 1e3, 1) for q in (50, 99)}
        for name, taken in times.items()
    }


if __name__ == "__main__":
    sys.exit(main())
