"""Everything explore needs before it trains: network, data, splits, blocks, latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gati.caches import LearnedCache, build_predictor, parse_variant, reads_input
from gati.caches.selectors import BASELINE
from gati.errors import BackendError, VariantError
from gati.explore.alike import warning_of_neighbours
from gati.explore.augment import Augmentation, choose_augmentation
from gati.explore.measure import base_answers
from gati.explore.progress import Progress
from gati.explore.schedule import too_slow
from gati.explore.splits import Inputs, split_inputs
from gati.explore.state import RunState
from gati.model.blocks import find_blocks
from gati.model.data import Data, load_data
from gati.model.entry import INPUT, INPUT_KIND, means_input
from gati.model.labels import (
    ClassNames,
    Labelled,
    LabelMap,
    fit_labels,
    names_of_classes,
    read_class_names,
    read_label_map,
)
from gati.model.load import LoadedModel
from gati.model.outputs import check_base_outputs, check_more_than_one_class, outputs_kind
from gati.model.segments import TracedModel, trace
from gati.runtime.profile import measure_lookup, measure_profile
from gati.types import BlockProfile, OutputsKind, Profile, Trial, TrialId

__all__ = ["HeldOut", "Prepared", "Specification", "prepare", "trial_name"]


@dataclass(frozen=True)
class HeldOut:
    """The base model's class of every held-out input, int64 [n]."""

    base_class: npt.NDArray[np.int64]
    outputs_kind: OutputsKind
    classes: int


@dataclass(frozen=True)
class Specification:
    """One trial to be: which variant, where, and what is known before training."""

    trial: Trial
    hidden_shape: tuple[int, ...]


@dataclass(frozen=True)
class Prepared:
    """The stage is set: what both training rounds share."""

    loaded: LoadedModel
    traced: TracedModel
    inputs: Inputs
    held_out: HeldOut
    class_names: tuple[str, ...] | None
    labels: npt.NDArray[np.int64] | None  # of the held-out inputs, as the network numbers its classes
    profile: Profile
    specifications: tuple[Specification, ...]
    augmentation: Augmentation
    device: torch.device

    @property
    def module(self) -> torch.nn.Module:
        """The base model."""
        return self.loaded.module


def trial_name(block: str, variant: str) -> TrialId:
    """A name for files: `layer2.3` and `conv(3,1)` give `layer2.3--conv-3-1`."""
    family, numbers = parse_variant(variant)
    return TrialId("--".join((block, "-".join((family, *map(str, numbers))))))


def resolve_device(name: str) -> torch.device:
    """Turn `cpu`, `cuda` or `cuda:1` into a device. Raises `BackendError` if it is not there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BackendError(f"unknown device {name!r}: choose cpu, cuda or cuda:INDEX") from error
    if device.type not in ("cpu", "cuda"):
        raise BackendError(f"device {name!r} is not supported: choose cpu, cuda or cuda:INDEX")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(
            "no CUDA device is available here: use --device cpu, or install the GPU build of torch"
        )
    return device


def prepare(
    loaded: LoadedModel,
    data: Any,
    train_data: Any | None,
    *,
    blocks: str | None,
    variants: Sequence[str],
    device: torch.device,
    seed: int,
    state: RunState,
    progress: Progress,
    class_names: ClassNames | None = None,
    label_map: LabelMap | None = None,
) -> Prepared:
    """Check model and data, measure the base model and every untrained lookup, say what cannot pay."""
    held = load_data(data, loaded.preprocessing, what="--data")
    more = None if train_data is None else load_data(train_data, loaded.preprocessing, what="--train-data")
    inputs = split_inputs(held, more, seed)
    module = loaded.module.to(device)
    example = inputs.held_out.images(np.arange(min(64, len(inputs.held_out)))).to(device)
    names, no_entry = _places(module, find_blocks(module, blocks, example=example[:2]), variants)
    traced = trace(module, example[:2], names)
    named, labelled = _name_classes(loaded, held, traced.classes, class_names, label_map)
    rows = inputs.record.rows
    labels = None if labelled.data.labels is None else labelled.data.labels[rows]
    for note in (no_entry, *inputs.notes, labelled.note, warning_of_neighbours(held)):
        if note:
            progress.note(note)
    held_out = _answers(loaded, inputs, device)
    stored = state.profile()
    if stored is None:
        progress.note(f"measuring {len(names)} blocks and their lookups on {device}")
        profile = measure_profile(traced)
        specifications = _specify(traced, profile, variants, held_out.classes)
        state.write_profile(
            {"profile": asdict(profile), "specifications": [asdict(item) for item in specifications]}
        )
    else:
        profile, specifications = _from_stored(stored)
    sample = inputs.train.images(np.arange(min(256, len(inputs.train)))).to(device)
    augmentation = choose_augmentation(module, sample) if inputs.train.is_images else Augmentation()
    return Prepared(
        loaded, traced, inputs, held_out, named, labels, profile, specifications, augmentation, device
    )


def _places(
    module: torch.nn.Module, blocks: Sequence[str], variants: Sequence[str]
) -> tuple[tuple[str, ...], str]:
    """The blocks, the input before them if a variant reads it, and a line for variants without a place."""
    reading = [variant for variant in variants if reads_input(variant)]
    if not reading:
        return tuple(blocks), ""
    if means_input(module, INPUT):
        return (INPUT, *blocks), ""
    reason = f"the network has a module of its own called '{INPUT}'"
    if len(reading) == len(variants):
        raise VariantError(f"{reason}, so {', '.join(reading)} cannot be placed before it; name others")
    return tuple(blocks), f"left {', '.join(reading)} out: {reason}"


def _name_classes(
    loaded: LoadedModel,
    held: Data,
    classes: int,
    class_names: ClassNames | None,
    label_map: LabelMap | None,
) -> tuple[tuple[str, ...] | None, Labelled]:
    mapped = None if label_map is None else read_label_map(label_map, classes)
    given = loaded.class_names if class_names is None else read_class_names(class_names, classes)
    named = names_of_classes(classes, given, held, mapped)
    return named, fit_labels(held, classes, named, mapped)


def _answers(loaded: LoadedModel, inputs: Inputs, device: torch.device) -> HeldOut:
    outputs = check_base_outputs(base_answers(loaded.module, inputs.held_out, device))
    base_class = outputs.argmax(1).numpy()
    check_more_than_one_class(base_class, "--data")
    return HeldOut(base_class, outputs_kind(outputs), outputs.shape[1])


def _specify(
    traced: TracedModel, profile: Profile, variants: Sequence[str], classes: int
) -> tuple[Specification, ...]:
    measured: dict[tuple[str, tuple[int, ...]], tuple[int, float]] = {}
    found = []
    for block in profile.blocks:
        shape = block.output_shape
        for variant in variants:
            if reads_input(variant) != (block.kind == INPUT_KIND):
                continue
            if (variant, shape) not in measured:
                measured[variant, shape] = _measure_untrained(traced, variant, shape, classes)
            parameters, lookup_ms = measured[variant, shape]
            found.append(Specification(_row(block, variant, parameters, lookup_ms, profile.base_ms), shape))
    return tuple(found)


def _measure_untrained(
    traced: TracedModel, variant: str, shape: tuple[int, ...], classes: int
) -> tuple[int, float]:
    build_predictor(variant, shape, classes)  # a bad variant fails here, with its own message
    cache = LearnedCache(variant, shape, classes, BASELINE).to(traced.device)
    hidden = torch.rand(1, *shape, device=traced.device)
    request = traced.example()
    lookup_ms = measure_lookup(cache, hidden, between=lambda: traced.base(request.clone()))
    return sum(parameter.numel() for parameter in cache.parameters()), lookup_ms


def _row(block: BlockProfile, variant: str, parameters: int, lookup_ms: float, base_ms: float) -> Trial:
    reason = too_slow(lookup_ms, block, base_ms)
    return Trial(
        trial_id=trial_name(block.name, variant),
        block_index=block.index,
        block=block.name,
        variant=variant,
        status="skipped" if reason else "trained",
        reason=reason,
        parameters=parameters,
        memory_bytes=4 * parameters,
        lookup_ms=lookup_ms,
    )


def _from_stored(stored: dict[str, Any]) -> tuple[Profile, tuple[Specification, ...]]:
    blocks = tuple(
        BlockProfile(**{**block, "output_shape": tuple(block["output_shape"])})
        for block in stored["profile"]["blocks"]
    )
    profile = replace(Profile(**{**stored["profile"], "blocks": ()}), blocks=blocks)
    specifications = tuple(
        Specification(Trial(**item["trial"]), tuple(item["hidden_shape"]))
        for item in stored["specifications"]
    )
    return profile, specifications
