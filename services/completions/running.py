"""The generations of one request to the API, followed from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import NamedTuple

from gati.errors import GatiError, UnavailableError
from gati.evict.engine.engine import PrefixEngine
from gati.evict.engine.generation import Ending, Generation, NextToken
from gati.evict.engine.tokens import Vocabulary
from services.completions.asking import AskedCompletion
from services.completions.writing import TextWriter

__all__ = ["CompletionPiece", "RunningCompletion"]


class CompletionPiece(NamedTuple):
    """Some text of choice number `choice`, one of which there is for each prompt; why it ended, if it did."""

    choice: int
    text: str
    finish_reason: str | None


class RunningCompletion:
    """A context manager: whatever still generates when it is left is cancelled."""

    def __init__(
        self,
        engine: PrefixEngine,
        tokens: Vocabulary,
        asked: AskedCompletion,
        first_token: Callable[[Generation], None],
    ) -> None:
        self._engine = engine
        self._asked = asked
        self._first_token = first_token
        self._told: asyncio.Queue[tuple[int, NextToken]] = asyncio.Queue()
        self._writers = [TextWriter(tokens.writer(), asked.stops) for _ in asked.requests]
        self.generations: list[Generation] = []

    def __enter__(self) -> RunningCompletion:
        """Submit every prompt, or none. Raises what the engine refuses with."""
        loop = asyncio.get_running_loop()

        def tell(index: int, token: NextToken) -> None:
            loop.call_soon_threadsafe(self._told.put_nowait, (index, token))

        try:
            for index, request in enumerate(self._asked.requests):
                self.generations.append(self._engine.submit(request, partial(tell, index)))
        except GatiError:
            self._cancel()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel()

    async def pieces(self) -> AsyncIterator[CompletionPiece]:
        """Texts as they come. Raises what a generation failed with."""
        left = len(self.generations)
        begun: set[int] = set()
        while left:
            index, (token, ending) = await self._told.get()
            generation, writer = self.generations[index], self._writers[index]
            if writer.stopped:
                continue
            if ending in (Ending.FAILED, Ending.CANCELLED):
                raise generation.error or UnavailableError("the generation was cancelled")
            if index not in begun:
                begun.add(index)
                self._first_token(generation)
            text = "" if token is None else writer.add(token, last=ending is not None)
            if writer.stopped and ending is None:
                self._engine.cancel(generation)
            reason = "stop" if writer.stopped else None if ending is None else ending.value
            left -= reason is not None
            if text or reason:
                yield CompletionPiece(index, text, reason)

    def usage(self) -> dict[str, object]:
        """Tokens, as OpenAI counts them."""
        prompt = sum(len(each.request.prompt) for each in self.generations)
        generated = sum(len(each.generated) for each in self.generations)
        cached = sum(each.hit_tokens for each in self.generations)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _cancel(self) -> None:
        for generation in self.generations:
            if generation.ending is None:
                self._engine.cancel(generation)
