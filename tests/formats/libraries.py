"""Cache libraries of the tiny networks: random caches, thresholds that let some inputs leave everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gati.caches import LearnedCache, save_cache
from gati.composition.composition import Composition, Exit, Expected
from gati.composition.walk import certify
from gati.engine.exits import EngineExit
from gati.engine.graph.stages import build_stages
from gati.exploration.library import Library, Manifest
from gati.model.load import load_model
from gati.model.preprocess import Preprocessing
from gati.model.segments import TracedModel, trace
from gati.types import BlockProfile, Profile, TrialId
from tests.formats import networks

SOURCE = Path(networks.__file__)
PREPROCESSING = Preprocessing(mean=(0.5, 0.4, 0.6), std=(0.25, 0.3, 0.2))
CLASS_NAMES = ("ant", "bee", "cat", "dog", "elk")
SHAPE = (3, 32, 32)
BLOCKS = {
    "resnet": ("layer1.0", "layer2.0", "layer3.0"),
    "mobilenet": ("blocks.0", "blocks.1", "blocks.2"),
    "vgg": ("blocks.0", "blocks.1", "blocks.2"),
    "vit": ("encoder.layers.0", "encoder.layers.1", "encoder.layers.2"),
}
CACHES = (("grid(16)", "network"), ("conv2d(3,1)", "margin"), ("pyramid(8)", "entropy"))
CERTIFICATE = certify([(3, 500)], 0.9, 0.05)


def images(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Noise of very different contrast: uint8 [N, 32, 32, 3]."""
    random = np.random.default_rng(seed)
    contrast = random.uniform(0.05, 1.0, (count, 1, 1, 1))
    bright = random.uniform(0.0, 1.0, (count, 1, 1, 3))
    pixels = 255 * (bright + contrast * (random.uniform(size=(count, 32, 32, 3)) - bright))
    return pixels.astype(np.uint8)


def make_library(
    folder: Path,
    kind: str,
    caches: tuple[tuple[str, str], ...] = CACHES,
    places: tuple[str, ...] | None = None,
) -> Path:
    """Write a library of the network `kind` with one cache a block and its composition.

    `places` are the blocks, those of `BLOCKS` unless given.
    """
    places = places or BLOCKS[kind]
    torch.manual_seed(0)
    source, checkpoint = f"{SOURCE}:{kind}", folder / f"{kind}.safetensors"
    module = getattr(networks, kind)().eval()
    head = module.head if hasattr(module, "head") else module.linear
    _spread(module, PREPROCESSING(images(60, seed=1)), head)
    save_file(module.state_dict(), checkpoint)
    loaded = load_model(source, checkpoint)
    traced = trace(loaded.module, torch.randn(2, *SHAPE), places)
    library = Library(folder / kind)
    blocks = tuple(
        BlockProfile(
            index, block, traced.block_kinds[block], traced.hidden_shapes[block], 0.1, 0.1 * (index + 1)
        )
        for index, block in enumerate(places)
    )
    outputs_kind = "probabilities" if kind == "vgg" else "logits"
    library.write_manifest(
        Manifest(
            model_source=source,
            checkpoint_path=str(checkpoint),
            checkpoint_sha256=loaded.checkpoint_sha256,
            preprocessing=PREPROCESSING.to_json(),
            class_names=CLASS_NAMES,
            classes=networks.CLASSES,
            outputs_kind=outputs_kind,
            input_shape=SHAPE,
            profile=Profile("torch", "cpu", 1, 1.0, blocks),
            seed=0,
            counts={},
            data={},
            settings={},
            versions={},
            complete=True,
        )
    )
    stage_inputs = [segment_output(traced, block.name) for block in blocks]
    exits = []
    for index, (variant, selector) in enumerate(caches):
        hidden_shape = traced.hidden_shapes[blocks[index].name]
        cache = LearnedCache(variant, hidden_shape, networks.CLASSES, selector)
        _spread(cache.predictor, stage_inputs[index])
        save_cache(library.cache_path(TrialId(f"trial-{index}")), cache)
        exits.append(EngineExit(blocks[index].name, cache, 0.0, "inline", variant))
    stages = build_stages(traced, exits, "logits")
    thresholds = _thresholds([_scores(stages.trail(x[None])) for x in PREPROCESSING(images(60, seed=1))])
    save_composition(library, thresholds, caches)
    return library.directory


def save_composition(
    library: Library,
    thresholds: list[float],
    caches: tuple[tuple[str, str], ...] = CACHES,
    name: str = "default",
) -> None:
    """Write a composition with an exit a threshold, in forward order."""
    exits = tuple(
        Exit(
            trial_id=TrialId(f"trial-{index}"),
            block=library.manifest.blocks[index].name,
            block_index=index,
            variant=variant,
            selector=selector,
            threshold=threshold,
            placement="inline",
            expected_hit_rate=0.3,
            expected_agreement=1.0,
            lookup_ms=0.1,
            memory_bytes=1000,
            exit_ms=0.5,
        )
        for index, (threshold, (variant, selector)) in enumerate(zip(thresholds, caches, strict=False))
    )
    Composition(
        name=name,
        objective="exact",
        solver="search",
        gap=0.0,
        alpha=None,
        accuracy_target=0.9,
        confidence=0.95,
        memory_limit_bytes=None,
        backend="torch",
        placement="inline",
        exits=exits,
        expected=Expected(1.0, 2.0, 2.0, 0.5, 0.99, 2000),
        certificate=CERTIFICATE if exits else None,
        checkpoint_sha256=library.manifest.checkpoint_sha256,
        created="2026-01-01T00:00:00Z",
    ).save(library.composition_path(name))


def segment_output(traced: TracedModel, block: str) -> Tensor:
    """Hidden outputs of some inputs."""
    with torch.inference_mode():
        hidden: Tensor = traced.cut([block])[0].run(PREPROCESSING(images(60, seed=1)))[0]
    return hidden


def _spread(module: nn.Module, inputs: Tensor, head: nn.Module | None = None) -> None:
    """Change the last linear layer so that untrained weights give answers as different as trained ones do."""
    last = [child for child in (head or module).modules() if isinstance(child, nn.Linear)][-1]
    seen: list[Tensor] = []
    handle = last.register_forward_hook(lambda _module, _args, output: seen.append(output))
    with torch.inference_mode():
        module(inputs)
    handle.remove()
    mean, spread = seen[0].mean(0), seen[0].std(0)
    with torch.no_grad():
        last.weight.mul_(3.0 / spread[:, None])
        last.bias.sub_(mean).mul_(3.0 / spread)


def _scores(trail: list[tuple[Tensor, Tensor | None]]) -> list[float]:
    return [float(score) for _, score in trail if score is not None]


def _thresholds(scores: list[list[float]]) -> list[float]:
    """At every exit, what a third of the inputs still there reach."""
    remaining = np.array(scores)
    thresholds = []
    for index in range(remaining.shape[1]):
        thresholds.append(float(np.quantile(remaining[:, index], 2 / 3)))
        remaining = remaining[remaining[:, index] < thresholds[-1]]
    return thresholds
