"""Predictors by what users write: `reuse`, `oracle`, `noise:0.3`, or the folder of a trained model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gati.errors import EvictError
from gati.evict.predict.base import Predictor
from gati.evict.predict.continuation_stored import load_continuation
from gati.evict.predict.conversing import ContinuationOracle, KnownContinuation
from gati.evict.predict.oracle import Lognormal, Noisy, Oracle
from gati.evict.predict.reuse import Reuse
from gati.evict.predict.stored import load_model
from gati.evict.trace.records import Trace

PREDICTORS = ("reuse", "oracle", "noise:SHARE", "lognormal:SIGMA", "the folder that gati evict train wrote")

Maker = Callable[[int, int], Predictor]  # capacity and seed to a new predictor

Continuation = str | Path | NDArray[np.float64]  # the folder of a trained model, or probabilities [requests]


def continuation_source(trace: Trace, given: Continuation | None, *, gap_s: float) -> Maker:
    """The continuation probabilities of the conversations of `trace`. Raises EvictError."""
    if given is None:
        raise EvictError(
            "lpc and laru+lpc need a continuation model; give the folder that gati evict train "
            "--dialogues wrote (--continuation DIR)"
        )
    if isinstance(given, np.ndarray):
        known = given
        if known.shape != (len(trace),):
            raise EvictError(f"{known.shape} probabilities for {len(trace)} requests; give one per request")
    elif trace.talks is None:
        raise EvictError(
            f"{trace.name} has lines without user prompts (`prompts`), which lpc needs; make a trace with "
            "gati evict synthesise"
        )
    else:
        known = load_continuation(given).predict([talk.prompts for talk in trace.talks])
    return lambda capacity, seed: KnownContinuation(known, gap_s)


def continuation_oracle(trace: Trace, *, gap_s: float) -> Maker:
    """An oracle of which conversations of `trace` continue. Raises EvictError if that is unknown."""
    labels = [talk.goes_on for talk in trace.talks or ()]
    if not labels or None in labels:
        raise EvictError(
            f"{trace.name} has requests without goes_on, which lpc-oracle needs; leave out lpc-oracle"
        )
    goes_on = np.array(labels, dtype=np.bool_)
    return lambda capacity, seed: ContinuationOracle(goes_on, gap_s)


def predictor_named(
    name: str, trace: Trace | None = None, *, flat: bool = False, apart: bool = False
) -> Maker:
    """A factory of predictors by name; oracles need the `trace`. `apart`: they fit in the background.

    Raises EvictError for unknown names.
    """
    if name == "reuse":
        return lambda capacity, seed: Reuse(capacity, flat=flat, apart=apart, seed=seed)
    kind, _, value = name.partition(":")
    if kind in ("oracle", "noise", "lognormal") and bool(value) == (kind != "oracle"):
        if trace is None:
            raise EvictError(f"predictor {name!r} needs a whole trace in advance; use reuse")
        if kind == "oracle":
            return lambda capacity, seed: Oracle(trace, seed=seed)
        amount = _amount(name, value, 1.0 if kind == "noise" else float("inf"))
        made = Noisy if kind == "noise" else Lognormal
        return lambda capacity, seed: made(trace, amount, seed=seed)
    if Path(name).is_dir():
        model = load_model(Path(name))
        return lambda capacity, seed: Reuse(capacity, model=model, flat=flat, apart=apart, seed=seed)
    raise EvictError(f"unknown predictor {name!r}; choose one of {', '.join(PREDICTORS)}")


def _amount(name: str, text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= most:
        raise EvictError(f"predictor {name!r}: {text!r} must be a number from 0 to {most:g}, as in noise:0.3")
    return value
