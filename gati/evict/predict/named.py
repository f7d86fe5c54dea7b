"""Predictors by what users write: `reuse`, `oracle`, `noise:0.3`, or the folder of a trained model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gati.errors import EvictError
from gati.evict.predict.base import Predictor
from gati.evict.predict.oracle import Lognormal, Noisy, Oracle
from gati.evict.predict.reuse import Reuse
from gati.evict.predict.stored import load_model
from gati.evict.trace.records import Trace

__all__ = ["PREDICTORS", "Maker", "predictor_named"]

PREDICTORS = ("reuse", "oracle", "noise:SHARE", "lognormal:SIGMA", "the folder that gati evict train wrote")

Maker = Callable[[int, int], Predictor]  # capacity and seed to a new predictor


def predictor_named(name: str, trace: Trace | None = None, *, flat: bool = False) -> Maker:
    """A factory for predictors of a kind; oracles need the `trace`. Raises EvictError for others."""
    if name == "reuse":
        return lambda capacity, seed: Reuse(capacity, flat=flat, seed=seed)
    kind, _, value = name.partition(":")
    if kind in ("oracle", "noise", "lognormal") and bool(value) == (kind != "oracle"):
        if trace is None:
            raise EvictError(f"predictor {name!r} knows a trace in advance, and there is none; use reuse")
        if kind == "oracle":
            return lambda capacity, seed: Oracle(trace, seed=seed)
        amount = _amount(name, value, 1.0 if kind == "noise" else float("inf"))
        made = Noisy if kind == "noise" else Lognormal
        return lambda capacity, seed: made(trace, amount, seed=seed)
    if Path(name).is_dir():
        model = load_model(Path(name))
        return lambda capacity, seed: Reuse(capacity, model=model, flat=flat, seed=seed)
    raise EvictError(f"unknown predictor {name!r}; there are {', '.join(PREDICTORS)}")


def _amount(name: str, text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= most:
        raise EvictError(f"predictor {name!r}: {text!r} must be a number from 0 to {most:g}, as in noise:0.3")
    return value
