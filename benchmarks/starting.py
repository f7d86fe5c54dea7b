"""Start-up cost: CPU and wall seconds until the first answer, in new processes.

    python -m benchmarks.starting LIBRARY [--composition NAME] [--against CHECKOUT] [--repetitions 5]

`load` is `gati.load` and one answer; `service` is what a `gati serve` process does until its model is warm.
With `--against`, another checkout of Gati alternates with this one. Prints JSON with the minimum over
repetitions, since other work on the machine only adds to it. `heavy` lists the slow packages imported.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HEAVY = ("torch._dynamo", "torch._inductor", "torch.export", "sympy", "onnx", "onnxscript", "pandas", "scipy")
_LOAD = """
import gati
engine = gati.load(LIBRARY, composition=COMPOSITION)
engine(engine.traced.example())
"""
_SERVICE = """
import services.inference.__main__
from services.inference.opening import Opener
from services.inference.settings import InferenceSettings
settings = InferenceSettings(name="started", library=LIBRARY, composition=COMPOSITION, threads=1)
opened = Opener(settings).open(COMPOSITION, None)
"""
_END = """
import os, resource, sys
used = resource.getrusage(resource.RUSAGE_SELF)
heavy = [name for name in HEAVY if name in sys.modules]
print(used.ru_utime + used.ru_stime, used.ru_maxrss, *heavy, flush=True)
os._exit(0)
"""
PROGRAMS = {"load": _LOAD, "service": _SERVICE}


def main() -> int:
    """Print one object per checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--composition", default="default")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    checkouts = {"here": Path(__file__).resolve().parent.parent}
    if arguments.against is not None:
        checkouts["against"] = arguments.against.resolve()
    library = str(arguments.library.resolve())
    found: dict[str, dict[str, dict[str, object]]] = {name: {} for name in checkouts}
    for _ in range(arguments.repetitions):
        for what in PROGRAMS:
            for name, checkout in checkouts.items():
                keep_least(
                    found[name].setdefault(what, {}), started(what, library, arguments.composition, checkout)
                )
    json.dump(found, sys.stdout, indent=1)
    print()
    return 0


def started(what: str, library: str, composition: str, checkout: Path) -> dict[str, object]:
    """Start one process, wait for its answer, and return the cost."""
    said = f"LIBRARY, COMPOSITION, HEAVY = {library!r}, {composition!r}, {HEAVY!r}\n"
    began_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-P", "-c", said + PROGRAMS[what] + _END],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    elapsed_s = time.perf_counter() - began_s
    processor_s, memory_kib, *heavy = done.stdout.split()
    return {
        "processor_s": round(float(processor_s), 2),
        "elapsed_s": round(elapsed_s, 2),
        "memory_mib": int(memory_kib) // 1024,
        "heavy": heavy,
    }


def keep_least(kept: dict[str, object], measured: dict[str, object]) -> None:
    """Update `kept` with smaller numbers."""
    for name, value in measured.items():
        before = kept.get(name)
        if not (isinstance(before, (int, float)) and isinstance(value, (int, float)) and before <= value):
            kept[name] = value


if __name__ == "__main__":
    raise SystemExit(main())
