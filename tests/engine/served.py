"""A cache library with untrained caches, composed and ready to be served."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from gati.caches import LearnedCache, save_cache
from gati.composition.composition import Composition, Exit, Expected
from gati.costs.profile import measure_profile
from gati.exploration.library import Library, Manifest
from gati.model.load import load_model
from gati.model.preprocess import Preprocessing
from gati.types import Profile, TrialId
from tests.engine.networks import BLOCKS, CLASSES, network, traced_network

SOURCE = Path(__file__).with_name("networks.py")
PREPROCESSING = Preprocessing(mean=(0.5,), std=(0.25,), channels=1)


def exit_at(index: int, threshold: float) -> Exit:
    return Exit(TrialId(f"trial-{index}"), BLOCKS[index], index, "pool-linear(64)", "maximum-probability",
                threshold, "inline", 0.3, 1.0, 0.1, 1000, 0.5)  # fmt: skip


def composed(sha256: str, exits: tuple[Exit, ...]) -> Composition:
    return Composition(
        name="default", objective="full", solver="highs", gap=0.0, alpha=None, accuracy_target=0.97,
        confidence=None, memory_limit_bytes=None, backend="torch", placement="inline", exits=exits,
        expected=Expected(1.0, 2.0, 2.0, 0.5, 0.99, 2000), certificate=None, checkpoint_sha256=sha256,
        created="2026-01-01T00:00:00Z",
    )  # fmt: skip


def images(count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (count, 6, 6, 1), dtype=np.uint8)


@cache
def _profile() -> Profile:
    return measure_profile(traced_network(), repetitions=2)


def make_served(tmp_path: Path) -> Path:
    """Write a cache library with two untrained caches, as `explore` and `compose` leave it."""
    checkpoint = tmp_path / "weights.safetensors"
    save_file(network(seed=5).state_dict(), checkpoint)
    source = f"{SOURCE}:Network"
    loaded = load_model(source, checkpoint)
    library = Library(tmp_path / "library")
    library.write_manifest(
        Manifest(
            model_source=source,
            checkpoint_path=str(checkpoint),
            checkpoint_sha256=loaded.checkpoint_sha256,
            preprocessing=PREPROCESSING.to_json(),
            class_names=("north", "east", "south", "west"),
            classes=CLASSES,
            outputs_kind="logits",
            input_shape=(1, 6, 6),
            profile=replace(_profile(), threads=torch.get_num_threads()),  # not those of an earlier test
            seed=0,
            counts={},
            data={},
            settings={},
            versions={},
            complete=True,
        )  # fmt: skip
    )
    torch.manual_seed(0)
    for index in (0, 1):
        cache = LearnedCache("pool-linear(64)", (8, 6, 6), CLASSES, "maximum-probability")
        save_cache(library.cache_path(TrialId(f"trial-{index}")), cache)
    composed(loaded.checkpoint_sha256, (exit_at(0, 0.3), exit_at(1, 0.0))).save(library.composition_path())
    return library.directory


def rewrite(directory: Path, **changes: Any) -> None:
    path = Library(directory).composition_path()
    replace(Composition.load(path), **changes).save(path)
