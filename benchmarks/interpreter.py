"""Latency of requests while another thread of the process computes, by how often threads take turns.

    python -m benchmarks.interpreter [--network resnet56] [--requests 150] [--json FILE]

A request on the base model (backend torch, one thread) is due every 30 ms. A second thread of low priority
traces a network again and again (Python only, as when a version is opened), runs one, or trains one. Threads
take turns in the interpreter every 5 ms, Python's own interval, or as often as `take_turns_often` lets them.
The machine needs a core for each of the two threads.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gati import zoo
from gati.engine.threads import limit_threads, work_alongside
from gati.model.blocks import find_blocks
from gati.model.segments import trace
from gati.priority import take_turns_often

PERIOD_S = 0.03
LONGEST_S = 20.0  # of one row: with Python's interval, requests take more than a second
NICENESS = 10
SHAPE = (3, 32, 32)

Work = Callable[[], object]


def main() -> int:
    """Print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--network", default="resnet56")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    limit_threads(1)
    network = getattr(zoo, asked.network)
    module = network().eval().requires_grad_(False)
    x = torch.randn(1, *SHAPE)
    base = trace(module, torch.cat((x, x)), find_blocks(module)).base
    found = []
    for interval in ("5 ms", "often"):
        if interval == "often":
            take_turns_often()
        for what, work in works(network).items():
            row = {"meanwhile": what, "turns": interval, **latencies(base, x, work, asked.requests)}
            print(row, flush=True)
            found.append(row)
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def works(network: Callable[[], nn.Module]) -> dict[str, Work | None]:
    """What the second thread does."""
    fixed, trained, batch = network().eval(), network().train(), torch.randn(32, *SHAPE)

    def run() -> Tensor:
        with torch.inference_mode():
            found: Tensor = fixed(batch)
            return found

    return {
        "nothing": None,
        "a network is traced": lambda: torch.fx.symbolic_trace(fixed),
        "a network runs": run,
        "a network is trained": lambda: trained(batch).sum().backward(),
    }


def latencies(base: Callable[[Tensor], Any], x: Tensor, work: Work | None, requests: int) -> dict[str, float]:
    """Milliseconds of requests while `work` is done again and again in another thread."""
    stopped = threading.Event()

    def keep_working(done: Work) -> None:
        work_alongside(NICENESS)
        while not stopped.is_set():
            done()

    other = None if work is None else threading.Thread(target=keep_working, args=(work,))
    if other is not None:
        other.start()
    taken_ms, began_s = [], time.perf_counter()
    due_s = began_s
    with torch.inference_mode():
        while len(taken_ms) < requests and time.perf_counter() - began_s < LONGEST_S:
            due_s = max(due_s + PERIOD_S, time.perf_counter())
            time.sleep(max(0.0, due_s - time.perf_counter()))
            asked_s = time.perf_counter()
            base(x)
            taken_ms.append(1e3 * (time.perf_counter() - asked_s))
    stopped.set()
    if other is not None:
        other.join()
    p50, p99 = np.percentile(taken_ms, (50, 99))
    return {"n": len(taken_ms), "p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2)}


if __name__ == "__main__":
    sys.exit(main())
