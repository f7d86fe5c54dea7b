"""Benefit, overhead and fault tolerance of replicas, local and on a multi-node Ray cluster on this machine.

    python -m benchmarks.ray_serving overhead          # REST, Thrift and engine, with and without Ray
    python -m benchmarks.ray_serving replicas [--ray]  # two replicas against one
    python -m benchmarks.ray_serving flood [--ray]     # two models, one of them flooded
    python -m benchmarks.ray_serving faults            # a replica killed, then a node, under 0.7 load
    python -m benchmarks.ray_serving grow              # replicas follow the load, down to none and back
    python -m benchmarks.ray_serving explore           # two nodes of one core against one

Each takes less than five minutes on two idle cores and prints JSON. Requests arrive at a fixed rate, whether
or not earlier ones are answered. Without LIBRARY, a small network with random weights is served.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving import Replies, closed_loop, infer_message, open_loop, overhead
from tests.services.clusters import MODEL, Replicated, on_ray, on_this_machine
from tests.services.running import make_folder
from tests.waiting import until

OTHER = "other"
REFUSALS = (429, 503, 504)
FAULT_AT = (0.25, 0.6)  # share of the run: a replica fails, then a node
LEAST_SLO_MS = 50.0
SLO_FACTOR = 4.0  # times the undisturbed p99, since other programs run, too

Figures = dict[str, Any]


class Served:
    """A library in a folder, with a configuration and requests for it."""

    def __init__(self, folder: Path, asked: argparse.Namespace) -> None:
        self.folder = folder
        self._inputs_each: int = asked.inputs
        if asked.library is None:
            make_folder(folder)
            self.inputs = np.random.default_rng(0).random((200, 1, 6, 6), dtype=np.float32)
            self._of = 'library = "library"\n'
        else:
            self.inputs = _inputs(asked.library, asked.data)
            (folder / MODEL).symlink_to(asked.library.absolute())
            self._of = f'library = "{MODEL}"\ncomposition = "{asked.composition}"\n'

    def configuration(self, settings: str = "replicas = 2", other: str | None = None) -> Path:
        """Write a configuration with the model, and optionally another one from the same library."""
        each = f'{self._of}threads = 1\nworkers = 1\nstate = "state"\n'
        text = f"[models.{MODEL}]\n{each}{settings}\n"
        if other is not None:
            text += f"[models.{OTHER}]\n{each}{other}\n"
        file = self.folder / "benchmark.toml"
        file.write_text(text, encoding="utf-8")
        return file

    def messages(self, model: str = MODEL, slo_ms: float | None = None) -> list[bytes]:
        """Return requests with `--inputs` inputs each."""
        each = self._inputs_each
        starts = range(0, len(self.inputs) - each + 1, each)
        return [infer_message(model, self.inputs[start : start + each], slo_ms) for start in starts]


def _inputs(library: Path, data: str) -> Any:
    from gati.exploration.library import Library
    from gati.model.data import load_data
    from gati.model.preprocess import Preprocessing

    preprocessing = Preprocessing.from_json(Library.open(library).manifest.preprocessing)
    return load_data(data, preprocessing, what="data").images(list(range(200))).numpy()


def port_of(running: Replicated) -> int:
    """Return the port it listens on."""
    return int(running.serving.url.rpartition(":")[2])


def capacity(running: Replicated, messages: list[bytes], clients: int, seconds: float = 4.0) -> float:
    """Return answers per second with `clients` clients that each send the next request at once."""
    asyncio.run(closed_loop(port_of(running), messages, 1.0, clients))
    replies = asyncio.run(closed_loop(port_of(running), messages, seconds, clients))
    return replies.statuses().get("200", 0) / seconds


def load(running: Replicated, messages: list[bytes], rate: float, seconds: float) -> Replies:
    """Send random requests at `rate` per second."""
    return load_at(port_of(running), messages, rate, seconds)


def load_at(port: int, messages: list[bytes], rate: float, seconds: float) -> Replies:
    """Same as `load`, for a port."""
    return asyncio.run(open_loop(port, messages, rate, seconds))


def outcome(replies: Replies, slo_ms: float | None = None) -> Figures:
    """Summarise replies. `unexplained` requests were neither answered nor refused with a reason."""
    count = len(replies.rows)
    refused = sum(row[2] in REFUSALS for row in replies.rows)
    answered = replies.latencies_ms()
    found = {
        "requests": count,
        "statuses": replies.statuses(),
        "refused": refused / max(1, count),
        "unexplained": count - refused - len(answered),
        "reasons": dict(_reasons(replies).most_common(4)),
        "p50_ms": float(np.median(answered)) if len(answered) else None,
        "p99_ms": float(np.quantile(answered, 0.99)) if len(answered) else None,
    }
    if slo_ms is not None:
        found["in_time"] = float(np.sum(answered <= slo_ms)) / max(1, count)
    return found


def _reasons(replies: Replies) -> Counter[str]:
    """Count the reasons of refusals, ignoring numbers in them."""
    found: Counter[str] = Counter()
    for reason, count in replies.reasons.items():
        found[re.sub(r"\d+(\.\d+)?", "N", reason)] += count
    return found


# Sub-commands -------------------------------------------------------------------------------------------


def run_overhead(served: Served, asked: argparse.Namespace) -> Figures:
    """Time the same requests with the engine in this process and over REST, without and with Ray."""
    library = served.folder / MODEL
    file = served.configuration("")
    found = {}
    names = {"name": MODEL, "composition": asked.composition}
    for where, place in (("processes", on_this_machine), ("ray", on_ray)):
        with place(file) as running:
            found[where] = asyncio.run(overhead(port_of(running), library, served.inputs, None, **names))
    return found


def run_replicas(served: Served, asked: argparse.Namespace) -> Figures:
    """Measure requests per second of one replica and of two, each with one thread."""
    place = on_ray if asked.ray else on_this_machine
    messages = served.messages()
    with place(served.configuration("replicas = 1")) as running:
        one = capacity(running, messages, clients=4)
    with place(served.configuration("replicas = 2")) as running:
        two = capacity(running, messages, clients=8)
        wanted = served.messages(slo_ms=20.0 * 1e3 / one)
        bounded = load(running, wanted, 2.0 * one, asked.seconds or 20.0)
    answered = len(bounded.latencies_ms()) / (asked.seconds or 20.0)
    return {
        "one_per_s": one,
        "two_per_s": two,
        "two_over_one": two / one,
        "two_over_one_at_twice_the_rate": answered / one,
        "at_twice_the_rate": outcome(bounded),
        "cores": os.cpu_count(),
    }


def run_flood(served: Served, asked: argparse.Namespace) -> Figures:
    """Load one model with three times its capacity and another with a fifth of that, each with an SLO."""
    place = on_ray if asked.ray else on_this_machine
    seconds = asked.seconds or 30.0
    with place(served.configuration("queue_capacity = 32", other="queue_capacity = 32")) as running:
        able = capacity(running, served.messages(), clients=4)
        quiet = load(running, served.messages(OTHER), 0.2 * able, 5.0)
        slo_ms = max(LEAST_SLO_MS, SLO_FACTOR * float(np.quantile(quiet.latencies_ms(), 0.99)))
        alone = load(running, served.messages(OTHER, slo_ms), 0.2 * able, 5.0)
        # In a separate process: the flooding client would delay this one's measurements.
        with ProcessPoolExecutor(1, get_context("spawn")) as neighbour:
            neighbour.submit(os.getpid).result()
            port, wanted = port_of(running), served.messages(OTHER, slo_ms)
            asking = neighbour.submit(load_at, port, wanted, 0.2 * able, seconds)
            flooded = load(running, served.messages(MODEL, slo_ms), 3.0 * able, seconds)
            spared = asking.result()
    return {
        "capacity_per_s": able,
        "slo_ms": slo_ms,
        "alone": outcome(alone, slo_ms),
        "flooded": outcome(flooded, slo_ms),
        "spared": outcome(spared, slo_ms),
    }


def run_faults(served: Served, asked: argparse.Namespace) -> Figures:
    """Kill a replica and then a node, under 0.7 times the capacity of two replicas."""
    seconds = asked.seconds or 60.0
    with on_ray(served.configuration("replicas = 2\nspare = true")) as running:
        running.wait_for_all()
        able = capacity(running, served.messages(), clients=8)
        faults: Figures = {}

        def harm() -> None:
            began_s = time.monotonic()
            for at, name, fault in (
                (FAULT_AT[0], "replica", lambda: os.kill(running.processes()[f"{MODEL}@1"], 9)),
                (FAULT_AT[1], "node", running.lose_a_node),
            ):
                time.sleep(max(0.0, began_s + at * seconds - time.monotonic()))
                faults[name] = _recovered_after_s(running, fault)

        harming = threading.Thread(target=harm)
        harming.start()
        replies = load(running, served.messages(), 0.7 * able, seconds)
        harming.join()
    return {"capacity_per_s": able, "load": outcome(replies), "recovered_after_s": faults}


def run_grow(served: Served, asked: argparse.Namespace) -> Figures:
    """Send three times the capacity of one replica, then a tenth of it, then nothing, then one request."""
    settings = "replicas_min = 0\nreplicas_max = 2\nreplicas_delay_ms = 20\nreplicas_cooldown_s = 5"
    with on_this_machine(served.configuration(f"{settings}\nreplicas_idle_s = 5")) as running:
        able = capacity(running, served.messages(), clients=1)
        seconds = asked.seconds or 30.0
        with _watched(running) as seen:
            heavy = load(running, served.messages(), 3.0 * able, seconds)
            easy = load(running, served.messages(), 0.1 * able, seconds)
            until(lambda: running.counted("gati_asleep", MODEL) == 1.0)
            woken = load(running, served.messages()[:1], 1.0, 5.0)
    return {
        "capacity_per_s": able,
        "replicas_by_second": seen,
        "heavy": outcome(heavy),
        "easy": outcome(easy),
        "woken": outcome(woken),
    }


def run_explore(served: Served, asked: argparse.Namespace) -> Figures:
    """Run the same exploration on one and on two single-core nodes, and check that the weights are equal."""
    import torch
    from safetensors.torch import save_file

    import gati
    from gati.zoo import PRESETS, resnet56

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    torch.manual_seed(0)
    held, more = (_coloured_squares(served.folder / f"{count}.npz", count) for count in (400, 2000))
    network = resnet56()
    with np.load(held) as arrays:
        images = PRESETS[resnet56](arrays["images"])
    with torch.no_grad():  # random weights predict one class unless normalisation and biases are set
        for _ in range(20):
            network(images)
        network.linear.bias -= network.eval()(images).mean(0)
    save_file(network.state_dict(), served.folder / "net.safetensors")
    node = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **node})
    took: dict[int, float] = {}
    weights: dict[int, dict[str, bytes]] = {}
    try:
        for workers in (1, 2):
            cluster.add_node(num_cpus=1, **node)
            out = served.folder / f"explored{workers}"
            began_s = time.monotonic()
            gati.explore(
                "gati.zoo:resnet56",
                checkpoint=served.folder / "net.safetensors",
                data=str(held),
                train_data=str(more),
                variants=("student(24)", "student(28)", "student(32)", "student(36)"),
                epochs=asked.epochs,
                out=out,
                ray=cluster.address,
            )
            took[workers] = time.monotonic() - began_s
            weights[workers] = {path.name: path.read_bytes() for path in (out / "caches").iterdir()}
    finally:
        import ray

        ray.shutdown()
        cluster.shutdown()
    return {
        "seconds": took,
        "one_over_two": took[1] / took[2],
        "students": len(weights[1]),
        "same_weights": weights[1] == weights[2],
        "cores": os.cpu_count(),
    }


def _coloured_squares(path: Path, count: int) -> Path:
    """Pictures of 4 x 4 squares. What is learned does not matter here, and takes as long as anything else."""
    random = np.random.default_rng(count)
    colours = random.integers(0, 256, (count, 4, 4, 3), np.uint8)
    images = colours.repeat(8, axis=1).repeat(8, axis=2)
    np.savez(path, images=images, labels=random.integers(0, 10, count))
    return path


def _recovered_after_s(running: Replicated, fault: Callable[[], Any]) -> float:
    """Return the time from a fault until both replicas answer again."""
    began_s = time.monotonic()
    fault()
    until(lambda: any(each["state"] != "ready" for each in running.replicas()), every_s=0.01)
    running.wait_for_all()
    return time.monotonic() - began_s


@contextmanager
def _watched(running: Replicated) -> Iterator[list[str]]:
    """Record how many replicas are wanted and ready, once per second."""
    seen: list[str] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(1.0):
            states = Counter(each["state"] for each in running.replicas())
            seen.append("asleep" if states["asleep"] else f"{states['ready']} of {states.total()}")

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


RUNS = {
    "overhead": run_overhead,
    "replicas": run_replicas,
    "flood": run_flood,
    "faults": run_faults,
    "grow": run_grow,
    "explore": run_explore,
}


def main() -> None:
    """Run one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("library", type=Path, nargs="?")
    parser.add_argument("--data", help="inputs for LIBRARY")
    parser.add_argument("--inputs", type=int, default=1, help="inputs per request")
    parser.add_argument("--composition", default="default")
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--epochs", type=float, default=0.6)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="gati-", dir="/tmp") as folder:
        found = RUNS[asked.run](Served(Path(folder), asked), asked)
    text = json.dumps(found, indent=1)
    print(text)
    if asked.json is not None:
        asked.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
