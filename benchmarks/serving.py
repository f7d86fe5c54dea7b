"""Serving overhead and behaviour under overload: `gati serve` with real processes and sockets.

    python -m benchmarks.serving LIBRARY --data unseen.npz [--pipeline pipeline.toml] [--seconds 60]

Overhead: one client sends one input at a time; the same inputs go to the engine in this process, over REST
and, with a pipeline, through the planner. The engine in this process uses one thread, like the service's
workers. Overload: requests arrive at the service's capacity, then at 1.5 times that rate, each with a latency
SLO. Everything, including the clients, runs on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

CLIENTS = 16
REPETITIONS = 600
HOST = "127.0.0.1"

Floats = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Replies:
    """Replies to a load: (time sent, latency in ms, status), and the reasons of refusals."""

    rows: list[tuple[float, float, int]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def statuses(self) -> dict[str, int]:
        """Return the number of replies per status."""
        return {str(status): count for status, count in Counter(row[2] for row in self.rows).items()}

    def latencies_ms(self, status: int = 200) -> Floats:
        """Return latencies of the replies with that status."""
        return np.array([row[1] for row in self.rows if row[2] == status])


@contextmanager
def serving(target: Path) -> Iterator[int]:
    """Run `gati serve` on a free port until the block ends."""
    options = ["--port", "0", "--log-level", "error"]
    command = [sys.executable, "-P", "-m", "gati", "serve", str(target), *options]
    ours = os.pathsep.join((str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": ours.rstrip(os.pathsep)}  # this code, whatever is installed
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.search(r"http://[^:]+:(\d+)", line):
                yield int(match[1])
                return
        raise SystemExit("gati serve did not start")
    finally:
        process.terminate()
        process.wait(30)


def message(path: str, body: bytes, *headers: str) -> bytes:
    """Return the bytes of an HTTP request."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {HOST}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def infer_message(name: str, x: Floats, slo_ms: float | None = None) -> bytes:
    """Return an Open Inference Protocol request with a binary tensor."""
    data = x.tobytes()
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "input",
                    "shape": list(x.shape),
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": len(data)},
                }
            ],
            "outputs": [{"name": "class_index"}],
            "parameters": {} if slo_ms is None else {"latency_slo_ms": slo_ms},
        }
    ).encode()
    return message(f"/v2/models/{name}/infer", head + data, f"Inference-Header-Content-Length: {len(head)}")


class Connection:
    """A minimal client with one keep-alive connection; `ends` is set if the server closes it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.ends = False

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection(HOST, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Return status and body."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        assert length is not None
        self.ends = b"connection: close" in head.lower()
        return int(head[9:12]), await self._reader.readexactly(int(length[1]))


# Overhead -----------------------------------------------------------------------------------------------


async def overhead(
    port: int,
    library: Path,
    inputs: Floats,
    pipeline: str | None,
    *,
    name: str | None = None,
    composition: str = "default",
) -> dict[str, Any]:
    """Return latencies of the same inputs over every path, alternately. `name` defaults to the library's."""
    import torch

    import gati
    from services.config_files import folder_name

    name = name or folder_name(library)
    torch.set_num_threads(1)
    engine = gati.load(library, composition=composition)
    rows = [inputs[index : index + 1] for index in range(len(inputs))]
    tensors = [torch.from_numpy(row) for row in rows]
    messages = [infer_message(name, row) for row in rows]
    ways = ["engine", "REST", "inside the scheduler", "inside the service"]
    ways += [] if pipeline is None else ["pipeline, in all", "pipeline, outside its models"]
    found: dict[str, list[float]] = {way: [] for way in ways}
    async with Connection(port) as connection:
        for index in range(REPETITIONS + 50):
            place = index % len(rows)
            began = time.perf_counter()
            engine(tensors[place])
            engine_ms = 1e3 * (time.perf_counter() - began)
            began = time.perf_counter()
            status, body = await connection.ask(messages[place])
            rest_ms = 1e3 * (time.perf_counter() - began)
            assert status == 200, body
            if index < 50:
                continue
            parameters = json.loads(body)["parameters"]
            found["engine"].append(engine_ms)
            found["REST"].append(rest_ms)
            found["inside the scheduler"].append(parameters["latency_ms"])
            found["inside the service"].append(parameters["service_ms"])
            if pipeline is not None:
                await _through(connection, pipeline, rows[place], found)
    return {way: _summary(times) for way, times in found.items()} | {
        "REST - engine, request by request": _summary(list(np.subtract(found["REST"], found["engine"])))
    }


async def _through(connection: Connection, pipeline: str, row: Floats, found: dict[str, list[float]]) -> None:
    path = f"/v1/pipelines/{pipeline}/query".encode()
    request = infer_message("x", row, 200.0).replace(b"/v2/models/x/infer", path)
    began = time.perf_counter()
    status, body = await connection.ask(request)
    took_ms = 1e3 * (time.perf_counter() - began)
    assert status == 200, body
    inside = sum(stage["service_ms"] for stage in json.loads(body)["stages"])
    found["pipeline, in all"].append(took_ms)
    found["pipeline, outside its models"].append(took_ms - inside)


# Overload -----------------------------------------------------------------------------------------------


async def closed_loop(port: int, messages: list[bytes], seconds: float, clients: int = CLIENTS) -> Replies:
    """Run clients that each send the next request as soon as they have an answer."""
    replies = Replies()
    until = time.monotonic() + seconds

    async def client(first: int) -> None:
        async with Connection(port) as connection:
            for index in itertools.count(first):
                began = time.monotonic()
                if began > until:
                    return
                status, _ = await connection.ask(messages[index % len(messages)])
                replies.rows.append((began, 1e3 * (time.monotonic() - began), status))

    await asyncio.gather(*(client(start) for start in range(clients)))
    return replies


async def open_loop(
    port: int,
    messages: list[bytes],
    rate: float,
    seconds: float,
    watch: Callable[[], None] | None = None,
    *,
    heard: Callable[[int, float, bytes], None] | None = None,
    seed: int = 0,
) -> Replies:
    """Send random requests at `rate` per second, whether or not earlier ones are answered.

    `heard` is called with the number of each answered request, when it was due, and the body of its reply.
    """
    replies = Replies()
    idle: list[Connection] = []
    everything: list[Connection] = []
    dice = random.Random(seed)

    async def ask(index: int, due: float) -> None:
        message, answer = messages[index % len(messages)], None
        while idle and answer is None:
            connection = idle.pop()
            with suppress(ConnectionError, asyncio.IncompleteReadError):  # the server needed its place
                answer = await connection.ask(message)
        if answer is None:
            connection = await Connection(port).__aenter__()
            everything.append(connection)
            answer = await connection.ask(message)
        status, body = answer
        replies.rows.append((due, 1e3 * (time.monotonic() - due), status))
        if status != 200:
            replies.reasons[str(json.loads(body)["error"])] += 1
        if heard is not None and status == 200:
            heard(index, due, body)
        if not connection.ends:
            idle.append(connection)

    began = due = time.monotonic()
    tasks = []
    watched = began
    for index in itertools.count():
        due += dice.expovariate(rate)
        if due > began + seconds:
            break
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(ask(index, time.monotonic())))
        if watch is not None and due - watched > 5.0:
            watched = due
            watch()
    done, hanging = await asyncio.wait(tasks, timeout=15.0)
    for connection in everything:
        await connection.__aexit__()
    for task in hanging:
        task.cancel()
        replies.rows.append((began, float("inf"), 0))
    for task in done:
        task.result()
    return replies


async def overload(port: int, name: str, inputs: Floats, seconds: float) -> dict[str, Any]:
    """Measure capacity, then 1.5 times that load with an SLO, then a light load again."""
    rows = [inputs[index : index + 1] for index in range(len(inputs))]
    plain = [infer_message(name, row) for row in rows]
    await closed_loop(port, plain, 2.0)
    measured = await closed_loop(port, plain, 5.0)
    capacity = len(measured.rows) / 5.0
    alone = await closed_loop(port, plain, 2.0, clients=1)
    slo_ms = max(20.0, 4.0 * float(np.quantile(alone.latencies_ms(), 0.99)))
    wanted = [infer_message(name, row, slo_ms) for row in rows]
    memory: list[int] = []
    loaded = await open_loop(port, wanted, 1.5 * capacity, seconds, lambda: memory.append(_resident(port)))
    ended = time.monotonic()
    after = await open_loop(port, wanted, 0.3 * capacity, 4.0)
    accepted = loaded.latencies_ms()
    later = [row for row in after.rows if row[0] > ended + 2.0]
    return {
        "capacity_per_s": capacity,
        "slo_ms": slo_ms,
        "offered_per_s": len(loaded.rows) / seconds,
        "statuses": loaded.statuses(),
        "answered_per_s": len(accepted) / seconds,
        "accepted_within_slo": float(np.mean(accepted <= slo_ms)),
        "accepted_ms": _summary(list(accepted)),
        "resident_mib": [round(each / 2**20) for each in memory],
        "after": {
            "statuses_from_2_s_on": {str(k): v for k, v in Counter(row[2] for row in later).items()},
            "p50_ms": float(np.median([row[1] for row in later])),
        },
        "alone_p50_ms": float(np.median(alone.latencies_ms())),
    }


def _resident(port: int) -> int:
    """Return the memory of all serving processes, found by their command lines."""
    lines = subprocess.run(["ps", "-eo", "rss,args"], capture_output=True, text=True, check=True).stdout
    ours = [line for line in lines.splitlines() if "services.inference" in line or "gati serve" in line]
    return 1024 * sum(int(line.split()[0]) for line in ours)


def _summary(times: list[float]) -> dict[str, float]:
    return {
        "mean": float(np.mean(times)),
        **{f"p{100 * q:.0f}": float(np.quantile(times, q)) for q in (0.5, 0.95, 0.99)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--pipeline", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    from gati.exploration.library import Library
    from gati.model.data import load_data
    from gati.model.preprocess import Preprocessing
    from services.config_files import folder_name

    preprocessing = Preprocessing.from_json(Library.open(asked.library).manifest.preprocessing)
    inputs = load_data(str(asked.data), preprocessing, what="data").images(list(range(2000))).numpy()
    name = folder_name(asked.library)
    document: dict[str, Any] = {}
    with serving(asked.library) as port:
        document["overhead_ms"] = asyncio.run(overhead(port, asked.library, inputs, None))
        document["overload"] = asyncio.run(overload(port, name, inputs, asked.seconds))
    if asked.pipeline is not None:
        import tomllib

        pipeline = tomllib.loads(asked.pipeline.read_text(encoding="utf-8"))["name"]
        config = asked.pipeline.with_suffix(".serve.toml")
        config.write_text(
            f'[models.{name}]\nlibrary = "{asked.library.absolute()}"\n'
            f'[pipelines.{pipeline}]\nfile = "{asked.pipeline.name}"\n',
            encoding="utf-8",
        )
        with serving(config) as port:
            document["pipeline_ms"] = asyncio.run(overhead(port, asked.library, inputs, pipeline))
        config.unlink()
    print(json.dumps(document, indent=1))
    if asked.json is not None:
        asked.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
