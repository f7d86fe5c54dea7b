"""The generations of one API request, read by the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import NamedTuple

from gati.errors import UnavailableError
from gati.evict.engine.engine import PrefixEngine
from gati.evict.engine.generation import Ending, Generation, NextToken
from gati.evict.engine.tokens import Vocabulary
from services.completions.asking import AskedCompletion


class TextWriter:
    """Turns tokens into text. It holds back incomplete characters, and text that may begin a stop.

    `stopped` means that one of `stops` was found; it is not part of the text.
    """

    def __init__(self, write: Callable[[int], str], stops: Sequence[str]) -> None:
        self._write = write
        self._stops = stops
        self._held = ""
        self.stopped = False

    def add(self, token: int, *, last: bool) -> str:
        """Return the text to send after this token. After the last token, nothing is held back."""
        if self.stopped:
            return ""
        text = self._held + self._write(token)
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        kept = 0 if last else self._possible(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _possible(self, text: str) -> int:
        """The number of trailing characters that may begin a stop."""
        longest = max((len(stop) for stop in self._stops), default=1)
        for count in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0


class CompletionPiece(NamedTuple):
    """Text of choice number `choice` (one per prompt), and why the choice ended; None if it has not."""

    choice: int
    text: str
    finish_reason: str | None


class RunningCompletion:
    """A context manager that cancels unfinished generations when it is left."""

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
        self._tokens = tokens
        self._writers: list[TextWriter] = []
        self._counts: list[int] = []  # tokens that each writer was given
        self.generations: list[Generation] = []

    def __enter__(self) -> RunningCompletion:
        """Submit all prompts, or none. Raises the engine's error if it refuses one, and the tokenizer's."""
        loop = asyncio.get_running_loop()

        def tell(index: int, token: NextToken) -> None:
            loop.call_soon_threadsafe(self._told.put_nowait, (index, token))

        try:
            for index, request in enumerate(self._asked.requests):
                self.generations.append(self._engine.submit(request, partial(tell, index)))
                write = self._tokens.writer(request.prompt)  # the engine has checked its tokens
                self._writers.append(TextWriter(write, self._asked.stops))
                self._counts.append(0)
        except BaseException:  # of any type: what the others generate would not be read
            self._cancel()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel()

    async def pieces(self) -> AsyncIterator[CompletionPiece]:
        """Yield texts as they are generated. Raises the error of a failed generation.

        The first token of a choice is told even if its text is incomplete, so that clients see when it came.
        """
        left = len(self.generations)
        begun: set[int] = set()
        while left:
            index, (token, ending) = await self._told.get()
            generation, writer = self.generations[index], self._writers[index]
            if writer.stopped:
                continue
            if ending in (Ending.FAILED, Ending.CANCELLED):
                raise generation.error or UnavailableError("the generation was cancelled")
            first = index not in begun
            if first:
                begun.add(index)
                self._first_token(generation)
            text = ""
            if token is not None:
                self._counts[index] += 1
                text = writer.add(token, last=ending is not None)
            if writer.stopped and ending is None:
                self._engine.cancel(generation)
            reason = "stop" if writer.stopped else None if ending is None else ending.value
            left -= reason is not None
            if text or reason or first:
                yield CompletionPiece(index, text, reason)

    def usage(self) -> dict[str, object]:
        """Return token counts, as OpenAI defines them.

        Tokens that the engine generates before it learns of a stop are not counted: their number varies.
        """
        prompt = sum(len(each.request.prompt) for each in self.generations)
        generated = sum(self._counts)
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
