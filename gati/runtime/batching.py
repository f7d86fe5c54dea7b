"""Batches: inputs that hit leave at once, the rest go on as a smaller batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gati.runtime.exits import BASE, Lookup, doubtful_class, doubtful_score

__all__ = ["Stage", "answer_rows", "rows_of"]


class Stage(NamedTuple):
    """A segment and the lookup at its end; `batched` tells which carried tensors have a row an input."""

    run: Callable[..., tuple[Tensor, ...]]
    lookup: Lookup
    threshold: float
    exit: str
    batched: tuple[bool, ...]


def answer_rows(
    stages: Sequence[Stage], last: Callable[..., Tensor], x: Tensor, tolerance: float
) -> list[tuple[Tensor, str] | None]:
    """Class scores or probabilities [1, K] with their exit, for each row of `x` [B, ...].

    None marks a row too close to call (a score near the threshold, or two classes nearly equal): the caller
    works it out alone, because the kernels for batches round differently.
    """
    answers: list[tuple[Tensor, str] | None] = [None] * x.shape[0]
    waiting = list(range(x.shape[0]))  # original row of each row still in the batch
    carried: tuple[Tensor, ...] = (x,)
    for stage in stages:
        if not waiting:
            return answers
        carried = stage.run(*carried)
        probabilities, scores = stage.lookup(carried[0])
        hits = scores >= stage.threshold  # False for NaN
        doubtful = doubtful_score(scores, stage.threshold, tolerance) | (
            hits & doubtful_class(probabilities, tolerance)
        )
        leaving = (hits | doubtful).tolist()
        if not any(leaving):
            continue
        _assign(answers, waiting, probabilities, (hits & ~doubtful).tolist(), stage.exit)
        stay = [row for row, leaves in enumerate(leaving) if not leaves]
        carried = _rows(carried, stage.batched, stay)
        waiting = [waiting[row] for row in stay]
    if waiting:
        scores = last(*carried)
        _assign(answers, waiting, scores, (~doubtful_class(scores, tolerance)).tolist(), BASE)
    return answers


def rows_of(x: Tensor) -> list[Tensor]:
    """`x` [B, ...] as B views [1, ...]."""
    return [x[row : row + 1] for row in range(x.shape[0])]


def _assign(
    answers: list[Any], waiting: Sequence[int], values: Tensor, sure: Sequence[bool], exit: str
) -> None:
    for row, (original, is_sure) in enumerate(zip(waiting, sure, strict=True)):
        if is_sure:
            answers[original] = (values[row : row + 1], exit)


def _rows(carried: tuple[Tensor, ...], batched: Sequence[bool], rows: Sequence[int]) -> tuple[Tensor, ...]:
    index = torch.tensor(rows, dtype=torch.int64, device=carried[0].device)
    return tuple(
        tensor.index_select(0, index) if is_batched else tensor
        for tensor, is_batched in zip(carried, batched, strict=True)
    )
