"""The network itself as a companion, at the input and behind its first block.

In float32 that would only do the same work twice. But where lookups run in 8-bit integers, it is a network of
half the cost that nearly always gives the same answer: it answers first, and the float32 network answers what
it is not sure of. Behind the first block, a student at the input can answer before it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import NamedTuple

import torch

from gati.caches import Companion, Reading, companion_variant, save_cache
from gati.errors import ModelError
from gati.exploration.candidates import trial_name
from gati.exploration.library import Library, TrialOutcomes
from gati.exploration.measure import held_out_probabilities, measure_cache
from gati.exploration.prepare import PreparedModel
from gati.exploration.progress import Progress
from gati.exploration.state import FinishedTrial
from gati.exploration.train import Learner
from gati.model.entry import INPUT, INPUT_KIND
from gati.model.program import as_module
from gati.types import Trial

ITSELF_NAME = "itself"
ITSELF = companion_variant(ITSELF_NAME)
_LATEST = 0.3  # share of the network's time after which its rest is no longer offered
_LEAST_AGREEMENT = 0.999  # of the rest of the network with the network, both in float32


class Placed(NamedTuple):
    """A companion and the block whose hidden output it reads."""

    variant: str
    block: str
    companion: Companion


def measure_itself(
    prepared: PreparedModel, library: Library, *, seed: int, progress: Progress
) -> list[FinishedTrial]:
    """Add the network itself to the library as caches: whole, and what follows its first block."""
    if prepared.device.type != "cpu":
        progress.note(f"left out {ITSELF}: it pays only where lookups run in 8-bit integers, on CPUs")
        return []
    rows = []
    for place in _placed(prepared):
        row = measured(prepared, library, place, prepared.loaded.source, seed)
        if (row.trial.agreement or 0.0) < _LEAST_AGREEMENT:
            raise ModelError(
                f"what follows block '{place.block}' gives other answers than the network: leave {ITSELF} out"
            )
        rows.append(row)
    blocks = " and ".join(row.trial.block for row in rows)
    progress.note(
        f"the network itself is offered at {blocks}, for backends whose lookups run in 8-bit integers"
    )
    return rows


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
    variant, block, companion = place
    trial_id = trial_name(block, variant)
    learner = Learner(trial_id, block, companion.to(prepared.device))
    probabilities = held_out_probabilities(
        prepared.module, prepared.inputs.held_out, [learner], prepared.device
    )
    found = measure_cache(
        trial_id,
        (variant, prepared.traced.hidden_shapes[block], companion),
        probabilities[trial_id],
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
