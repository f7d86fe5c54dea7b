"""CIFAR-10 ResNets with and without learned caches, on unseen images."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import gati
from gati.costs.hardware import cpu_name
from gati.errors import GatiError
from gati.exploration.progress import open_progress
from gati.units import parse_duration

CHECKPOINTS = {
    "resnet20": "resnet20-12fca82f.th",
    "resnet32": "resnet32-d509ac18.th",
    "resnet56": "resnet56-4bfd9763.th",
}
HELD_OUT_SHARE = 0.4
TARGETS = (0.97, 0.99)


def main() -> int:
    """Run the requested networks and print one JSON document to stdout; progress goes to stderr."""
    arguments = parse_arguments()
    if not (arguments.data / "cifar10" / "cifar10_val.npz").is_file():
        print(f"error: no cifar10/cifar10_val.npz in {arguments.data}; give --data FOLDER", file=sys.stderr)
        return 2
    budget_s = None if arguments.budget is None else parse_duration(arguments.budget)
    try:
        results = [measure(model, arguments.data, arguments.out, budget_s) for model in arguments.models]
    except GatiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print(json.dumps({"machine": machine(), "results": results}, indent=1))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"), help="folder for the libraries")
    parser.add_argument("--models", nargs="+", choices=CHECKPOINTS, default=list(CHECKPOINTS))
    parser.add_argument("--budget", help="for each explore, such as 20m")
    return parser.parse_args()


def measure(model: str, data: Path, out: Path, budget_s: float | None) -> dict[str, Any]:
    """Explore one network, then compose and evaluate it for each accuracy target."""
    known, unseen = split_validation(data / "cifar10" / "cifar10_val.npz", out)
    began_s = time.monotonic()
    library = gati.explore(
        f"gati.zoo:{model}",
        data / "checkpoints" / CHECKPOINTS[model],
        data=str(known),
        train_data=str(data / "cifar10" / "cifar10_train.npz"),
        out=out / model,
        variants=["default", "published"],
        budget_s=budget_s,
        progress=open_progress(),
    )
    print(f"{model} explored in {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    manifest = library.manifest
    return {
        "model": model,
        "blocks": len(manifest.blocks),
        "explore_minutes": round(manifest.explore_seconds / 60, 1),
        "peak_memory_gib": round(manifest.peak_memory_bytes / 2**30, 2),
        "evaluations": [compose_and_evaluate(library, unseen, target) for target in TARGETS],
    }


def compose_and_evaluate(library: gati.Library, unseen: Path, target: float) -> dict[str, Any]:
    """Return the numbers for one accuracy target, ratios first."""
    name = f"benchmark-{target:g}"
    began_s = time.monotonic()
    composition = gati.compose(library.directory, accuracy=target, backend="torch", name=name)
    compose_s = time.monotonic() - began_s
    measured = gati.evaluate(library.directory, str(unseen), composition=name)
    eager = measured.eager_latency_ms
    return {
        "accuracy_target": target,
        "gain": round(measured.gain, 3),
        "tail_ratio": round(measured.tail_ratio, 3),
        "eager_gain": None if eager is None else round(eager.mean / measured.latency_ms.mean, 3),
        "agreement": round(measured.agreement, 4),
        "hit_rate": round(measured.hit_rate, 4),
        "accuracy": measured.accuracy,
        "base_accuracy": measured.base_accuracy,
        "expected_gain": round(composition.expected.gain, 3),
        "objective": composition.objective,
        "placement": composition.placement,
        "n": measured.n,
        "base_latency_ms": measured.base_latency_ms.mean,
        "latency_ms": measured.latency_ms.mean,
        "memory_bytes": measured.memory_bytes,
        "compose_s": round(compose_s, 2),
        "exits": [{"block": one.block, "variant": one.variant, "hits": one.hits} for one in measured.exits],
    }


def split_validation(source: Path, out: Path) -> tuple[Path, Path]:
    """Write the part that Gati may see and the part used for evaluation, unless they exist."""
    paths = out / "known.npz", out / "unseen.npz"
    if not all(path.is_file() for path in paths):
        out.mkdir(parents=True, exist_ok=True)
        with np.load(source) as arrays:
            images, labels = arrays["images"], arrays["labels"]
        order = np.random.default_rng(0).permutation(len(images))
        cut = round(len(order) * (1 - HELD_OUT_SHARE))
        for path, chosen in zip(paths, (np.sort(order[:cut]), np.sort(order[cut:])), strict=True):
            np.savez(path, images=images[chosen], labels=labels[chosen])
    return paths


def machine() -> dict[str, Any]:
    """Describe the machine."""
    import os

    import torch

    return {
        "processor": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gati": gati.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
