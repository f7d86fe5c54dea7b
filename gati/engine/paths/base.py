"""The interface between the engine and its paths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from gati.engine.batching import Answer, BatchedSegment


class RequestPath(ABC):
    """Network and lookups prepared on a backend. Thread-safe; call it in inference mode."""

    compiled: ClassVar[bool] = False  # one graph, one request at a time
    overlapped: ClassVar[bool] = False  # lookups have cores or a stream of their own
    replays: ClassVar[bool] = False  # single requests, which are copied from wherever they are, are faster
    logits: bool  # whether `base` returns logits

    @abstractmethod
    def answer(self, x: Tensor) -> Answer:
        """Class scores or probabilities [1, K] for `x` [1, ...], and the exit that they come from."""

    def inline(self, x: Tensor) -> Answer:
        """As `answer`, without taking cores for lookups."""
        return self.answer(x)

    @abstractmethod
    def base(self, x: Tensor) -> Tensor:
        """Class scores [B, K] of the base model, which runs in the same way, for `x` [B, ...]."""

    def pieces(self, *, early: bool) -> tuple[BatchedSegment, ...] | None:
        """The path of a batch in pieces, without lookups unless `early`; None if rows run one by one."""
        return None

    def open(self) -> None:  # noqa: B027 - most paths take nothing
        """Take cores or a stream; otherwise the first request does it."""

    def close(self) -> None:  # noqa: B027
        """Release what `open` took; call it from the thread that made the requests."""
