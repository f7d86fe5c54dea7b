"""Batches: hits leave immediately, the rest continue as a smaller batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gati.engine.exits import BASE, Lookup, doubtful_class, doubtful_score

Answer = tuple[Tensor, str]  # class scores or probabilities [1, K], and the exit that returned them


class BatchStage(NamedTuple):
    """A segment and the lookup at its end; `batched` says which carried tensors have one row per input."""

    run: Callable[..., tuple[Tensor, ...]]
    lookup: Lookup
    threshold: float
    exit: str
    batched: tuple[bool, ...]


@dataclass(frozen=True)
class SegmentOutcome:
    """The outcome of one segment for a batch; rows that are neither answered nor unsure continue.

    A row is unsure if its score is near the threshold, or if the two largest values of its answer are nearly
    equal. It must be computed alone, because kernels for batches round differently.
    """

    answers: dict[int, Answer]
    unsure: frozenset[int]
    carried: tuple[Tensor, ...] = ()
    batched: tuple[bool, ...] = ()

    def row(self, row: int) -> tuple[Tensor, ...]:
        """The next segment's inputs for one row."""
        return tuple(
            tensor[row : row + 1] if is_batched else tensor
            for tensor, is_batched in zip(self.carried, self.batched, strict=True)
        )


@dataclass(frozen=True)
class BatchedSegment:
    """One segment for batches; `takes_rows` says which of its inputs have one row per input."""

    run: Callable[[tuple[Tensor, ...]], SegmentOutcome]
    takes_rows: tuple[bool, ...]


def segments_of(
    stages: Sequence[BatchStage], last: Callable[..., Tensor], tolerance: float
) -> tuple[BatchedSegment, ...]:
    """The path of a batch, segment by segment. Answers are on the CPU, where each row's exit is decided."""

    def through(stage: BatchStage) -> Callable[[tuple[Tensor, ...]], SegmentOutcome]:
        def run(carried: tuple[Tensor, ...]) -> SegmentOutcome:
            carried = stage.run(*carried)
            probabilities, scores = (result.cpu() for result in stage.lookup(carried[0]))
            hits = scores >= stage.threshold  # False for NaN
            doubtful = doubtful_score(scores, stage.threshold, tolerance) | (
                hits & doubtful_class(probabilities, tolerance)
            )
            return SegmentOutcome(
                _answers(probabilities, (hits & ~doubtful).tolist(), stage.exit),
                frozenset(doubtful.nonzero().flatten().tolist()),
                carried,
                stage.batched,
            )

        return run

    def end(carried: tuple[Tensor, ...]) -> SegmentOutcome:
        scores = last(*carried).cpu()
        doubtful = doubtful_class(scores, tolerance) if scores.shape[0] > 1 else _none(scores)
        return SegmentOutcome(
            _answers(scores, (~doubtful).tolist(), BASE), frozenset(doubtful.nonzero().flatten().tolist())
        )

    takes = [(True,), *(stage.batched for stage in stages)]
    runs = [*(through(stage) for stage in stages), end]
    return tuple(BatchedSegment(run, rows) for run, rows in zip(runs, takes, strict=True))


def answer_rows(segments: Sequence[BatchedSegment], x: Tensor) -> list[Answer | None]:
    """The answer for each row of `x` [B, ...]; None for a row that must be computed alone."""
    answers: list[Answer | None] = [None] * x.shape[0]
    waiting = list(range(x.shape[0]))  # original row of each row still in the batch
    carried: tuple[Tensor, ...] = (x,)
    for segment in segments:
        if not waiting:
            break
        outcome = segment.run(carried)
        for row, answer in outcome.answers.items():
            answers[waiting[row]] = answer
        stay = [
            row for row in range(len(waiting)) if row not in outcome.answers and row not in outcome.unsure
        ]
        carried = outcome.carried
        if len(stay) < len(waiting):
            carried = _rows(carried, outcome.batched, stay)
            waiting = [waiting[row] for row in stay]
    return answers


def rows_of(x: Tensor) -> list[Tensor]:
    """`x` [B, ...] as B views [1, ...]."""
    return [x[row : row + 1] for row in range(x.shape[0])]


def _none(scores: Tensor) -> Tensor:
    return torch.zeros(scores.shape[0], dtype=torch.bool, device=scores.device)


def _answers(values: Tensor, sure: Sequence[bool], exit: str) -> dict[int, Answer]:
    return {row: (values[row : row + 1], exit) for row, is_sure in enumerate(sure) if is_sure}


def _rows(carried: tuple[Tensor, ...], batched: Sequence[bool], rows: Sequence[int]) -> tuple[Tensor, ...]:
    if not carried:
        return carried
    index = torch.tensor(rows, dtype=torch.int64, device=carried[0].device)
    return tuple(
        tensor.index_select(0, index) if is_batched else tensor
        for tensor, is_batched in zip(carried, batched, strict=True)
    )
