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
    """Tokens of a prompt, and how many may follow.

    `ends_early` says whether the token that ends a text ends the generation. `goes_on` is how probable it is
    that the conversation goes on, for policies that ask. `keeps_logits` is for tests and measurements.
    """

    prompt: tuple[int, ...]
    most_tokens: int
    sampling: Sampling = Sampling()
    ends_early: bool = True
    goes_on: float | None = None
    keeps_logits: bool = False


class NextToken(NamedTuple):
    """What a listener is told: a token, or None at an end without one, and how it ended, if it did."""

    token: int | None
    ending: Ending | None


@dataclass(eq=False)
class Generation:
    """One request under way. The engine alone changes it; times are of the engine's clock, in seconds."""

    request: GenerationRequest
    arrived_s: float
    listener: Callable[[NextToken], None] | None = None
    tokens: list[int] = field(default_factory=list)  # prompt and what was generated
    computed: int = 0  # leading tokens whose keys and values are in pages
    names: list[bytes] | None = None  # of its pages, once somebody has looked for them
    table: PageTable | None = None
    hit_tokens: int = 0  # of the prompt, found when it was first admitted
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
    def longest(self) -> int:
        """The most tokens whose keys and values it may need; those of the last token are never read."""
        return len(self.request.prompt) + self.request.most_tokens - 1

    @property
    def time_to_first_token_s(self) -> float | None:
        """From its arrival on."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    def tell(self, token: int | None) -> None:
        """Tell the listener of a token, or of the end."""
        if self.listener is not None:
            self.listener(NextToken(token, self.ending))
