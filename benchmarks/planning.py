"""Decision time of the planner: 10 stages with 5 options each, for every policy.

    python -m benchmarks.planning

Microseconds of `begin`, one `start` and one `finish` over whole queries, and the time to build the planner.
For planners that follow traffic (`live`), `finish` includes the observation and `refresh_s` is the time to
replan. `cpu_us` is the CPU time of all three together per stage, which other work on the machine does not
change. `tree` is a root with two followers, with three options each and findings.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from gati.pipelines import (
    Behaviour,
    Distribution,
    EngineReport,
    Finding,
    LivePlanner,
    Option,
    Pipeline,
    Planner,
    parse_pipeline,
)

QUERIES = 2000
SERVED = EngineReport(0.7, 0.1, "base")
CHAIN = [(f"s{i}", f"s{i + 1}") for i in range(9)]
FORK = [edge for i in range(1, 9) for edge in (("s0", f"s{i}"), (f"s{i}", "s9"))]


def main() -> int:
    """Print one JSON document."""
    found = []
    for shape, pipeline in (("tree", tree()), ("chain", synthetic(CHAIN)), ("fork-join", synthetic(FORK))):
        for policy in ("static", "equal", "proportional", "dynamic"):
            start = time.process_time()
            planner = Planner(pipeline, policy)
            building_s = time.process_time() - start
            head = {"shape": shape, "policy": policy, "building_s": round(building_s, 3)}
            found.append({**head, **decide(planner)})
            live = LivePlanner(pipeline, policy)
            head["policy"] += ", live"
            found.append({**head, **decide(live), "refresh_s": refresh(live)})
    print(json.dumps(found, indent=1))
    return 0


def synthetic(edges: list[tuple[str, str]]) -> Pipeline:
    """Return ten stages with five options, each with 400 latencies."""
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


def tree() -> Pipeline:
    """Return a root and two followers, whose options' accuracy depends on the root's confidence."""
    draw = np.random.default_rng(0)
    option = {"model": "synthetic", "accuracy": 0.9}
    stage = {"options": {f"o{j}": {**option, "latency_ms": 2.0**j} for j in range(3)}}
    edges = [{"from": "s0", "to": f"s{i + 1}", "when": label} for i, label in enumerate("xy")]
    stages = {f"s{i}": stage for i in range(3)}
    found = parse_pipeline({"class_names": ["x", "y"], "stages": stages, "edges": edges})

    def behaviour(scale: float) -> Behaviour:
        latencies = (Distribution.from_samples(scale * draw.gamma(3.0, 0.3, 200) + 0.1) for _ in range(4))
        return Behaviour((0.5, 0.25, 0.15, 0.1), (0.99, 0.95, 0.8, 0.6), tuple(latencies))

    def known(name: str, one: Option, scale: float) -> Option:
        before = [Finding(f"o{j}", level) for j in range(3) for level in range(4)] if name != "s0" else []
        behaviours = {finding: behaviour(scale) for finding in (None, *before)}
        return replace(one, levels=(0.9, 0.8, 0.5), behaviours=behaviours)

    options = {
        name: {key: known(name, one, 2.0**j) for j, (key, one) in enumerate(stage.options.items())}
        for name, stage in found.stages.items()
    }
    return replace(
        found, stages={name: replace(each, options=options[name]) for name, each in found.stages.items()}
    )


def refresh(planner: LivePlanner) -> float:
    """Return the CPU seconds of replanning after the queries of `decide`."""
    start = time.process_time()
    if not planner.refresh():
        raise SystemExit("no figure has changed")
    return round(time.process_time() - start, 3)


def decide(planner: Planner | LivePlanner) -> dict[str, Any]:
    """Return times of single calls in microseconds, over whole queries."""
    times: dict[str, list[int]] = {"begin": [], "start": [], "finish": []}
    draw = np.random.default_rng(1)
    slos_ms = draw.uniform(10.0, 150.0, QUERIES).tolist()
    for slo_ms in slos_ms:
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
            run.finish(stage, "x", elapsed_ms, 0.85, SERVED)
            times["finish"].append(time.perf_counter_ns() - begun)
    found: dict[str, Any] = {
        f"{name}_us": {f"p{q}": round(float(np.percentile(taken, q)) / 1e3, 1) for q in (50, 99)}
        for name, taken in times.items()
    }
    begun_s = time.process_time()
    for slo_ms in slos_ms:
        whole(planner, slo_ms)
    taken_s = time.process_time() - begun_s
    return {**found, "cpu_us": round(1e6 * taken_s / len(times["finish"]), 1)}


def whole(planner: Planner | LivePlanner, slo_ms: float) -> None:
    """Run one query."""
    run, elapsed_ms = planner.begin(slo_ms), 0.0
    while not run.done:
        stage = run.ready[0]
        run.start(stage, elapsed_ms)
        elapsed_ms += slo_ms / 11.0
        run.finish(stage, "x", elapsed_ms, 0.85, SERVED)


if __name__ == "__main__":
    sys.exit(main())
