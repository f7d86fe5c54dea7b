"""Latency of requests while another version of their model is loaded again and again.

    python -m benchmarks.loading LIBRARY --data unseen.npz [--composition NAME] [--json FILE]

`gati serve` on one thread, `--rate` requests per second, whether or not earlier ones are answered. Quiet
phases and phases with loading alternate twice. Latency is counted from the time at which a request was due.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving import Connection, infer_message, message, open_loop, serving
from gati.composition.load import open_served
from gati.model.data import load_data

TURNS = 2
WARM_UP_S = 5.0
QUIET, LOADING = "nothing is loaded", "versions are loaded"
CONFIGURATION = """
[models.model]
library = "{library}"
composition = "{composition}"
threads = 1
state = "{folder}/state"
"""


async def measure(port: int, messages: list[bytes], asked: argparse.Namespace) -> dict[str, Any]:
    """Send requests in phases, and return percentiles of each kind of phase, and the number of loads."""
    taken_ms: dict[str, list[float]] = {QUIET: [], LOADING: []}
    loads = 0

    def loaded() -> None:
        nonlocal loads
        loads += 1

    await open_loop(port, messages, asked.rate, WARM_UP_S)
    for _ in range(TURNS):
        for phase, rows in taken_ms.items():
            loading = (
                asyncio.create_task(keep_loading(port, asked.composition, loaded))
                if phase is LOADING
                else None
            )
            replies = await open_loop(port, messages, asked.rate, asked.seconds / TURNS)
            if loading is not None:
                loading.cancel()
                await asyncio.wait([loading])
                await asyncio.sleep(1.0)  # a version may still be loading
            rows += [each[1] for each in replies.rows]
    found: dict[str, Any] = {"loads": loads}
    for phase, rows in taken_ms.items():
        p50, p90, p99 = np.percentile(rows, (50, 90, 99))
        found[phase] = {
            "n": len(rows), "p50_ms": round(p50, 2), "p90_ms": round(p90, 2), "p99_ms": round(p99, 2),
            "largest_ms": round(max(rows), 2),
        }  # fmt: skip
    return found


async def keep_loading(port: int, composition: str, loaded: Callable[[], None]) -> None:
    """Load the composition that serves, in place of itself, until cancelled."""
    body = json.dumps({"parameters": {"composition": composition}}).encode()
    request = message("/v2/repository/models/model/load", body, "Content-Type: application/json")
    async with Connection(port) as connection:
        while True:
            status, answer = await connection.ask(request)
            if status != 200:
                raise SystemExit(f"error: loading failed ({status}): {answer.decode()}")
            loaded()


def main() -> int:
    """Print percentiles as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--composition", default="default")
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each kind of phase")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    served = open_served(asked.library, composition=asked.composition, threads=1)
    images = load_data(str(asked.data), served.engine.preprocessing, what="requests").images(range(200))
    messages = [infer_message("model", x[None].numpy()) for x in images]
    with tempfile.TemporaryDirectory(prefix="gati-loading-") as folder:
        file = Path(folder, "serve.toml")
        file.write_text(
            CONFIGURATION.format(
                library=asked.library.resolve(), composition=asked.composition, folder=folder
            ),
            encoding="utf-8",
        )
        with serving(file) as port:
            found = asyncio.run(measure(port, messages, asked))
    print(json.dumps(found, indent=1))
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
