"""Outcomes of a library's caches on inputs unseen by explore and compose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from gati.caches import load_cache
from gati.composition.outcomes import SplitOutcomes
from gati.exploration.library import SELECT, Library, TrialOutcomes
from gati.model.data import load_data
from gati.model.hooks import collect_hidden
from gati.model.load import load_model
from gati.model.preprocess import Preprocessing
from gati.types import Trial, TrialId

BATCH = 250


def probabilities_of(library: Library, data: Path, trials: Sequence[Trial]) -> dict[TrialId, torch.Tensor]:
    """Return class probabilities [n, K] of the trials' predictors on all inputs of `data`."""
    manifest = library.manifest
    module = load_model(manifest.model_source, manifest.checkpoint_path).module
    inputs = load_data(str(data), Preprocessing.from_json(manifest.preprocessing))
    caches = {trial.trial_id: load_cache(library.cache_path(trial.trial_id)) for trial in trials}
    found: dict[TrialId, list[torch.Tensor]] = {trial_id: [] for trial_id in caches}
    with torch.inference_mode():
        for start in range(0, len(inputs), BATCH):
            with collect_hidden(module, sorted({trial.block for trial in trials})) as hidden:
                module(inputs.images(range(start, min(start + BATCH, len(inputs)))))
            for trial in trials:
                found[trial.trial_id].append(caches[trial.trial_id](hidden[trial.block])[0])
    return {trial_id: torch.cat(batches).clone() for trial_id, batches in found.items()}


class FreshOutcomes(SplitOutcomes):
    """Like a library's held-out outcomes, but for other inputs: runs all trained trials on `data`."""

    def __init__(self, library: Library, data: Path) -> None:
        super().__init__(library, SELECT)
        manifest = library.manifest
        module = load_model(manifest.model_source, manifest.checkpoint_path).module
        inputs = load_data(str(data), Preprocessing.from_json(manifest.preprocessing))
        trials = [trial for trial in library.trials if trial.status == "trained"]
        caches = {trial.trial_id: load_cache(library.cache_path(trial.trial_id)) for trial in trials}
        scores: dict[TrialId, list[np.ndarray]] = {trial_id: [] for trial_id in caches}
        classes: dict[TrialId, list[np.ndarray]] = {trial_id: [] for trial_id in caches}
        base: list[np.ndarray] = []
        with torch.inference_mode():
            for start in range(0, len(inputs), BATCH):
                rows = inputs.images(range(start, min(start + BATCH, len(inputs))))
                with collect_hidden(module, [block.name for block in manifest.blocks]) as hidden:
                    base.append(module(rows).argmax(1).numpy())
                for trial in trials:
                    probabilities, score = caches[trial.trial_id](hidden[trial.block])
                    scores[trial.trial_id].append(score.numpy().astype(np.float32))
                    classes[trial.trial_id].append(probabilities.argmax(1).numpy())
        self.inputs = np.arange(len(inputs))
        self.base_class = np.concatenate(base)
        self.label = inputs.labels
        self._trials = {
            trial_id: TrialOutcomes(np.concatenate(scores[trial_id]), np.concatenate(classes[trial_id]))
            for trial_id in caches
        }
