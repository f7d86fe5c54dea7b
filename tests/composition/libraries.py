"""Small cache libraries on disk, made of numbers instead of training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from gati.composition.composition import Composition
from gati.composition.outcomes import SplitOutcomes
from gati.composition.prospects import problem_deployed
from gati.exploration.library import SELECT, BaseOutcomes, Library, Manifest, TrialOutcomes
from gati.types import BlockProfile, OperatingPoint, Profile, Trial, TrialId

CLASSES = 10


def make_library(
    directory: Path,
    *,
    blocks: int = 4,
    variants: int = 2,
    inputs: int = 600,
    certify: int = 600,
    outcomes: bool = True,
    overlapped: bool = False,
    seed: int = 0,
    quality: float = 3.0,
) -> Library:
    """Write a library whose deeper caches agree more often, with scores that tell right from wrong.

    `quality` is how far apart the scores of right and wrong answers lie, in standard deviations.
    """
    random = np.random.default_rng(seed)
    library = Library(directory)
    library.write_manifest(_manifest(blocks, inputs, certify))
    total = inputs + certify
    base_class = random.integers(0, CLASSES, total)
    split = np.repeat(np.array([0, 1], dtype=np.uint8), (inputs, certify))
    random.shuffle(split)
    hardness = random.uniform(size=total)
    trials, points = [], []
    for block in range(blocks):
        for variant in range(variants):
            agreement = 0.55 + 0.4 * (block + 1) / blocks + 0.02 * variant
            right = hardness + random.normal(0, 0.1, total) < agreement
            answers = _answers(random, base_class, right, hardness, quality)
            trial = _trial(block, variant, overlapped, float(right.mean()))
            trials.append(trial)
            points += _operating_points(trial.trial_id, answers, base_class, split == 0)
            if outcomes:
                library.write_outcomes(trial.trial_id, answers)
    library.write_trials(trials, points)
    if outcomes:
        library.write_base_outcomes(BaseOutcomes(base_class, base_class.copy(), split))
    return Library.open(directory)


def repaid(library: Library, composition: Composition) -> list[float]:
    """The share of the mean latency that each exit saves, per share of the network's that a miss costs."""
    problem, select = problem_deployed(composition, library), SplitOutcomes(library, SELECT)
    every = problem.candidates
    mean_ms = select.replay(problem, every).mean_latency_ms
    without_ms = [
        select.replay(problem, (*every[:at], *every[at + 1 :])).mean_latency_ms for at in range(len(every))
    ]
    return [
        (without / mean_ms - 1.0) * problem.base_ms / candidate.penalty_ms
        for without, candidate in zip(without_ms, every, strict=True)
    ]


def rewrite(library: Library, **changes: object) -> Library:
    """Change every trial of a library, for example `status="skipped"`."""
    library.write_trials(
        [replace(trial, **changes) for trial in library.trials], list(library.operating_points)
    )
    return Library.open(library.directory)


def _answers(random, base_class, right, hardness, quality) -> TrialOutcomes:
    predicted = np.where(right, base_class, (base_class + 1) % CLASSES)
    score = quality * (right - 0.5) - hardness + random.normal(0, 1.0, len(right))
    return TrialOutcomes(score.astype(np.float32), predicted.astype(np.int64))


def _operating_points(trial_id, answers, base_class, select) -> list[OperatingPoint]:
    score, right = answers.score[select], (answers.predicted == base_class)[select]
    points = []
    for threshold in np.quantile(score, np.linspace(0.0, 1.0, 41)).astype(np.float32):
        hit = score >= threshold
        accuracy = float(right[hit].mean()) if hit.any() else 1.0
        points.append(OperatingPoint(trial_id, float(threshold), float(hit.mean()), accuracy))
    return points


def _trial(block: int, variant: int, overlapped: bool, agreement: float) -> Trial:
    lookup = 0.03 + 0.02 * variant
    return Trial(
        trial_id=TrialId(f"b{block:02d}-v{variant}"),
        block_index=block,
        block=f"layer1.{block}",
        variant=f"fc({64 * (variant + 1)})",
        status="trained",
        selector="max_probability",
        parameters=1000,
        memory_bytes=4000 * (variant + 1),
        lookup_ms=lookup,
        overlapped_lookup_ms=lookup * 1.5 if overlapped else None,
        overlapped_penalty_ms=0.002 if overlapped else None,
        agreement=agreement,
    )


def _manifest(blocks: int, inputs: int, certify: int) -> Manifest:
    profile = Profile(
        backend="torch",
        device="cpu",
        threads=torch.get_num_threads(),
        base_ms=0.2 * blocks + 0.15,
        blocks=tuple(
            BlockProfile(b, f"layer1.{b}", "BasicBlock", (16, 8, 8), 0.2, 0.1 + 0.2 * (b + 1))
            for b in range(blocks)
        ),
    )
    return Manifest(
        model_source="package:model",
        checkpoint_path=None,
        checkpoint_sha256="ab" * 32,
        preprocessing={},
        class_names=None,
        classes=CLASSES,
        outputs_kind="logits",
        input_shape=(3, 32, 32),
        profile=profile,
        seed=0,
        counts={"train": 0, "select": inputs, "certify": certify},
        data={},
        settings={},
        versions={},
        complete=True,
    )
