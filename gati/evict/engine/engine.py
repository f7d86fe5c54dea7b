"""`PrefixEngine`: generates for several requests concurrently, and reuses cached prefixes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gati.errors import EvictError, GatiError, OverloadError, RequestError, UnavailableError
from gati.evict.embed.pool import PagePool
from gati.evict.engine.access import AccessFile, PrefixAccess
from gati.evict.engine.decoder import Decoder
from gati.evict.engine.generation import Ending, Generation, GenerationRequest, NextToken, TooLongError
from gati.evict.engine.pages import KeptPrefixes, PrefixPages, page_bytes_for_tokens
from gati.evict.engine.planning import PlannedStep, plan_step
from gati.evict.engine.turns import WaitingLine, work_of

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class PrefixEngineLimits:
    """Limits of an engine: running requests, queued requests, prompt tokens per step."""

    most_running: int = 16
    most_waiting: int = 256
    chunk_tokens: int = 256

    def __post_init__(self) -> None:
        """Raises EvictError for limits below one."""
        if min(self.most_running, self.most_waiting, self.chunk_tokens) < 1:
            raise EvictError(f"every limit of an engine must be at least 1: {self}")


def pool_for(decoder: Decoder, budget_bytes: int, page_tokens: int = 16) -> PagePool:
    """Make a pool of that budget for one engine. Raises EvictError if it is less than one page."""
    if page_tokens < 1:
        raise EvictError(f"page_tokens is {page_tokens}; give at least 1")
    page = page_bytes_for_tokens(decoder.settings, page_tokens, decoder.lm_head.weight.dtype)
    if budget_bytes < page:
        raise EvictError(f"a budget of {budget_bytes} bytes is less than one page of {page} bytes; give more")
    return PagePool(page, budget_bytes // page * page)


class PrefixEngine:
    """One network, the pages of a pool, and the active requests.

    >>> from gati.evict.engine.decoder import Decoder, DecoderSettings
    >>> from gati.evict.engine.generation import GenerationRequest
    >>> decoder = Decoder.random(DecoderSettings(layers=1, width=32, heads=4, inner_width=48), seed=0)
    >>> engine = PrefixEngine(decoder, pool_for(decoder, 2**20))
    >>> generation = engine.submit(GenerationRequest(prompt=tuple(b"hello"), most_tokens=3))
    >>> engine.run_until_idle()
    >>> len(generation.generated)
    3

    A request takes all pages that it can come to need when it is admitted, so that none waits half-way. Any
    thread may `submit` and `cancel`, which never wait for a step; one at a time calls `step`. When the pool's
    budget shrinks below what is in use, the requests admitted last begin anew later.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: PagePool,
        kept: KeptPrefixes | None = None,
        limits: PrefixEngineLimits | None = None,
        *,
        page_tokens: int = 16,
        share: float = 1.0,
        sink: AccessFile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Join the pool. Raises EvictError for an unknown policy or predictor, and sizes that do not fit."""
        self.decoder = decoder
        self.limits = limits or PrefixEngineLimits()
        self._growth = decoder.settings.cost_growth
        self._sink = sink
        self._clock = clock
        self._pool = pool
        self._pages = PrefixPages(
            pool,
            decoder.settings,
            kept or KeptPrefixes(),
            page_tokens=page_tokens,
            dtype=decoder.lm_head.weight.dtype,
        )
        self._arrived: deque[Generation] = deque()
        self._cancelled: deque[Generation] = deque()
        self._waiting = WaitingLine()
        self._running: list[Generation] = []  # in the order of their admission
        self._stepping = threading.RLock()
        # guards requests, pages and counts; acquired after `_stepping`, and free while a batch is computed
        self._changing = threading.RLock()
        self._intake = threading.Lock()  # guards `_arrived` and `_closed`
        self._work = threading.Event()
        self._closed = False
        self._counts = {"requests": 0, "prompt_tokens": 0, "computed_tokens": 0, "generated_tokens": 0}
        self._counts |= {"cancelled": 0, "failed": 0, "restarted": 0, "steps": 0}
        pool.join(self, share=share)

    @property
    def pages(self) -> int:
        """Number of pages it holds from the pool."""
        return self._pages.pages

    def submit(
        self, request: GenerationRequest, listener: Callable[[NextToken], None] | None = None
    ) -> Generation:
        """Queue a request; the stepping thread calls `listener` with each token as it is generated.

        Raises RequestError for tokens outside the vocabulary and for requests that can never fit,
        OverloadError if the queue is full, UnavailableError after `close`.
        """
        with self._intake:
            if self._closed:
                raise UnavailableError("the engine is closed")
            self._check(request)
            waiting = len(self._arrived) + len(self._waiting)
            if waiting >= self.limits.most_waiting:
                raise OverloadError(
                    f"the queue is full: {waiting} requests are waiting", retry_after_s=_RETRY_AFTER_S
                )
            generation = Generation(request, self._clock(), listener)
            self._arrived.append(generation)
        self._work.set()
        return generation

    def cancel(self, generation: Generation) -> None:
        """Cancel a request; the next step frees its pages. Does nothing if it has already ended."""
        self._cancelled.append(generation)
        self._work.set()

    def step(self) -> bool:
        """Admit requests, compute one batch and call the listeners; False if there was nothing to do.

        If this fails or is interrupted, keys and values may be half written: the engine and all requests end.
        """
        try:
            with self._stepping:
                return self._step()
        except BaseException:  # also Ctrl-C
            self._abandon(UnavailableError("the engine failed; its log has the cause"))
            raise

    def run_until_idle(self) -> None:
        """Step until every request has ended."""
        while self.step():
            continue

    def wait_for_work(self) -> None:
        """Wait for a request, a cancellation, or `wake`."""
        self._work.wait()

    def wake(self) -> None:
        """Make `wait_for_work` return."""
        self._work.set()

    def close(self, error: GatiError | None = None) -> None:
        """End all requests, with `error` if there is one, and return every page to the pool."""
        with self._stepping, self._changing:
            if self._shut():
                return
            for generation in [*self._running, *self._waiting]:
                generation.error = error
                self._finish(generation, Ending.CANCELLED if error is None else Ending.FAILED)
            self._waiting.clear()
            self._pages.unlink()
        self._pool.leave(self)

    def allow(self, pages: int) -> None:
        """Hold at most `pages` pages of the pool; waits for the current step to end."""
        with self._stepping, self._changing:
            if self._closed:
                pages = 0
                if not self._pages.pages:
                    return
            while self._pages.used > pages:
                self._restart(self._running[-1])
            self._pages.hold(pages)
            self._work.set()

    def figures(self) -> Mapping[str, Any]:
        """Counters, and the current numbers of requests and pages; does not wait for a batch."""
        with self._changing:
            pages = self._pages
            return {
                **self._counts,
                **{f"pages_{name}": count for name, count in pages.counts.items()},
                "running": len(self._running),
                "waiting": len(self._waiting) + len(self._arrived),
                "pages": {"held": pages.pages, "used": pages.used, "cached": pages.cached},
                "policy": pages.figures(),
            }

    # ----------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        with self._changing:
            self._work.clear()
            self._take_in()
            self._admit()
            planned = plan_step(self._running, self._pages, self.limits.chunk_tokens)
        if planned is None:
            return False
        began_s = self._clock()
        logits = self.decoder(planned.batch, self._pages.cache)
        with self._changing:
            self._waiting.took(self._clock() - began_s, planned.work(self._growth))
            self._sample(planned, logits)
        return True

    def _abandon(self, error: GatiError) -> None:
        """As `close`, whatever a step left behind: all requests end with `error`."""
        with ExitStack() as told:  # all of them, whatever fails: a listener may have made the step fail
            with self._stepping, self._changing:
                self._shut()
                for generation in [*self._running, *self._waiting]:
                    generation.error, generation.ending = error, Ending.FAILED
                    told.callback(generation.tell, None)
                self._running.clear()
                self._waiting.clear()
                self._pages.surrender()
            self._pool.leave(self)

    def _shut(self) -> bool:
        """Accept no further requests; returns whether it was already closed."""
        with self._intake:
            was, self._closed = self._closed, True
        if not was:
            self._take_in()
            if self._sink is not None:
                self._sink.close()
        return was

    def _check(self, request: GenerationRequest) -> None:
        settings = self.decoder.settings
        if not request.prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if request.most_tokens < 1:
            raise RequestError(f"max_tokens is {request.most_tokens}; give at least 1")
        if request.goes_on is not None and not 0.0 <= request.goes_on <= 1.0:
            raise RequestError(f"goes_on is {request.goes_on}; give a probability from 0 to 1")
        if request.longest > settings.length:
            raise TooLongError(
                f"the prompt of {len(request.prompt)} tokens and max_tokens {request.most_tokens} exceed the "
                f"network's length of {settings.length} tokens; send a shorter prompt or lower max_tokens"
            )
        self._check_budget(request)
        # last: a server's event loop waits for this, and only now the prompt is known not to be too long
        if min(request.prompt) < 0 or max(request.prompt) >= settings.vocabulary:
            raise RequestError(f"a token of the prompt is not between 0 and {settings.vocabulary - 1}")

    def _check_budget(self, request: GenerationRequest) -> None:
        needed = -(-request.longest // self._pages.page_tokens)
        if needed > self._pages.pages:
            raise TooLongError(
                f"the prompt of {len(request.prompt)} tokens and max_tokens {request.most_tokens} need "
                f"{needed} pages of keys and values, but the whole budget has {self._pages.pages}; send a "
                "shorter prompt or lower max_tokens"
            )

    def _take_in(self) -> None:
        cancelled = []
        while self._cancelled:
            cancelled.append(self._cancelled.popleft())
        while self._arrived:  # second: what is cancelled by then has arrived
            generation = self._arrived.popleft()
            known = self._pages.ready(self._names(generation)) * self._pages.page_tokens
            self._waiting.enter(generation, work_of(known, len(generation.tokens), self._growth))
        for generation in cancelled:
            if generation.ending is None:
                self._waiting.leave(generation)
                self._finish(generation, Ending.CANCELLED)

    def _names(self, generation: Generation) -> list[bytes]:
        if generation.names is None:  # the last token is always computed, for its successor
            generation.names = self._pages.names(generation.tokens[:-1])
        return generation.names

    def _admit(self) -> None:
        """Admit requests, by their turns, while pages are available."""
        while self._waiting and len(self._running) < self.limits.most_running:
            generation = self._waiting.first
            try:
                self._check_budget(generation.request)  # the budget may have shrunk since it arrived
            except RequestError as error:
                self._waiting.leave(generation)
                generation.error = error
                self._finish(generation, Ending.FAILED)
                continue
            request = generation.request
            names = self._names(generation)
            table = self._pages.open(names, request.longest, self._clock(), request.goes_on)
            if table is None:
                return
            self._waiting.leave(generation)
            generation.table = table
            self._running.append(generation)
            if not generation.admitted:
                generation.admitted = True
                generation.hit_tokens = table.hits * self._pages.page_tokens
                self._counts["requests"] += 1
                self._counts["prompt_tokens"] += len(request.prompt)
                self._report(generation)

    def _report(self, generation: Generation) -> None:
        if self._sink is None or generation.table is None:
            return
        request = generation.request
        self._sink.accessed(
            PrefixAccess(
                time.time_ns() // 1_000_000,
                len(request.prompt),
                request.most_tokens,
                generation.table.names,
                generation.table.hits,
                self._pages.pages,
            )
        )

    def _sample(self, planned: PlannedStep, logits: Tensor) -> None:
        """Sample the next tokens from logits [m, vocabulary], and end finished requests."""
        self._counts["steps"] += 1
        self._counts["computed_tokens"] += len(planned.batch.tokens)
        now_s = self._clock()
        likeliest = logits.argmax(dim=1).tolist()
        for generation, row, best in zip(planned.samples, logits, likeliest, strict=True):
            request = generation.request
            if request.keeps_logits:
                generation.logits.append(row.clone())
            token = best if generation.random is None else _drawn(row, request, generation.random)
            if generation.first_token_s is None:
                generation.first_token_s = now_s
            ended = request.ends_early and token in self.decoder.settings.ends
            generation.tokens.append(token)
            self._counts["generated_tokens"] += 1
            if ended or len(generation.generated) == request.most_tokens:
                self._finish(generation, Ending.STOP if ended else Ending.LENGTH, token)
            else:
                generation.tell(token)

    def _finish(self, generation: Generation, ending: Ending, token: int | None = None) -> None:
        if ending in (Ending.CANCELLED, Ending.FAILED):
            self._counts[ending.value] += 1
        if generation.table is not None:
            if generation.computed == len(generation.tokens) - 1:  # all tokens but the last are computed
                known = generation.tokens[: generation.computed]
                self._pages.keep(generation.table, known, self._clock(), generation.request.goes_on)
            self._leave(generation)
        generation.ending = ending
        generation.tell(token)

    def _restart(self, generation: Generation) -> None:
        """Take a request's pages away: it is recomputed when pages are free, and continues where it was."""
        self._leave(generation)
        generation.computed, generation.names = 0, None
        self._waiting.enter_again(generation)
        self._counts["restarted"] += 1

    def _leave(self, generation: Generation) -> None:
        if generation.table is not None:
            self._pages.close(generation.table)
            generation.table = None
            self._running.remove(generation)


def _drawn(logits: Tensor, request: GenerationRequest, random: np.random.Generator) -> int:
    """Sample a token from logits [vocabulary]."""
    below = logits.double() - logits.max()  # else a tiny temperature makes infinities, of which it is NaN
    chances = torch.softmax(below / request.sampling.temperature, dim=0).numpy().cumsum()
    return min(int(np.searchsorted(chances, random.random() * chances[-1], side="right")), len(chances) - 1)
