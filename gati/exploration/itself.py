"""The network itself as a companion, at the input and behind its first block.

In float32 that would only do the same work twice. But where lookups run in 8-bit integers, it is a network of
half the cost that nearly always gives the same answer: it answers first, and the float32 network answers what
it is not sure of. Behind the first block, a student at the input can answer before it does.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

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
    for block in _places(prepared):
        place = Placed(ITSELF, block, _from_here_on(prepared, block))
        row = measured(prepared, library, place, prepared.loaded.source, seed)
        if (row.trial.agreement or 0.0) < _LEAST_AGREEMENT:
            raise ModelError(
                f"what follows block '{block}' gives other answers than the network: leave {ITSELF} out"
            )
        rows.append(row)
    blocks = " and ".join(row.trial.block for row in rows)
    progress.note(
        f"the network itself is offered at {blocks}, for backends whose lookups run in 8-bit integers"
    )
    return rows


def _places(prepared: PreparedModel) -> list[str]:
    """The input, and the first block that passes on nothing but its hidden output."""
    traced, profile = prepared.traced, prepared.profile
    found = [INPUT]
    for block in profile.blocks:
        if block.kind == INPUT_KIND:
            continue
        if block.reach_ms > _LATEST * profile.base_ms:
            break
        if len(_carried(prepared, block.name)) == 1:
            found.append(block.name)
            break
    assert traced.blocks[0] == INPUT
    return found


@torch.inference_mode()
def _carried(prepared: PreparedModel, block: str) -> tuple[torch.Tensor, ...]:
    """The tensors that the network needs after `block`, for an example."""
    first = prepared.traced.cut([block])[0]
    found: tuple[torch.Tensor, ...] = first.run(prepared.traced.example())
    return found


def _from_here_on(prepared: PreparedModel, block: str) -> Companion:
    """What follows `block`, as a companion that reads its hidden output."""
    traced = prepared.traced
    rest: nn.Module = as_module(traced.cut([block])[-1].run, persistent=True)
    (hidden,) = _carried(prepared, block)
    example = torch.cat((hidden, hidden)).clone()
    reading = Reading(prepared.held_out.outputs_kind)
    return Companion.of(rest, reading, example, Path(prepared.loaded.source))


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
