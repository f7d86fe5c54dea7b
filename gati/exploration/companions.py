"""Companions of an exploration: networks that the user already has, measured as caches at the input.

They need no training. The preprocessing of both networks determines how a companion's input is derived from
the base model's, and the class names of both how its outputs are ordered. A selector is chosen on the select
inputs, as for any cache. The network itself may be one of them, see `gati.exploration.itself`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gati.caches import Companion, Reader, Reading
from gati.errors import DataError, ModelError, one_line
from gati.exploration.budget import Budget
from gati.exploration.candidates import trial_name
from gati.exploration.itself import Placed, measure_itself, measured
from gati.exploration.library import Library
from gati.exploration.measure import seconds_per_input
from gati.exploration.memory import fitting_by, is_lack_of_memory
from gati.exploration.prepared import PreparedModel
from gati.exploration.progress import Progress
from gati.exploration.state import FinishedTrial, RunState
from gati.model.entry import INPUT
from gati.model.inputs import TensorInputs
from gati.model.load import LoadedModel, load_model
from gati.model.outputs import check_base_outputs, outputs_kind
from gati.model.packed import fit_tensors
from gati.model.preprocess import Preprocessing
from gati.model.sequence import Data
from gati.types import Trial
from gati.units import percent
from gati.variants import ITSELF, ITSELF_NAME, companion_variant

_TRIED = 64  # inputs on which a companion is checked, at most
_ROW_TOLERANCE = 1e-3


class NamedNetwork(NamedTuple):
    """A network that will become a companion, and the name of its variant."""

    variant: str
    loaded: LoadedModel


def load_companions(
    given: Sequence[tuple[str | Path, str | Path | None]],
    base: LoadedModel,
    tensors: TensorInputs | None = None,
) -> tuple[NamedNetwork, ...]:
    """Load (model, checkpoint) pairs, as `load_model` takes them; networks of the same name are numbered.

    The model `itself` stands for `base`. `tensors` describes the input of `base` if it is not images.

    **Raises:** `DataError` for a checkpoint of `itself`, and as `load_model`.
    """
    candidates: list[NamedNetwork] = []
    for source, checkpoint in given:
        if str(source) == ITSELF_NAME:
            if checkpoint is not None:
                raise DataError(f"companion '{ITSELF_NAME}' has the network's own checkpoint: give 'none'")
            if ITSELF not in (each.variant for each in candidates):
                candidates.append(NamedNetwork(ITSELF, base))
            continue
        variant = companion_variant(_name(str(source), [ITSELF, *(each.variant for each in candidates)]))
        loaded = load_model(source, checkpoint)
        if tensors is not None:
            loaded = fit_tensors(loaded, tensors, "--data")
        candidates.append(NamedNetwork(variant, loaded))
    return tuple(candidates)


def _name(source: str, taken: Sequence[str]) -> str:
    last = Path(source).stem if source.endswith(".pt2") else source.rpartition(":")[2]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-") or "network"
    numbered, number = name, 1
    while companion_variant(numbered) in taken:
        number += 1
        numbered = f"{name}-{number}"
    return numbered


def measure_companions(
    prepared: PreparedModel,
    library: Library,
    state: RunState,
    budget: Budget,
    candidates: Sequence[NamedNetwork],
    *,
    seed: int,
    progress: Progress,
) -> None:
    """Add each network to the library as a cache, with its outcomes on the held-out inputs.

    Those that an interrupted run has added are not measured again; those for which the budget leaves no time
    are left out.

    **Raises:** `ModelError` for a network that cannot stand in for the base model.
    """
    waiting = [each for each in candidates if not is_accompanying(state, each.variant)]
    if waiting:
        progress.stage("companions", len(waiting))
    for candidate in waiting:
        try:
            rows = _rows(candidate, prepared, library, budget, seed=seed, progress=progress)
        except ModelError as error:
            if not is_lack_of_memory(error.__cause__):
                state.clear()  # else it would demand the companion of the corrected command
            raise
        keep_accompanying(state, rows)
        budget.note()
        progress.advance(1)


def _rows(
    candidate: NamedNetwork,
    prepared: PreparedModel,
    library: Library,
    budget: Budget,
    *,
    seed: int,
    progress: Progress,
) -> list[FinishedTrial]:
    if candidate.variant == ITSELF:
        needed_s = prepared.expected.held_out_s
        measure = partial(measure_itself, prepared, library, seed=seed, progress=progress)
    else:
        companion = fit_companion(
            candidate,
            prepared.loaded,
            prepared.inputs.held_out,
            prepared.held_out.classes,
            prepared.class_names,
            tried=max(2, min(_TRIED, budget.inputs_to_try(prepared.answer_s))),
        )
        needed_s = _seconds_to_measure(companion, prepared, budget)
        measure = partial(_measured, prepared, library, candidate, companion, seed, progress)
    if budget.is_spent(needed_s):
        return [_left_out(candidate.variant, prepared, needed_s, budget.left_s() or 0.0, progress)]
    return measure()


def is_accompanying(state: RunState, variant: str) -> bool:
    """Whether the run, before an interruption, has dealt with the companion of that variant."""
    return trial_name(INPUT, variant) in state.finished()


def keep_accompanying(state: RunState, rows: Sequence[FinishedTrial]) -> None:
    """Record the rows of a companion for a run that resumes; the one at the input, which is first, last."""
    for row in reversed(rows):
        state.write_finished(row)


def _seconds_to_measure(companion: Companion, prepared: PreparedModel, budget: Budget) -> float:
    if budget.budget_s is None:
        return 0.0
    inputs, device = prepared.inputs.held_out, prepared.device
    return len(inputs) * seconds_per_input(companion.to(device), inputs, device, budget.clock)


def _measured(
    prepared: PreparedModel,
    library: Library,
    candidate: NamedNetwork,
    companion: Companion,
    seed: int,
    progress: Progress,
) -> list[FinishedTrial]:
    place = Placed(candidate.variant, INPUT, companion)
    row = measured(prepared, library, place, candidate.loaded.source, seed)
    progress.note(
        f"{row.trial.variant} agrees with the network on {percent(row.trial.agreement or 0.0)} of the select "
        f"inputs, hit rate {percent(row.trial.hit_rate_at_97 or 0.0, 0)} at 97 % agreement"
    )
    return [row]


def _left_out(
    variant: str, prepared: PreparedModel, needed_s: float, left_s: float, progress: Progress
) -> FinishedTrial:
    reason = f"measuring it takes {needed_s:.0f} of the {left_s:.0f} seconds left: give it more time"
    progress.note(f"left out {variant}: {reason}")
    place = prepared.traced.blocks.index(INPUT)
    return FinishedTrial(Trial(trial_name(INPUT, variant), place, INPUT, variant, "skipped", reason), ())


def check_companions(
    candidates: Sequence[NamedNetwork],
    base: LoadedModel,
    held: Data,
    classes: int,
    class_names: Sequence[str] | None,
) -> None:
    """Raise `ModelError` for a network that `fit_companion` refuses on two inputs."""
    for candidate in candidates:
        if candidate.variant != ITSELF:
            fit_companion(candidate, base, held, classes, class_names, tried=2)


def fit_companion(
    candidate: NamedNetwork,
    base: LoadedModel,
    held: Data,
    classes: int,
    class_names: Sequence[str] | None,
    *,
    tried: int,
) -> Companion:
    """Turn a network into a companion that takes the base model's inputs, on the CPU; try it on a few.

    **Raises:** `ModelError` if channels or classes differ, or if the network cannot be run or traced.
    """
    variant, loaded = candidate
    example = held.images(np.arange(min(tried, len(held))))
    reading = Reading("logits")
    if held.is_images:
        reading = reading_of(variant, base.preprocessing, loaded, example)
    given = Reader(reading)(example)
    fits = fitting_by(
        lambda rows: _outputs(variant, loaded.module, given[: len(rows)]), given[:1], len(given)
    )
    given = given[: max(2, fits)]
    outputs = _outputs(variant, loaded.module, given)
    names = loaded.class_names
    reading = replace(
        reading,
        outputs_kind=outputs_kind(outputs),
        classes=class_order(variant, outputs.shape[1], names, classes, class_names),
    )
    try:
        companion = Companion.of(loaded.module, reading, given[:2], Path(loaded.source))
    except ModelError as error:
        raise ModelError(f"{variant}: {error}") from error
    expected = _outputs(variant, loaded.module, given)
    if not torch.allclose(outputs, expected, _ROW_TOLERANCE, _ROW_TOLERANCE):
        raise ModelError(f"{variant} answers the same inputs differently each time; leave it out")
    alone = torch.cat([_outputs(variant, loaded.module, given[row : row + 1]) for row in range(2)])
    if not torch.allclose(alone, outputs[:2], _ROW_TOLERANCE, _ROW_TOLERANCE):
        raise ModelError(
            f"{variant}: its answer to an input depends on the other inputs of its batch; leave it out"
        )
    if not torch.allclose(companion.network(given), expected, _ROW_TOLERANCE, _ROW_TOLERANCE):
        raise ModelError(
            f"{variant}: its traced program computes a different result than the network; leave it out"
        )
    return companion


def reading_of(variant: str, base: Preprocessing, loaded: LoadedModel, example: Tensor) -> Reading:
    """How to turn the base model's input, such as `example` [B, C, H, W], into the companion's input.

    A network without preprocessing gets the same input. If the companion takes images of another size, they
    are first average-pooled by an integer factor, if one fits, and then resized. Pixels that the base model's
    crop removed are not restored.

    **Raises:** `ModelError` if the numbers of channels differ.
    """
    if example.ndim != 4 or loaded.preprocessing_from == "default":
        return Reading("logits")
    own = loaded.preprocessing
    if own.channels != base.channels:
        raise ModelError(
            f"{variant} takes {own.channels} channels and the network {base.channels}; give a companion "
            "with the same number"
        )
    height, width = example.shape[2:]
    size = _size_of(own, height, width)
    most = max(1, min(height // size[0], width // size[1]))
    pool = max(factor for factor in range(1, most + 1) if height % factor == width % factor == 0)
    stretched = None if (height // pool, width // pool) == size else size
    scale = tuple(theirs / mine for theirs, mine in zip(base.std, own.std, strict=True))
    centres = zip(base.mean, own.mean, own.std, strict=True)
    shift = tuple((theirs - mine) / spread for theirs, mine, spread in centres)
    if all(value == 1.0 for value in scale) and not any(shift):
        scale = shift = ()
    return Reading("logits", scale, shift, pool, stretched)


def _size_of(preprocessing: Preprocessing, height: int, width: int) -> tuple[int, int]:
    """The height and width that a network's own preprocessing produces."""
    if preprocessing.crop is not None:
        return preprocessing.crop, preprocessing.crop
    if preprocessing.resize is not None:
        shorter = min(height, width)
        return height * preprocessing.resize // shorter, width * preprocessing.resize // shorter
    return preprocessing.size or (height, width)


def class_order(
    variant: str,
    own: int,
    own_names: Sequence[str] | None,
    classes: int,
    names: Sequence[str] | None,
) -> tuple[int, ...] | None:
    """The index of each of the network's `classes` among a companion's `own` outputs; None for equal order.

    Classes are matched by name if the companion has all of the network's names. Otherwise both must have the
    same number of classes, and no name may occur at different indices.

    **Raises:** `ModelError` if the classes cannot be matched.
    """
    where = {name: index for index, name in enumerate(own_names or ())}
    clear = len(where) == own  # every output has a name of its own
    found = [where.get(name) if clear else None for name in names or ()]
    if found and None not in found:
        order = tuple(index for index in found if index is not None)
        return None if order == tuple(range(own)) else order
    if own != classes:
        missing = [name for name, index in zip(names or (), found, strict=True) if index is None]
        reason = (
            f"has no class named {missing[0]!r}" if clear and missing else "does not name all of its classes"
        )
        raise ModelError(
            f"{variant} has {own} classes and the network {classes}, and it {reason}; give a network of "
            "the same classes"
        )
    if elsewhere := [name for index, name in zip(found, names or (), strict=True) if index is not None]:
        moved = [name for name in elsewhere if where[name] != list(names or ()).index(name)]
        if moved:
            raise ModelError(
                f"{variant} has class {moved[0]!r} at another index than the network, and lacks some of the "
                "network's class names; give a network of the same classes"
            )
    return None


@torch.inference_mode()
def _outputs(variant: str, module: nn.Module, given: Tensor) -> Tensor:
    try:
        return check_base_outputs(module(given.clone()))
    except ModelError as error:
        raise ModelError(f"{variant}: {error}") from error
    except Exception as error:  # user code may raise anything
        raise ModelError(
            f"{variant} does not accept inputs of shape {list(given.shape)} ({one_line(error)}); give its "
            "callable an attribute preprocessing, or leave it out"
        ) from error
