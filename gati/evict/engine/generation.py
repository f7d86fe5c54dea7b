"""A generation request, and its state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from torch import Tensor

from gati.errors import GatiError, RequestError
from gati.evict.engine.pages import PageTable


class TooLongError(RequestError):
    """A prompt, with what may be generated, that exceeds the network's length or the budget."""


class Ending(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # an end token or a stop text
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled: the most likely at temperature 0, else at random from a seed."""

    temperature: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises RequestError for a temperature out of range."""
        if not 0.0 <= self.temperature <= 2.0:
            raise RequestError(f"temperature is {self.temperature:g}; give 0 to 2")


@dataclass(frozen=True)
class GenerationRequest:
    """The tokens of a prompt, and the maximum number of tokens to generate.

    `ends_early` says whether an end-of-text token ends the generation. `goes_on` is the probability that the
    conversation continues, for policies that use it. `keeps_logits` is for tests and measurements.
    """

    prompt: tuple[int, ...]
    most_tokens: int
    sampling: Sampling = Sampling()
    ends_early: bool = True
    goes_on: float | None = None
    keeps_logits: bool = False

    @property
    def longest(self) -> int:
        """The maximum number of tokens with keys and values; those of the last token are never read."""
        return len(self.prompt) + self.most_tokens - 1


class NextToken(NamedTuple):
    """An event for listeners: a token, or None at an end without one, and the reason if it ended."""

    token: int | None
    ending: Ending | None


@dataclass(eq=False)
class Generation:
    """One active request. Only the engine changes it; times are in seconds of the engine's clock."""

    request: GenerationRequest
    arrived_s: float
    listener: Callable[[NextToken], None] | None = None
    tokens: list[int] = field(default_factory=list)  # prompt and generated tokens
    turn_s: float = 0.0  # of those that wait, and of prompts that are computed, the lowest goes first
    computed: int = 0  # leading tokens whose keys and values are in pages
    names: list[bytes] | None = None  # of its pages, once computed
    table: PageTable | None = None
    hit_tokens: int = 0  # cached tokens of the prompt at first admission
    admitted: bool = False
    first_token_s: float | None = None
    ending: Ending | None = None
    error: GatiError | None = None
    logits: list[Tensor] = field(default_factory=list)
    random: np.random.Generator | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        if self.request.sampling.temperature > 0.0:
            self.random = np.random.default_rng(self.request.sampling.seed)

    @property
    def generated(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    def tell(self, token: int | None) -> None:
        """Call the listener with a token, or with the end."""
        if self.listener is not None:
            self.listener(NextToken(token, self.ending))
