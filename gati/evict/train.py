"""`gati evict train`: a predictor fitted to a whole trace, to start from instead of nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gati.errors import EvictError
from gati.evict.predict.reuse import Reuse, ReuseSettings
from gati.evict.predict.stored import save_model
from gati.evict.trace.records import Trace

__all__ = ["train"]


def train(
    trace: Trace, out: str | Path, *, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Fit `reuse` to all of `trace`, write it to the folder `out`, and return what it was trained on.

    Whoever replays the same trace with it looks at the future; replay another one.

    Raises EvictError where no block returns, so that there is nothing to learn, and without LightGBM.
    """
    settings = ReuseSettings(window=max(4 * len(trace) + len(trace.blocks) // 4, 1_000), first_fit=2**62)
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
