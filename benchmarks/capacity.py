"""Measure the capacity of one scheduler and one replica, and extrapolate to 10, 100 and 1,000 replicas.

    python -m benchmarks.capacity measure LIBRARY --data unseen.npz --json capacity.json
    python -m benchmarks.capacity simulate --trace ../shared/data/llm_traces/azure2023_conv.csv.gz \
        --figures capacity.json

`measure` counts CPU time per request, which other work on the machine hardly affects: of the scheduler in
front of an engine that answers at once, of a replica with a real engine, and of choosing among many replicas.
`simulate` distributes requests with the real `services.scheduler.choice`, using measured service times and
random or traced arrivals; see `docs/capacity.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.queueing import ONE_QUEUE, RANDOM, TWO_CHOICES, poisson, read_arrivals, traced, waits_s
from benchmarks.serving import closed_loop, infer_message
from services.scheduler.choice import ReplicaLoad
from services.scheduler.models import Model
from tests.services.engines import served
from tests.services.running import Serving

REPLICAS = (10, 100, 1000)
MANY = 16  # services used to measure the cost per service of an idle scheduler
CLIENTS = 8
POINTS = 200  # quantiles of the service times
FEWEST = 100  # inputs to measure them with, of which the first ones warm up
WARM_UP = 0.25  # share of the simulated requests

Figures = dict[str, Any]


def main() -> None:
    """Measure, simulate, or run the engine that answers at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("engine")
    measuring = verbs.add_parser("measure")
    measuring.add_argument("library", type=Path)
    measuring.add_argument("--data", required=True)
    measuring.add_argument("--composition", default="default")
    measuring.add_argument("--seconds", type=float, default=10.0)
    simulating = verbs.add_parser("simulate")
    simulating.add_argument("--trace", type=Path, required=True)
    simulating.add_argument("--figures", type=Path, required=True)
    simulating.add_argument("--requests", type=int, default=100_000)
    simulating.add_argument("--busy", type=float, nargs="+", default=[0.7, 0.9])
    for each in (measuring, simulating):
        each.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.verb == "engine":
        with served() as address:
            print(address, flush=True)
            sys.stdin.read()
        return
    found = measure(asked) if asked.verb == "measure" else simulate(asked)
    text = json.dumps(found, indent=1)
    print(text)
    if asked.json is not None:
        asked.json.write_text(text + "\n", encoding="utf-8")


# Measuring ----------------------------------------------------------------------------------------------


def measure(asked: argparse.Namespace) -> Figures:
    """Measure the cost of a request."""
    replica = replica_costs(asked.library, asked.composition, asked.data, asked.seconds)
    return {
        "scheduler": scheduler_costs(asked.seconds),
        "replica": replica,
        "choosing_us": {str(count): choosing_us(count) for count in (2, *REPLICAS)},
    }


def scheduler_costs(seconds: float) -> Figures:
    """Measure the scheduler's CPU time per request, and per idle service that it watches."""
    with instant_engine() as address, tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.toml"
        config.write_text(f'[models.m]\naddress = "{address}"\n', encoding="utf-8")
        with Serving(config, "--log-level", "error") as running:
            port = int(running.url.rpartition(":")[2])
            message = infer_message("m", np.zeros((1, 1), np.float32))
            asyncio.run(closed_loop(port, [message], 1.0, CLIENTS))
            began_s, began = cpu_s(running.process.pid), time.monotonic()
            replies = asyncio.run(closed_loop(port, [message], seconds, CLIENTS))
            used_s, took_s = cpu_s(running.process.pid) - began_s, time.monotonic() - began
            few = _idle_share(running, seconds)
        assert set(replies.statuses()) == {"200"}, replies.statuses()
        rows = (f'[models.m{number}]\naddress = "{address}"\n' for number in range(MANY))
        config.write_text("".join(rows), encoding="utf-8")
        with Serving(config, "--log-level", "error") as running:
            many = _idle_share(running, seconds)
    return {
        "request_cpu_ms": 1e3 * used_s / len(replies.rows),
        "requests_a_core_s": len(replies.rows) / used_s,
        "answered_per_s": len(replies.rows) / took_s,
        "watched_service_cpu_ms_per_s": 1e3 * (many - few) / (MANY - 1),
        "nothing_cpu_ms_per_s": 1e3 * few,
    }


def replica_costs(library: Path, composition: str, data: str, seconds: float) -> Figures:
    """Measure a replica's CPU time per request, and the distribution of an engine's times."""
    import torch

    import gati
    from gati.exploration.library import Library
    from gati.model.data import load_data
    from gati.model.preprocess import Preprocessing

    preprocessing = Preprocessing.from_json(Library.open(library).manifest.preprocessing)
    known = load_data(data, preprocessing, what="data")
    if len(known) < FEWEST:
        raise SystemExit(f"{data} has {len(known)} inputs: give at least {FEWEST}")
    inputs = known.images(range(min(1000, len(known))))
    torch.set_num_threads(1)
    engine = gati.load(library, composition=composition)
    times = []
    for index in range(len(inputs)):
        began_s = time.process_time()
        engine(inputs[index : index + 1])
        times.append(1e3 * (time.process_time() - began_s))
    times = times[50:]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.toml"
        config.write_text(
            f'[models.m]\nlibrary = "{library.absolute()}"\ncomposition = "{composition}"\n'
            f'state = "{folder}"\nthreads = 1\nworkers = 1\n',
            encoding="utf-8",
        )
        with Serving(config, "--log-level", "error") as running:
            messages = [infer_message("m", row[None]) for row in inputs.numpy()]
            pid, port = running.processes()["m"], int(running.url.rpartition(":")[2])
            asyncio.run(closed_loop(port, messages, 2.0, 2))
            began_s = cpu_s(pid)
            replies = asyncio.run(closed_loop(port, messages, seconds, 2))
            used_s = cpu_s(pid) - began_s
    return {
        "engine": engine.backend,
        "engine_cpu_ms": float(np.mean(times)),
        "request_cpu_ms": 1e3 * used_s / len(replies.rows),
        "requests_a_core_s": len(replies.rows) / used_s,
        "engine_cpu_quantiles_ms": np.quantile(times, np.linspace(0.0, 0.99, POINTS)).round(4).tolist(),
    }


def choosing_us(count: int, repetitions: int = 20_000) -> float:
    """Return the CPU time of choosing one of `count` replicas, in microseconds."""
    model = Model("m", host=lambda number: SimpleNamespace(hopeless=None), chance=random.Random(0))  # type: ignore[arg-type, return-value]
    model.replicas = tuple(
        SimpleNamespace(ready=True, number=number, load=ReplicaLoad())  # type: ignore[misc]
        for number in range(count)
    )
    for each in model.replicas:
        with each.load.asked(1):
            pass
    began_s = time.process_time()
    for _ in range(repetitions):
        model.dispatcher.choose(1)
    return 1e6 * (time.process_time() - began_s) / repetitions


@contextmanager
def instant_engine() -> Iterator[str]:
    """Start a service in another process that answers at once; yield its address."""
    command = [sys.executable, "-m", "benchmarks.capacity", "engine"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, including its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _idle_share(running: Serving, seconds: float) -> float:
    began_s, began = cpu_s(running.process.pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(running.process.pid) - began_s) / (time.monotonic() - began)


# Simulating ---------------------------------------------------------------------------------------------


def simulate(asked: argparse.Namespace) -> Figures:
    """Simulate waits, in mean service times, by number of replicas, arrivals, load and policy."""
    figures = json.loads(asked.figures.read_text(encoding="utf-8"))
    points = np.array(figures["replica"]["engine_cpu_quantiles_ms"])
    services = np.random.default_rng(0).choice(points / points.mean(), asked.requests)
    trace = read_arrivals(asked.trace)
    rows = []
    for replicas in REPLICAS:
        needed = schedulers_needed(figures, replicas, max(asked.busy))
        for busy in asked.busy:
            rate = busy * replicas
            ways = {
                "at random": poisson(rate, asked.requests),
                "trace": traced(trace, rate, asked.requests, copies=max(1, replicas // 10)),
            }
            for name, arrivals in ways.items():
                rows.append({"replicas": replicas, "busy": busy, "arrivals": name, "schedulers": needed})
                rows[-1] |= _waits(arrivals, services[: len(arrivals)], replicas, needed)
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return {"waits": "in mean service times: the mean, the 99th percentile", "rows": rows}


def schedulers_needed(figures: Figures, replicas: int, busy: float, fullest: float = 0.7) -> int:
    """Return how many schedulers, each using at most `fullest` of a core, `replicas` replicas need.

    Each scheduler has its own replicas, and watches only these.
    """
    rate = 1e3 * busy * replicas / figures["replica"]["request_cpu_ms"]
    used = rate * figures["scheduler"]["request_cpu_ms"] / 1e3
    watching = replicas * max(0.0, figures["scheduler"]["watched_service_cpu_ms_per_s"]) / 1e3
    return max(1, int(np.ceil((used + watching) / fullest)))


def _waits(arrivals: Any, services: Any, replicas: int, schedulers: int) -> Figures:
    many = min(schedulers, replicas)
    found = {
        "one queue": waits_s(arrivals, services, ONE_QUEUE, replicas),
        "two choices, one scheduler": waits_s(arrivals, services, TWO_CHOICES, replicas),
        "two choices, schedulers share replicas": waits_s(
            arrivals, services, TWO_CHOICES, replicas, schedulers=many
        ),
        "two choices, each scheduler its own": _apart(arrivals, services, replicas, many),
        "random": waits_s(arrivals, services, RANDOM, replicas),
    }
    warm = {name: waits[int(WARM_UP * len(waits)) :] for name, waits in found.items()}
    return {
        name: [round(float(np.mean(waits)), 3), round(float(np.quantile(waits, 0.99)), 2)]
        for name, waits in warm.items()
    }


def _apart(arrivals: Any, services: Any, replicas: int, schedulers: int) -> Any:
    """Return waits in order of arrival; schedulers take requests round-robin and have their own replicas."""
    waits = np.empty(len(arrivals))
    for number, own in enumerate(np.array_split(np.arange(replicas), schedulers)):
        turn = slice(number, None, schedulers)
        waits[turn] = waits_s(arrivals[turn], services[turn], TWO_CHOICES, len(own), seed=number)
    return waits


if __name__ == "__main__":
    main()
