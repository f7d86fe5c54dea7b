"""The interface between the engine and its paths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from gati.engine.batching import Answer, BatchedSegment


class RequestPath(ABC):
    """Network and lookups, prepared on a backend. Thread-safe; call it in inference mode."""

    compiled: ClassVar[bool] = False  # one graph, with batch size 1
    overlapped: ClassVar[bool] = False  # lookups have their own cores or stream
    replays: ClassVar[bool] = False  # single requests are faster, and may be on any device
    logits: bool  # whether `base` returns logits

    @abstractmethod
    def answer(self, x: Tensor) -> Answer:
        """Class scores or probabilities [1, K] for `x` [1, ...], and the exit that returned them."""

    def inline(self, x: Tensor) -> Answer:
        """As `answer`, with all lookups inline: reserves no cores or stream."""
        return self.answer(x)

    @abstractmethod
    def base(self, x: Tensor) -> Tensor:
        """Class scores [B, K] of the base model for `x` [B, ...], computed on the same backend."""

    def pieces(self, *, early: bool) -> tuple[BatchedSegment, ...] | None:
        """The segments of a batch, without lookups unless `early`; None if rows run one by one."""
        return None

    def open(self) -> None:  # noqa: B027 - most paths have nothing to open
        """Reserve cores or a stream; otherwise the first request does it."""

    def close(self) -> None:  # noqa: B027
        """Release the cores or stream; call it from the thread that made the requests."""
