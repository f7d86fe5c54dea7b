"""Open-loop clients: they send requests at a fixed rate, whatever the outcome of earlier ones."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx

__all__ = ["Asking", "Question", "capacity"]

_MOST_OUTSTANDING = 512  # later ones wait for an earlier one to come back
_LARGEST_DEBT_S = 1.0
_AT_ONCE = 16  # requests, to find the capacity
_PAUSE_S = 0.02  # after a refusal
_WATCH_S = 0.05

# Told a question and its reply, or what became of it instead, and how many seconds that took.
TakeIn = Callable[["Question", "httpx.Response | httpx.HTTPError", float], None]


@dataclass(frozen=True)
class Question:
    """A request that may be sent again and again. `number` is of its input."""

    number: int
    model: str
    body: bytes


class Asking:
    """Asks `rate` times a second while a block lasts, each time one of the `questions`, drawn by chance.

    It has a thread of its own, in which `take_in` is called. The block ends when everything that was asked
    has come back, and no later than `hang_s`. `lag_s` is the longest that this thread itself was late.
    """

    def __init__(
        self,
        url: str,
        questions: Sequence[Question],
        take_in: TakeIn,
        *,
        rate: float,
        hang_s: float,
        seed: int,
    ) -> None:
        self._url, self._questions, self._take_in = url, questions, take_in
        self._rate, self._hang_s = rate, hang_s
        self._dice = random.Random(seed)
        self._over = threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self.lag_s = 0.0

    def __enter__(self) -> Self:
        self._asking = self._thread.submit(lambda: asyncio.run(self._ask()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.shutdown()
        self._asking.result()

    async def _watch(self) -> None:
        while True:
            due_s = time.monotonic() + _WATCH_S
            await asyncio.sleep(_WATCH_S)
            self.lag_s = max(self.lag_s, time.monotonic() - due_s)

    async def _ask(self) -> None:
        watching = asyncio.create_task(self._watch())
        room = asyncio.Semaphore(_MOST_OUTSTANDING)
        async with _client(self._url, self._hang_s) as client, asyncio.TaskGroup() as asked:
            due_s = time.monotonic()
            while not self._over.is_set():
                await room.acquire()
                task = asked.create_task(_one(client, self._dice.choice(self._questions), self._take_in))
                task.add_done_callback(lambda _: room.release())
                # Poisson; what this machine was too busy to send for longer is not sent later
                due_s = max(due_s + self._dice.expovariate(self._rate), time.monotonic() - _LARGEST_DEBT_S)
                await asyncio.sleep(due_s - time.monotonic())
        watching.cancel()


def capacity(url: str, questions: Sequence[Question], seconds: float) -> float:
    """Requests a second that are answered while some are always under way, beside the clients."""

    async def measure() -> float:
        answered = 0

        def take_in(question: Question, reply: httpx.Response | httpx.HTTPError, took_s: float) -> None:
            nonlocal answered
            if isinstance(reply, httpx.HTTPError):
                raise reply
            answered += reply.status_code == 200

        async def ask(client: httpx.AsyncClient, seed: int) -> None:
            dice = random.Random(seed)
            while time.monotonic() < end_s:
                before = answered
                await _one(client, dice.choice(questions), take_in)
                if answered == before:
                    await asyncio.sleep(_PAUSE_S)

        async with _client(url, 60.0) as client, asyncio.TaskGroup() as asking:
            began_s = time.monotonic()
            end_s = began_s + seconds
            for seed in range(_AT_ONCE):
                asking.create_task(ask(client, seed))
        return answered / (time.monotonic() - began_s)

    return asyncio.run(measure())


def _client(url: str, timeout_s: float) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=_AT_ONCE)
    return httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits)


async def _one(client: httpx.AsyncClient, question: Question, take_in: TakeIn) -> None:
    began_s = time.monotonic()
    reply: httpx.Response | httpx.HTTPError
    try:
        reply = await client.post(
            f"/v2/models/{question.model}/infer",
            content=question.body,
            headers={"Content-Type": "application/json"},
        )
    except httpx.HTTPError as error:
        reply = error
    take_in(question, reply, time.monotonic() - began_s)
