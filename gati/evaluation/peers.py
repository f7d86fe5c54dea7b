"""Published early-exit methods on the same base model, with the library's own predictors.

BranchyNet exits when the entropy of an exit's probabilities is low enough, SDN when the largest probability
is high enough. Both use one threshold for all exits, which are evenly spaced. Here the threshold, the number
of exits and the predictors are the fastest on the select split that reach the composition's target agreement.
Nothing is certified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gati.caches import LearnedCache, build_selector, load_cache
from gati.composition.batches import in_fitting_batches
from gati.composition.replay import ExitCost, ReplayExit, replay
from gati.engine.exits import EngineExit
from gati.errors import DataError
from gati.exploration.library import SELECT, Library
from gati.exploration.splits import held_out
from gati.model.entry import INPUT_KIND
from gati.model.hooks import collect_hidden
from gati.model.sequence import Data
from gati.types import Trial

_EXITS = (2, 3, 4, 6)
Criterion = Literal["entropy", "maximum-probability"]
_NAMES: dict[Criterion, str] = {"entropy": "BranchyNet-style", "maximum-probability": "SDN-style"}


@dataclass(frozen=True)
class Peer:
    """Exits with one shared threshold; `detail` describes how they were chosen."""

    name: str
    exits: tuple[EngineExit, ...]
    detail: str


@dataclass(frozen=True)
class _Recorded:
    """A predictor and its answers on the select split."""

    trial: Trial
    cache: LearnedCache
    probabilities: NDArray[np.float32]  # [n, K]


def build_peers(library: Library, module: nn.Module, accuracy: float) -> tuple[Peer, ...]:
    """Build both peers for an agreement of `accuracy` on the select split.

    Raises:
        DataError: the held-out inputs are no longer where `explore` found them, or nothing was trained.
    """
    held, split = held_out(library)
    rows = np.flatnonzero(split == SELECT)
    best = _best_trial_a_block(library)
    if not best:
        raise DataError(
            "the library has no trained caches after blocks: run gati explore again with another --out, and "
            "name some with --variants, such as published, or give it more time"
        )
    base_class, recorded = _record(library, module, held, rows, best)
    return tuple(_peer(library, kind, recorded, base_class, accuracy) for kind in _NAMES)


def _best_trial_a_block(library: Library) -> dict[str, Trial]:
    """Return the trial of each block that saves most: hit rate at 97 % agreement, less its cost.

    Caches at the input are excluded: published exits follow blocks.
    """
    profile = library.manifest.profile
    reach = {block.name: block.reach_ms for block in profile.blocks if block.kind != INPUT_KIND}

    def worth(trial: Trial) -> float:
        saved = profile.base_ms - reach[trial.block]
        return (trial.hit_rate_at_97 or 0.0) * saved - (trial.lookup_ms or 0.0)

    best: dict[str, Trial] = {}
    for trial in library.trials:
        measured = trial.status == "trained" and trial.lookup_ms is not None  # the network itself is not
        if (measured and trial.block in reach) and (
            trial.block not in best or worth(trial) > worth(best[trial.block])
        ):
            best[trial.block] = trial
    return best


def _record(
    library: Library, module: nn.Module, held: Data, rows: NDArray[np.int64], best: dict[str, Trial]
) -> tuple[NDArray[np.int64], list[_Recorded]]:
    device = torch.device(library.manifest.profile.device)
    caches = {
        block: load_cache(library.cache_path(trial.trial_id)).to(device) for block, trial in best.items()
    }

    def images(indices: NDArray[np.int64]) -> Tensor:
        return held.images(rows[indices]).to(device)

    def answered(batch: Tensor) -> tuple[Tensor, list[Tensor]]:
        with collect_hidden(module, list(best)) as hidden:
            classes = module(batch).argmax(1).cpu()
        return classes, [cache(hidden[block])[0].cpu() for block, cache in caches.items()]

    with torch.inference_mode():
        answers, found = zip(*in_fitting_batches(len(rows), images, answered), strict=True)
    recorded = [
        _Recorded(best[block], caches[block], torch.cat(batches).float().numpy())
        for block, batches in zip(caches, zip(*found, strict=True), strict=True)
    ]
    base_class: NDArray[np.int64] = torch.cat(answers).numpy()
    return base_class, sorted(recorded, key=lambda each: each.trial.block_index)


def _peer(
    library: Library,
    criterion: Criterion,
    recorded: Sequence[_Recorded],
    base_class: NDArray[np.int64],
    accuracy: float,
) -> Peer:
    tuned = [
        (*_threshold(library, criterion, chosen, base_class, accuracy), chosen)
        for chosen in (_evenly(recorded, count) for count in _EXITS)
    ]
    _, threshold, chosen = min(tuned, key=lambda each: each[0])
    exits = tuple(
        EngineExit(
            each.trial.block,
            LearnedCache(
                each.cache.variant,
                each.cache.hidden_shape,
                each.cache.classes,
                criterion,  # the selector "entropy" is negated, so it grows with confidence
                predictor=each.cache.predictor,
                selector_module=build_selector(criterion, each.cache.classes),
            ),
            threshold,
            "inline",
            each.trial.variant,
            each.cache.memory_bytes,
        )
        for each in chosen
    )
    blocks = ", ".join(each.trial.block for each in chosen)
    return Peer(
        _NAMES[criterion],
        exits,
        f"{criterion}, threshold {threshold:.4g} after {blocks}; set on the select split, not certified",
    )


def _evenly(recorded: Sequence[_Recorded], count: int) -> list[_Recorded]:
    """Return `count` of them, evenly spaced, none at the very end."""
    positions = {len(recorded) * k // (count + 1) for k in range(1, count + 1)}
    return [recorded[position] for position in sorted(positions)]


def _threshold(
    library: Library,
    criterion: Criterion,
    chosen: Sequence[_Recorded],
    base_class: NDArray[np.int64],
    accuracy: float,
) -> tuple[float, float]:
    """Return the loosest shared threshold that keeps the agreement, and its mean latency."""
    profile = library.manifest.profile
    reach = {block.name: block.reach_ms for block in profile.blocks}
    scores = [_score(criterion, each.probabilities) for each in chosen]
    predicted = [each.probabilities.argmax(1).astype(np.int64) for each in chosen]
    candidates = np.quantile(np.concatenate(scores), np.linspace(0.0, 1.0, 201)).astype(np.float32)
    best = (profile.base_ms, float(np.finfo(np.float32).max))
    for threshold in candidates:
        outcome = replay(
            [
                ReplayExit(
                    score,
                    answer,
                    float(threshold),
                    ExitCost(
                        reach[each.trial.block], each.trial.lookup_ms or 0.0, each.trial.lookup_ms or 0.0
                    ),
                )
                for each, score, answer in zip(chosen, scores, predicted, strict=True)
            ],
            base_class,
            profile.base_ms,
        )
        if outcome.agreement >= accuracy and outcome.mean_latency_ms < best[0]:
            best = (outcome.mean_latency_ms, float(threshold))
    return best


def _score(criterion: Criterion, probabilities: NDArray[np.float32]) -> NDArray[np.float32]:
    if criterion == "maximum-probability":
        largest: NDArray[np.float32] = probabilities.max(1)
        return largest
    with torch.inference_mode():
        scored = build_selector("entropy", probabilities.shape[1])(torch.from_numpy(probabilities))
    result: NDArray[np.float32] = scored.numpy()
    return result
