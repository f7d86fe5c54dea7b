"""Compare our exits with the published variants: same block, batches and number of steps."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import gati
from gati.caches import PUBLISHED_VARIANTS
from gati.exploration.progress import open_progress

OURS = (
    "grid(256)",
    "pyramid(32)",
    "pyramid(64)",
    "pool-linear(8192)",
    "pool-linear(4096)",
    "conv2d(3,1)",
    "conv2d(5,2)",
)


def main() -> int:
    """Train, measure, and print one JSON document: one row per block and variant, ours and published."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/predictors"))
    parser.add_argument("--blocks", default="layer1.4,layer2.0,layer3.0")
    parser.add_argument("--epochs", type=float, default=2.0)
    arguments = parser.parse_args()
    images = arguments.data / "cifar10"
    if not (images / "cifar10_val.npz").is_file():
        print(f"error: no cifar10/cifar10_val.npz in {arguments.data}; give --data FOLDER", file=sys.stderr)
        return 2
    library = gati.explore(
        "gati.zoo:resnet56",
        arguments.data / "checkpoints" / "resnet56-4bfd9763.th",
        data=str(images / "cifar10_val.npz"),
        train_data=str(images / "cifar10_train.npz"),
        out=arguments.out,
        blocks=arguments.blocks,
        variants=[*OURS, "published"],
        epochs=arguments.epochs,
        progress=open_progress(),
    )
    base_ms = library.manifest.profile.base_ms
    trained = [trial for trial in library.trials if trial.status == "trained"]
    rows = [
        {
            "block": trial.block,
            "variant": trial.variant,
            "published": trial.variant in PUBLISHED_VARIANTS,
            "lookup_share": round((trial.lookup_ms or 0) / base_ms, 4),
            "agreement": round(trial.agreement or 0, 4),
            "hit_rate_at_97": round(trial.hit_rate_at_97 or 0, 4),
            "hit_rate_at_99": round(trial.hit_rate_at_99 or 0, 4),
        }
        for trial in trained
    ]
    rows.sort(key=lambda row: (str(row["block"]), float(row["lookup_share"])))
    print(json.dumps({"images_per_variant": trained[0].images_seen, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
