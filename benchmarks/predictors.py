"""Every default and every published variant side by side: same block, batches and number of steps."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

from gati.caches import PUBLISHED_VARIANTS, expand_variants
from gati.explore.library import BaseOutcomes, Library
from gati.explore.prepare import prepare
from gati.explore.progress import open_progress
from gati.explore.rounds import Rounds
from gati.explore.schedule import Plan
from gati.explore.state import RunState
from gati.model.load import load_model


def main() -> int:
    """Train, measure, and print one JSON document: a row a variant a block, ours and the published."""
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
    arguments.out.mkdir(parents=True, exist_ok=True)
    loaded = load_model("gati.zoo:resnet56", arguments.data / "checkpoints" / "resnet56-4bfd9763.th")
    library, state = Library(arguments.out), RunState(arguments.out)
    state.clear()
    with open_progress() as progress:
        prepared = prepare(
            loaded,
            str(images / "cifar10_val.npz"),
            str(images / "cifar10_train.npz"),
            blocks=arguments.blocks,
            variants=expand_variants(["default", "published"]),
            device=torch.device("cpu"),
            seed=0,
            state=state,
            progress=progress,
        )
        split = prepared.inputs.split
        library.write_base_outcomes(BaseOutcomes(prepared.held_out.base_class, None, split))
        steps = round(arguments.epochs * len(prepared.inputs.train) / 128)
        plan = Plan(batch_size=128, screening_steps=steps, main_steps=0, main_blocks=0)
        # One round is enough here: all variants get the same training, none is preferred.
        Rounds(prepared, library, state, plan, seed=0, progress=progress, budget_s=None).screen()
    rows = [
        {
            "block": row.trial.block,
            "variant": row.trial.variant,
            "published": row.trial.variant in PUBLISHED_VARIANTS,
            "lookup_share": round((row.trial.lookup_ms or 0) / prepared.profile.base_ms, 4),
            "agreement": round(row.trial.agreement or 0, 4),
            "hit_rate_at_97": round(row.trial.hit_rate_at_97 or 0, 4),
            "hit_rate_at_99": round(row.trial.hit_rate_at_99 or 0, 4),
        }
        for row in state.finished().values()
    ]
    rows.sort(key=lambda row: (str(row["block"]), float(np.round(row["lookup_share"], 4))))
    print(json.dumps({"images_per_variant": steps * 128, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
