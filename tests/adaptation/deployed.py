"""A trained network with caches trained on some digits only, and streams of digits."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gati.adaptation.tune import Lesson, TuneRecipe, train_new
from gati.adaptation.window import Window
from gati.caches import LearnedCache, save_cache
from gati.composition.composition import Composition, Exit, Expected
from gati.composition.load import Served, open_served
from gati.composition.walk import certify
from gati.exploration.library import Library, Manifest
from gati.model.entry import INPUT
from gati.model.load import load_model
from gati.model.preprocess import Preprocessing
from gati.model.segments import TracedModel, trace
from gati.types import BlockProfile, Profile, TrialId
from tests.exploration.networks import digits, trained_state

SOURCE = Path(__file__).resolve().parent.parent / "exploration" / "networks.py"
BLOCKS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
CLASSES = 10
BASE_MS = 2.0  # what the composition expects of the network alone
FAMILIAR, STRANGE = (0, 1, 2, 3, 4), (5, 6, 7, 8, 9)
VARIANT = "pool-linear(64)"
CERTIFICATE = certify([(20, 1000)], 0.95, 0.05)


def stream(shown: tuple[int, ...], count: int, seed: int, *, unseen: bool = False) -> Tensor:
    """`count` inputs [n, 1, 8, 8] of those digits, a little noisy; `unseen` takes scans of its own."""
    images, labels = digits()
    random = np.random.default_rng(seed)
    rows = np.flatnonzero(np.isin(labels, shown))
    rows = rows[rows % 3 == 0] if unseen else rows[rows % 3 > 0]
    x = (
        torch.from_numpy(images[random.choice(rows, count, replace=count > len(rows))])
        .permute(0, 3, 1, 2)
        .float()
        / 255
    )
    return x + torch.from_numpy(random.normal(0.0, 0.02, x.shape)).float()


def window_of(traced: TracedModel, inputs: Tensor) -> Window:
    """The inputs with the base model's answers, all counting alike."""
    with torch.no_grad():
        likely = traced.base(inputs.clone()).softmax(1)
    return Window(inputs, likely.argmax(1).numpy(), likely)


def even_profile(traced: TracedModel) -> Profile:
    """Not measured, so that nothing decided by it depends on the load: stem, blocks and head take as long."""
    kinds, shapes = traced.block_kinds, traced.hidden_shapes
    behind = [name for name in traced.blocks if name != INPUT]
    own_ms = {name: 0.0 if name == INPUT else BASE_MS / (len(behind) + 2) for name in traced.blocks}
    reach_ms = {name: (place + 2) * own_ms[name] for place, name in enumerate(behind)} | {INPUT: 0.0}
    blocks = (
        BlockProfile(at, name, kinds[name], shapes[name], own_ms[name], reach_ms[name])
        for at, name in enumerate(traced.blocks)
    )
    return Profile("torch", "cpu", 1, BASE_MS, tuple(blocks))


def make_deployed(
    folder: Path,
    *,
    variants: Mapping[str, str] | None = None,
) -> Served:
    """A library with caches trained on familiar digits, as `explore` and `compose` leave it.

    `variants` are theirs by block, in forward order; two after blocks unless given.
    """
    variants = variants or {BLOCKS[1]: VARIANT, BLOCKS[2]: VARIANT}
    places = (*(block for block in variants if block == INPUT), *BLOCKS)
    checkpoint = folder / "weights.safetensors"
    save_file(trained_state(), checkpoint)
    loaded = load_model(f"{SOURCE}:Net", checkpoint)
    traced = trace(loaded.module.eval(), torch.rand(2, 1, 8, 8), places)
    library = Library(folder / "library")
    library.write_manifest(
        Manifest(
            model_source=f"{SOURCE}:Net",
            checkpoint_path=str(checkpoint),
            checkpoint_sha256=loaded.checkpoint_sha256,
            preprocessing=Preprocessing(mean=(0.0,), std=(1.0,), channels=1).to_json(),
            class_names=None,
            classes=CLASSES,
            outputs_kind="logits",
            input_shape=(1, 8, 8),
            profile=even_profile(traced),
            seed=0,
            counts={},
            data={},
            settings={},
            versions={},
            complete=True,
        )
    )
    exits = []
    for block, variant in variants.items():
        index, shape = places.index(block), traced.hidden_shapes[block]
        predictor = _trained(traced, block, variant)
        cache = LearnedCache(variant, shape, CLASSES, "maximum-probability", predictor=predictor)
        trial_id = TrialId(f"trial-{index}")
        save_cache(library.cache_path(trial_id), cache)
        exits.append(
            Exit(trial_id, block, index, variant, "maximum-probability", 0.6, "inline", 0.4,
                 0.99, 0.1, cache.memory_bytes, 0.2 + 0.6 * index)
        )  # fmt: skip
    Composition(
        name="default", objective="exact", solver="highs", gap=0.0, alpha=None, accuracy_target=0.95,
        confidence=0.95, memory_limit_bytes=None, backend="torch", placement="inline", exits=tuple(exits),
        expected=Expected(1.0, BASE_MS, 2.0, 0.8, 0.99, 2000), certificate=CERTIFICATE,
        checkpoint_sha256=loaded.checkpoint_sha256, created="2026-01-01T00:00:00Z",
    ).save(library.composition_path())  # fmt: skip
    return open_served(library.directory)


_TRAINED: dict[tuple[str, str], nn.Module] = {}


def _trained(traced: TracedModel, block: str, variant: str) -> nn.Module:
    """A predictor trained on familiar digits, once in a process: the network is always the same."""
    if (block, variant) not in _TRAINED:
        familiar = window_of(traced, stream(FAMILIAR, 600, seed=1)).collected(traced, (block,))
        lesson = Lesson(familiar.hidden[block], familiar.teacher(CLASSES), torch.ones(600))
        recipe = TuneRecipe(epochs=20.0, limit_s=600.0, learning_rate=3e-3)
        _TRAINED[block, variant] = train_new(variant, traced.hidden_shapes[block], lesson, recipe, seed=0)
    return copy.deepcopy(_TRAINED[block, variant])
