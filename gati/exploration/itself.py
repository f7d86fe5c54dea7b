"""The network itself as a companion, at the input and behind its first block.

In float32 that would only do the same work twice, so it has no cost there, and is never composed. But where
lookups run in 8-bit integers, it is a network of half the cost that nearly always gives the same answer: it
answers first, and the float32 network answers what it is not sure of. Behind the first block, a student at
the input can answer before it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gati.caches import Companion, Reading, save_cache
from gati.engine.backends import BACKENDS
from gati.errors import ModelError
from gati.exploration.candidates import trial_name
from gati.exploration.library import Library, TrialOutcomes
from gati.exploration.measure import held_out_probabilities, measure_cache
from gati.exploration.memory import fitting_by, in_batches
from gati.exploration.prepared import PreparedModel
from gati.exploration.progress import Progress
from gati.exploration.state import FinishedTrial
from gati.exploration.train import Learner
from gati.model.entry import INPUT, INPUT_KIND
from gati.model.program import as_module
from gati.types import Trial, TrialId
from gati.variants import ITSELF, ITSELF_NAME

_LATEST = 0.3  # share of the network's time after which its rest is no longer offered
_LARGEST_BYTES = 128 * 2**20  # of a network that is offered by default: the library stores it twice
_LARGEST_SHARE = 0.1  # of the time left, for measuring what no one has asked for
_COMPARED = 64  # inputs on which the rest of the network is compared with all of it


class Placed(NamedTuple):
    """A companion and the block whose hidden output it reads."""

    variant: str
    block: str
    companion: Companion


def offer_itself(
    prepared: PreparedModel,
    library: Library,
    *,
    seed: int,
    progress: Progress,
    left_s: float | None = None,
) -> list[FinishedTrial]:
    """As `measure_itself` if it may pay and its copies are not large; no one has asked for it.

    If measuring takes more than a tenth of the seconds left, it is left out, too.

    Networks that read sequences are left out: a companion would fix their length.
    """
    kept = sum(tensor.numel() * tensor.element_size() for tensor in prepared.module.state_dict().values())
    if (
        prepared.device.type != "cpu"
        or prepared.loaded.preprocessing.tensors is not None
        or kept > _LARGEST_BYTES
        or INPUT not in prepared.traced.blocks
        or not any(kind.same_network_as and kind.installed() for kind in BACKENDS.values())
    ):
        return []
    if left_s is not None and prepared.expected.held_out_s > _LARGEST_SHARE * left_s:
        progress.note(
            f"left out {ITSELF}: measuring it takes {prepared.expected.held_out_s:.0f} of the {left_s:.0f} "
            f"seconds left; name it with --companion {ITSELF_NAME}"
        )
        return []
    try:
        return measure_itself(prepared, library, seed=seed, progress=progress)
    except ModelError as error:
        progress.note(f"left out {ITSELF}: {error}")
        return []


def measure_itself(
    prepared: PreparedModel, library: Library, *, seed: int, progress: Progress
) -> list[FinishedTrial]:
    """Add the network itself to the library as caches: whole, and what follows its first block.

    **Raises:** `ModelError` if what follows a block does not give the network's answers.
    """
    if prepared.device.type != "cpu":
        progress.note(f"left out {ITSELF}: it pays only where lookups run in 8-bit integers, on CPUs")
        return []
    places = list(_placed(prepared))
    whole = places[0].companion
    for place in places[1:]:
        _check_equal(prepared, whole, place)
    answers = _probabilities(prepared, places[0])  # of all of them: they differ only in where they begin
    rows = [_added(prepared, library, place, answers, prepared.loaded.source, seed) for place in places]
    blocks = " and ".join(place.block for place in places)
    progress.note(
        f"the network itself is offered at {blocks}, for backends whose lookups run in 8-bit integers"
    )
    return rows


def _check_equal(prepared: PreparedModel, whole: Companion, rest: Placed) -> None:
    inputs, before = prepared.inputs.held_out, prepared.traced.cut([rest.block])[0]

    def alike(rows: npt.NDArray[np.int64]) -> bool:
        x = inputs.images(rows).to(prepared.device)
        hidden = before.run(x.clone())[0]
        return torch.allclose(rest.companion(hidden), whole(x), rtol=1e-3, atol=1e-3)

    count = min(_COMPARED, len(inputs))
    with torch.inference_mode():
        most = fitting_by(alike, inputs.images(np.arange(1)).to(prepared.device), count)
        same = all(in_batches(count, most, alike))
    if not same:
        raise ModelError(
            f"what follows block '{rest.block}' gives other answers than the network, so it cannot be a "
            "companion"
        )


def _placed(prepared: PreparedModel) -> Iterator[Placed]:
    """The network at the input, and at the first block that passes on nothing but its hidden output."""
    latest_ms = _LATEST * prepared.profile.base_ms
    behind = (each for each in prepared.profile.blocks if each.kind != INPUT_KIND)
    early = takewhile(lambda each: each.reach_ms <= latest_ms, behind)
    names = chain([INPUT], (each.name for each in early))
    return islice(filter(None, (_from_here_on(prepared, name) for name in names)), 2)


def _from_here_on(prepared: PreparedModel, block: str) -> Placed | None:
    """What follows `block` at that block; None if it needs more than its hidden output."""
    before, rest = prepared.traced.cut([block])
    with torch.inference_mode():
        hidden, *others = before.run(prepared.traced.example())
    if others:
        return None
    module, example = as_module(rest.run, persistent=True), torch.cat((hidden, hidden)).clone()
    reading, source = Reading(prepared.held_out.outputs_kind), Path(prepared.loaded.source)
    return Placed(ITSELF, block, Companion.of(module, reading, example, source))


def measured(
    prepared: PreparedModel, library: Library, place: Placed, source: str, seed: int
) -> FinishedTrial:
    """Add a companion to the library, with its outcomes on the held-out inputs."""
    return _added(prepared, library, place, _probabilities(prepared, place), source, seed)


def _probabilities(prepared: PreparedModel, place: Placed) -> Tensor:
    learner = Learner(TrialId(place.variant), place.block, place.companion.to(prepared.device))
    (found,) = held_out_probabilities(
        prepared.module, prepared.inputs.held_out, [learner], prepared.device
    ).values()
    finite = torch.isfinite(found).all(1)
    if not bool(finite.all()):
        raise ModelError(
            f"{place.variant} gives NaN for {int((~finite).sum())} of {len(found)} held-out inputs; check "
            "its checkpoint and preprocessing, or leave it out"
        )
    return found


def _added(
    prepared: PreparedModel, library: Library, place: Placed, probabilities: Tensor, source: str, seed: int
) -> FinishedTrial:
    variant, block, companion = place
    trial_id = trial_name(block, variant)
    found = measure_cache(
        trial_id,
        (variant, prepared.traced.hidden_shapes[block], companion),
        probabilities,
        prepared.held_out.base_class,
        prepared.inputs.split,
        seed,
    )
    save_cache(library.cache_path(trial_id), found.cache, {"source": source})
    library.write_outcomes(trial_id, TrialOutcomes(*found.outcomes))
    trial = Trial(
        trial_id=trial_id,
        block_index=prepared.traced.blocks.index(block),
        block=block,
        variant=variant,
        status="trained",
        selector=found.cache.selector_name,
        parameters=sum(tensor.numel() for tensor in companion.state_dict().values()),
        memory_bytes=found.cache.memory_bytes,
        agreement=found.agreement,
        hit_rate_at_97=found.hit_rate_at_97,
        hit_rate_at_99=found.hit_rate_at_99,
    )
    return FinishedTrial(trial, tuple(found.points))
