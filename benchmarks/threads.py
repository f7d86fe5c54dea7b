"""Cost of making engines thread-safe: request time with this code relative to an older version.

    python -m benchmarks.threads --before CHECKOUT [--network resnet56] [--backend openvino ...]

CHECKOUT is a working tree of an older commit (`git worktree add ../before COMMIT`). Without it, this tree
runs against itself, which shows how precisely ratios can be measured. Two processes with the same random
weights and exits, and one thread per request, alternate after a few requests in a row. `ratio` is the median
over turns of the ratio of medians, `low` and `high` are its quartiles, `least_ratio` is the ratio of minima.
`steps_us` is the minimum time of the protection steps alone, for machines too busy to measure a ratio;
`share` is `steps_us` relative to the minimum request time. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import timeit
from contextlib import nullcontext
from pathlib import Path
from statistics import median, quantiles
from typing import IO, Any

HERE = Path(__file__).resolve().parent.parent
PATHS = ("early", "miss", "base")  # exit at the first cache, at none, and the base model itself


def main() -> int:
    """Print one object per backend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--before", type=Path, default=HERE)
    parser.add_argument("--network", default="resnet56")
    parser.add_argument("--backend", nargs="+", default=["torch", "onnxruntime", "openvino", "openvino-bf16"])
    parser.add_argument("--turns", type=int, default=150)
    parser.add_argument("--requests", type=int, default=20, help="per turn; the first fifth is not counted")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return serve(arguments.network, arguments.worker, arguments.requests)
    found = [compare(arguments, backend) for backend in arguments.backend]
    json.dump(found, sys.stdout, indent=1)
    print()
    return 0


def compare(arguments: argparse.Namespace, backend: str) -> dict[str, Any]:
    """Return the ratios on one backend, by path of the request."""
    before, after = (start(arguments, backend, tree) for tree in (arguments.before, HERE))
    try:
        return {"network": arguments.network, "backend": backend, **turns(before, after, arguments.turns)}
    finally:
        for process in (before, after):
            process.communicate()


def turns(before: subprocess.Popen[str], after: subprocess.Popen[str], count: int) -> dict[str, Any]:
    """Alternate between the two processes, each going first equally often."""
    steps_us = protection_us()
    found: dict[str, Any] = {"steps_us": round(steps_us, 3)}
    for path in PATHS:
        times: dict[subprocess.Popen[str], list[float]] = {before: [], after: []}
        for turn in range(count):
            for process in (before, after) if turn % 2 else (after, before):
                times[process].append(ask(process, path))
        ratios = [own / other for own, other in zip(times[after], times[before], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        found[path] = {
            "ratio": round(middle, 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "share": round(1e-3 * steps_us / min(times[after]), 5),
            "least_ratio": round(min(times[after]) / min(times[before]), 4),
            "before_ms": round(median(times[before]), 4),
            "after_ms": round(median(times[after]), 4),
        }
    return found


def protection_us() -> float:
    """Return the microseconds of a slot taken and returned, an uncontended lock, and a null context."""
    idle, lock, nothing = [object()], threading.Lock(), nullcontext()

    def steps() -> None:
        with nothing:
            slot = idle.pop()
            if lock.acquire(blocking=False):
                lock.release()
            idle.append(slot)

    calls = 1_000
    return min(timeit.repeat(steps, number=calls, repeat=200)) / calls * 1e6


def start(arguments: argparse.Namespace, backend: str, tree: Path) -> subprocess.Popen[str]:
    """Start a process that times requests with the code of `tree`."""
    options = ["--network", arguments.network, "--worker", backend, "--requests", str(arguments.requests)]
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tree.resolve()), "OMP_NUM_THREADS": "1"},
    )
    if pipe(process.stdout).readline() != "ready\n":
        raise SystemExit(f"{tree} does not run backend {backend}")
    return process


def ask(process: subprocess.Popen[str], path: str) -> float:
    """Return the median milliseconds of one turn."""
    to = pipe(process.stdin)
    to.write(f"{path}\n")
    to.flush()
    return float(pipe(process.stdout).readline())


def pipe(end: IO[str] | None) -> IO[str]:
    """Return a pipe's end, which must exist."""
    if end is None:
        raise AssertionError("the process was started with pipes")
    return end


def serve(network: str, backend: str, requests: int) -> int:
    """Time a few requests for each input line, which names a path."""
    import torch

    from gati import zoo
    from gati.caches import build_predictor
    from gati.engine.engine import Engine
    from gati.engine.exits import EngineExit
    from gati.model.blocks import find_blocks
    from gati.model.segments import trace

    torch.manual_seed(0)
    module = getattr(zoo, network)().eval().requires_grad_(False)
    x = torch.randn(2, 3, 32, 32)
    names = find_blocks(module)
    traced = trace(module, x, names)
    chosen = [names[len(names) * part // 3] for part in (1, 2)]

    class Sure(torch.nn.Module):
        """A learned cache without a selector: the score is the largest probability."""

        def __init__(self, block: str) -> None:
            super().__init__()
            self.predictor = build_predictor("pool(1024)", traced.hidden_shapes[block], traced.classes)

        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            probabilities = self.predictor(hidden).softmax(1)
            return probabilities, probabilities.amax(1)

    caches = [Sure(block).eval().requires_grad_(False) for block in chosen]
    calls = {}
    for path, threshold in (("early", -1.0), ("miss", 2.0)):
        exits = [EngineExit(block, cache, threshold) for block, cache in zip(chosen, caches, strict=True)]
        calls[path] = Engine(traced, exits, backend=backend)
    asks = {**calls, "base": calls["miss"].base}
    request = x[:1]
    for call in asks.values():
        for _ in range(50):
            call(request)
    print("ready", flush=True)
    for line in sys.stdin:
        call = asks[line.strip()]
        times = []
        for _ in range(requests):
            begin = time.perf_counter_ns()
            call(request)
            times.append((time.perf_counter_ns() - begin) / 1e6)
        print(median(times[requests // 5 :]), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
