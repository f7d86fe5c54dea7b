"""`gati evict train`: fits a predictor to a whole trace, or a continuation model to dialogues."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import EvictError, StorageError
from gati.evict.predict.continuation import (
    ContinuationModel,
    ContinuationSettings,
    fit_continuation,
    matthews,
)
from gati.evict.predict.continuation_stored import save_continuation, save_encoded
from gati.evict.predict.reuse import Reuse, ReuseSettings
from gati.evict.predict.stored import save_model
from gati.evict.seeds import check_seed
from gati.evict.trace.dialogues import Dialogue, Prompts, halves, prompts_of
from gati.evict.trace.records import Trace

if TYPE_CHECKING:
    from gati.evict.predict.encoded import EncodedContinuation


def train(
    trace: Trace, out: str | Path, *, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Fit `reuse` to all of `trace`, write it to the folder `out`, and return what it was trained on.

    Replay another trace with it: it has seen the future of this one.

    Raises EvictError if too few blocks are requested again to learn from, for a seed out of range, and
    without LightGBM; StorageError, before anything is learned, if `out` can be no folder.
    """
    _check_folder(Path(out))
    # a sample for each run of a request, which has a block at least, and one more where it splits a run
    settings = ReuseSettings(window=len(trace.blocks) + len(trace), first_fit=2**62)
    predictor = Reuse(trace.distinct, settings=settings, flat=trace.kind == "flat", seed=seed)
    for number, ids in enumerate(trace.requests):
        predictor.observe(ids, number, float(trace.time_s[number]))
        if progress is not None and number % 512 == 0:
            progress(number, len(trace))
    predictor.refit()
    if predictor.model is None:
        raise EvictError(
            f"{trace.name} has too few blocks that are requested again to learn from: give a longer "
            "trace, or use the policy lru"
        )
    trained_on = {**trace.summary(), "seed": seed}
    save_model(predictor.model, Path(out), trained_on)
    if progress is not None:
        progress(len(trace), len(trace))
    return trained_on


def train_continuation(
    dialogues: Sequence[Dialogue],
    out: str | Path,
    *,
    encoder: str | Path | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Train on one half of the dialogues to predict whether another prompt follows; test on the other half.

    Writes the model to the folder `out`. Returns what it was trained on, and `mcc`: Matthews' correlation on
    the held-out half, from which `gati evict synthesise` makes streams. Prompts are encoded as hashed words,
    or by an `encoder`: a folder with a sentence BERT, such as MiniLM. That takes long, so `progress` is
    called with the number of prompts that are encoded, and of all.

    Raises EvictError if all prompts, or none, are followed by another, for a seed out of range, and without a
    usable encoder; StorageError, before anything is learned, if `out` can be no folder.
    """
    check_seed(seed)
    _check_folder(Path(out))
    learned, held_out = halves(dialogues)
    prompts, goes_on = samples_of(learned)
    judged, followed = samples_of(held_out)
    model: ContinuationModel | EncodedContinuation
    if encoder is None:
        model = fit_continuation(prompts, goes_on, ContinuationSettings(seed=seed))
    else:
        from gati.evict.predict.encoded import PromptEncoder, fit_encoded

        tell = None if progress is None else _counted(progress, len(prompts) + len(judged))
        model = fit_encoded(prompts, goes_on, PromptEncoder(encoder, told=tell), seed)
    trained_on = {
        "dialogues": len(learned),
        "prompts": len(prompts),
        "goes_on": float(goes_on.mean()),
        "mcc": matthews(model.predict(judged) > 0.5, followed) if judged else 0.0,
        "seed": seed,
    }
    if isinstance(model, ContinuationModel):
        save_continuation(model, Path(out), trained_on)
    else:
        save_encoded(model, Path(out), trained_on)
    return trained_on


def _counted(progress: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """Adds up the counts that it is called with."""
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return tell


def _check_folder(out: Path) -> None:
    """Check that a folder can be written. Raises StorageError."""
    there = next((each for each in (out, *out.parents) if os.path.exists(each)), Path())
    if not there.is_dir():
        raise StorageError(f"cannot write the folder {out}: {there} is a file; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise StorageError(f"cannot write the folder {out}: {there} is not writable; name another")


def samples_of(dialogues: Sequence[Dialogue]) -> tuple[list[Prompts], NDArray[np.bool_]]:
    """Every prompt with its predecessors, and whether another prompt followed, [samples]."""
    prompts: list[Prompts] = []
    goes_on: list[bool] = []
    for dialogue in dialogues:
        found = prompts_of(dialogue.messages)
        prompts += found
        goes_on += [each.turn < len(found) for each in found]
    return prompts, np.array(goes_on, dtype=np.bool_)
