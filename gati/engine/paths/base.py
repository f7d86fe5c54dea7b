"""What the engine asks of a path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from gati.engine.batching import Answer, BatchedSegment


class RequestPath(ABC):
    """Network and lookups made ready on a backend. Any thread may ask, at any time, in inference mode."""

    compiled: ClassVar[bool] = False  # one graph, a request at a time
    overlapped: ClassVar[bool] = False  # lookups have cores or a stream of their own
    logits: bool  # whether the network ends with logits here

    @abstractmethod
    def answer(self, x: Tensor) -> Answer:
        """Class scores or probabilities [1, K] for `x` [1, ...], and where they come from."""

    def inline(self, x: Tensor) -> Answer:
        """As `answer`, without taking cores for lookups."""
        return self.answer(x)

    @abstractmethod
    def base(self, x: Tensor) -> Tensor:
        """Class scores [B, K] of the base model, which is executed in the same way, for `x` [B, ...]."""

    def pieces(self, *, early: bool) -> tuple[BatchedSegment, ...] | None:
        """The path of a batch in pieces, without lookups unless `early`; None if rows go one by one."""
        return None

    def open(self) -> None:  # noqa: B027 - most paths take nothing
        """Take cores or a stream; the first request does it, too."""

    def close(self) -> None:  # noqa: B027
        """Give back what `open` took; call it from the thread that made the requests."""
