"""Time to first token of the prefix engine: hits against misses, and real arrivals under several policies.

    python -m benchmarks.evict_engine [hits] [--repetitions 15]
    python -m benchmarks.evict_engine arrivals --requests 2000 --sizes 500,1000,2000 [--json FILE]

`hits`: alternates between prompts with a cached and an uncached prefix of 1,000 tokens, each followed by 50
new tokens; also through `gati evict engine` and OpenAI's client over loopback (`--socket`).

`arrivals`: the first requests of Mooncake's conversation trace. A block of 512 tokens becomes a page of 16,
so the engine makes the same decision per block as a large one; each request generates two tokens. Arrivals
are scaled so that the network would be busy for `--load` of the time if nothing were cached.

The network's time per batch is first fitted as a + b tokens + c tokens x context + d requests, and then added
to the clock instead of being computed, so that thousands of requests take minutes and other work on the
machine has no effect. Everything else is the real engine: admission, pages, policy and predictor take their
real CPU time. Fits, which an engine makes in the background, take no time here, so that results do not depend
on the machine. When idle, the clock jumps to the next arrival. `--computed` runs a smaller network instead.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls

from benchmarks.evict_policies import load
from gati.evict import Trace
from gati.evict.engine.decoder import Decoder, DecoderSettings, Stretch, TokenBatch
from gati.evict.engine.engine import PrefixEngine, PrefixEngineLimits, pool_for
from gati.evict.engine.generation import Generation, GenerationRequest
from gati.evict.engine.pages import KeptPrefixes, PrefixPages, page_bytes_for_tokens
from gati.evict.predict.reuse import Reuse

PAGE_TOKENS = 16
HEAD, TAIL = 1000, 50
SMALL = DecoderSettings(layers=2, width=64, heads=4, key_heads=2, inner_width=176)
SINGLE_LAYER = DecoderSettings(layers=1, width=8, heads=2, key_heads=1, inner_width=8)


class EngineClock:
    """CPU time of this thread plus skipped time."""

    def __init__(self) -> None:
        self._skipped_s = 0.0
        self._paused_s = 0.0
        self._since_s = 0.0
        self._runs = False

    def __call__(self) -> float:
        running_s = time.thread_time() - self._since_s if self._runs else 0.0
        return self._skipped_s + self._paused_s + running_s

    def resume(self) -> None:
        self._since_s, self._runs = time.thread_time(), True

    def pause(self) -> None:
        self._paused_s += time.thread_time() - self._since_s
        self._runs = False

    def skip(self, seconds: float) -> None:
        self._skipped_s += max(seconds, 0.0)


class NetworkCost(NamedTuple):
    """Seconds per batch, per token, per pair that attention computes, and per request."""

    step_s: float
    token_s: float
    pair_s: float
    stretch_s: float

    def of(self, batch: TokenBatch) -> float:
        return float(np.dot(self, _amounts(batch)))


class AddedTime(Decoder):
    """Advances the clock by a network's time without computing anything."""

    def __init__(self, cost: NetworkCost, modelled: DecoderSettings) -> None:
        super().__init__(SINGLE_LAYER)
        self.cost = cost
        self.modelled = modelled
        self.clock = EngineClock()

    def forward(self, batch: TokenBatch, cache: torch.Tensor) -> torch.Tensor:
        self.clock.skip(self.cost.of(batch))
        return torch.zeros(len(batch.wanted), self.settings.vocabulary)


def _amounts(batch: TokenBatch) -> list[float]:
    pairs = sum((each.stop - each.start) * (each.before + each.stop - each.start) for each in batch.stretches)
    return [1.0, len(batch.tokens), pairs, len(batch.stretches)]


def measured_cost(settings: DecoderSettings) -> NetworkCost:
    """Fit costs by least squares over batches of several shapes, each the fastest of three runs."""
    decoder = Decoder.random(settings, seed=0)
    pool = pool_for(decoder, 2**28)
    cache = PrefixPages(
        pool, settings, KeptPrefixes("lru"), page_tokens=PAGE_TOKENS, dtype=torch.float32
    ).cache
    rows, times = [], []
    shapes = [(count, 1, before) for count in (1, 4, 16) for before in (0, 500, 2000)]
    shapes += [(1, length, before) for length in (16, 64, 256, 512) for before in (0, 500, 2000)]
    for count, length, before in shapes:
        batch = _batch(count, length, before)
        took = []
        for _ in range(3):
            began_s = time.thread_time()
            decoder(batch, cache)
            took.append(time.thread_time() - began_s)
        weight = 1.0 / min(took)  # minimise relative errors
        rows.append([weight * amount for amount in _amounts(batch)])
        times.append(weight * min(took))
    found, _ = nnls(np.array(rows), np.array(times))
    return NetworkCost(*found.tolist())


def _batch(count: int, length: int, before: int) -> TokenBatch:
    pages = torch.arange(-(-(before + length) // PAGE_TOKENS))
    at = torch.arange(before, before + length).repeat(count)
    stretches = [Stretch(each * length, (each + 1) * length, before, pages) for each in range(count)]
    tokens = torch.zeros(count * length, dtype=torch.int64)
    return TokenBatch(tokens, at, pages[at // PAGE_TOKENS], at % PAGE_TOKENS, stretches, tokens[:1])


class Replaying:
    """An engine that receives the requests of a trace as they arrive on its own clock."""

    def __init__(
        self,
        decoder: Decoder,
        pages: int,
        policy: str,
        prompts: Sequence[tuple[int, ...]],
        at_s: Sequence[float],
        *,
        seed: int = 0,
    ) -> None:
        self.clock = decoder.clock if isinstance(decoder, AddedTime) else EngineClock()
        page = page_bytes_for_tokens(decoder.settings, PAGE_TOKENS, torch.float32)
        limits = PrefixEngineLimits(most_running=16, most_waiting=len(prompts), chunk_tokens=512)
        name, _, counting = policy.partition(":")
        network = decoder.modelled if isinstance(decoder, AddedTime) else decoder.settings
        kept = KeptPrefixes(
            "lru" if name == "none" else name,
            seed=seed,
            reuse=name != "none",
            cost_growth=0.0 if counting == "pages" else PAGE_TOKENS * network.cost_growth,
        )
        self.engine = PrefixEngine(
            decoder, pool_for(decoder, pages * page), kept, limits, clock=self.clock, page_tokens=PAGE_TOKENS
        )
        if isinstance(self.engine._pages._books.predictor, Reuse):
            _fit_at_once(self.engine._pages._books.predictor)
        self.times_s = np.full(len(prompts), np.nan)  # to first tokens, in order of arrival
        self._open: list[tuple[int, Generation]] = []
        self._coming = deque(zip(at_s, prompts, strict=True))
        self.idle_s = 0.0

    def serve(self, count: int) -> bool:
        """Step until `count` more requests are admitted; False after the last request."""
        self.clock.resume()
        goal = max(len(self._coming) - count, 0)
        while len(self._coming) > goal or (not goal and self.engine.step()):
            while self._coming and self._coming[0][0] <= self.clock():
                at_s, prompt = self._coming.popleft()
                generation = self.engine.submit(GenerationRequest(prompt, 2, ends_early=False))
                generation.arrived_s = at_s  # it arrived during a step
                self._open.append((len(self.times_s) - len(self._coming) - 1, generation))
            if not self.engine.step() and self._coming:
                idle_s = max(self._coming[0][0] - self.clock(), 0.0)
                self.clock.skip(idle_s)
                self.idle_s += idle_s
        self.clock.pause()
        ended = [each for each in self._open if each[1].ending is not None]
        self._open = [each for each in self._open if each[1].ending is None]
        for number, each in ended:  # what was generated is let go, as by a server
            assert each.time_to_first_token_s is not None
            self.times_s[number] = each.time_to_first_token_s
        return bool(goal)


def _fit_at_once(predictor: Reuse) -> None:
    begin = predictor._begin_refit

    def waited() -> None:
        begin()
        predictor.wait()

    predictor._begin_refit = waited  # type: ignore[method-assign]


def tokens_of(block: int) -> bytes:
    """Return sixteen tokens that represent a block."""
    return hashlib.sha256(str(block).encode()).digest()[:PAGE_TOKENS]


def prompts_of(trace: Trace, limit: int) -> list[tuple[int, ...]]:
    """Return a prompt per request: its blocks and one token to answer."""
    return [(*b"".join(tokens_of(block) for block in ids[:limit]), 0) for ids in trace.requests]


def arrivals(given: argparse.Namespace) -> dict[str, Any]:
    trace = load("conversation", given.requests)
    sizes = [int(size) for size in given.sizes.split(",")]
    policies = given.policies.split(",")
    prompts = prompts_of(trace, min(sizes) - 2)
    small = Decoder.random(SMALL, seed=0)
    network = SMALL if given.computed else DecoderSettings()
    cost = measured_cost(network)
    alone = Replaying(
        AddedTime(cost, network), max(sizes), "none", prompts[::10], np.zeros(len(prompts[::10]))
    )
    alone.serve(len(prompts))
    at_s, order = arrival_times(trace, given.seed)
    prompts = [prompts[number] for number in order]
    busy_s = alone.clock() * len(prompts) / len(prompts[::10])
    scale = busy_s / given.load / float(trace.time_s[-1] - trace.time_s[0])
    at_s = at_s * scale
    result: dict[str, Any] = {
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "network_s": cost._asdict(),
        "load_without_cache": given.load,
        "seed": given.seed,
        "seconds_a_second_of_the_trace": scale,
        "system_load": os.getloadavg(),
        "sizes": [],
    }
    for size in sizes:
        replaying = {
            policy: Replaying(
                small if given.computed else AddedTime(cost, network),
                size,
                policy,
                prompts,
                at_s.tolist(),
                seed=given.seed,
            )
            for policy in policies
        }
        gc.collect()
        gc.freeze()  # as the server does; the prompts of the whole trace are here, too
        going = dict(replaying)
        while going:
            for policy, each in list(going.items()):
                if not each.serve(given.turn):
                    del going[policy]
        rows = {policy: _figures(each) for policy, each in replaying.items()}
        for policy, row in rows.items():
            row["p99_over_lru"] = row["p99_s"] / rows["lru"]["p99_s"] if "lru" in rows else None
            if "lru" in rows and policy != "lru":
                both = replaying[policy].times_s, replaying["lru"].times_s
                row["p99_over_lru_95"] = ratio_interval(*both)
        result["sizes"].append({"pages": size, "policies": rows})
        print(json.dumps(result["sizes"][-1]), flush=True)
    return result


def _figures(replayed: Replaying) -> dict[str, Any]:
    times = replayed.times_s
    found = replayed.engine.figures()
    p50, p90, p99 = np.percentile(times, [50, 90, 99])
    return {
        "mean_s": float(times.mean()),
        "p50_s": float(p50),
        "p90_s": float(p90),
        "p99_s": float(p99),
        "hit_rate": found["pages_hit"] / max(found["pages_requested"], 1),
        "computed_tokens": found["computed_tokens"],
        "busy": 1.0 - replayed.idle_s / replayed.clock(),
        "evicted": found["pages_evicted"],
        "fitting_s": found["policy"].get("fitting_s", 0.0),
        "guard": found["policy"].get("guard"),
    }


def arrival_times(trace: Trace, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds from the start, ascending, and the order of the requests; seed 0 gives the trace's own.

    Mooncake's clock ticks every few seconds. Other seeds draw each request's time uniformly between its tick
    and the next one, and thereby also the order of requests of one tick.
    """
    at_s = np.asarray(trace.time_s) - trace.time_s[0]
    if seed:
        ticks, tick = np.unique(at_s, return_inverse=True)
        lengths = np.append(np.diff(ticks), 0.0)
        at_s = at_s + np.random.default_rng(seed).random(len(at_s)) * lengths[tick]
    order = np.argsort(at_s, kind="stable")
    return at_s[order], order


def ratio_interval(times: np.ndarray, base: np.ndarray, stretch: int = 200, draws: int = 1000) -> list[float]:
    """Return the 95 % interval of the ratio of two 99th percentiles.

    Resamples stretches of consecutive requests, the same ones for both: requests that queue behind each other
    are not independent.
    """
    random = np.random.default_rng(0)
    starts = np.arange(0, len(times), stretch)
    ratios = []
    for _ in range(draws):
        drawn = random.choice(starts, len(starts))
        rows = np.concatenate([np.arange(start, min(start + stretch, len(times))) for start in drawn])
        ratios.append(np.percentile(times[rows], 99) / np.percentile(base[rows], 99))
    return [float(each) for each in np.percentile(ratios, [2.5, 97.5])]


def hits(given: argparse.Namespace) -> dict[str, Any]:
    """Measure time to first token, alternating prompts with cached and uncached prefixes."""
    ask = _over_a_socket if given.socket else _in_process
    random = np.random.default_rng(0)
    known = random.integers(0, 256, HEAD)
    times: dict[str, list[float]] = {"miss": [], "hit": []}
    for number, (kind, seconds) in enumerate(ask(given.repetitions, known, random)):
        if number > 1:  # the first two warm up
            times[kind].append(seconds)
    medians = {kind: float(np.median(each)) for kind, each in times.items()}
    return {
        "median_s": medians,
        "p99_s": {kind: float(np.percentile(each, 99)) for kind, each in times.items()},
        "hit_over_miss": medians["hit"] / medians["miss"],
        "system_load": os.getloadavg(),
    }


def _turns(count: int, known: Any, random: np.random.Generator) -> Iterator[tuple[str, list[int]]]:
    for number in range(2 * count + 2):
        kind = ("miss", "hit")[number % 2]
        head = known if kind == "hit" else random.integers(0, 256, HEAD)
        yield kind, [*head.tolist(), *random.integers(0, 256, TAIL).tolist()]


def _in_process(count: int, known: Any, random: np.random.Generator) -> Iterator[tuple[str, float]]:
    decoder = Decoder.random(DecoderSettings(), seed=0)
    engine = PrefixEngine(decoder, pool_for(decoder, 2**28))
    engine.submit(GenerationRequest(tuple(known.tolist()), 1))
    engine.run_until_idle()
    for kind, prompt in _turns(count, known, random):
        generation = engine.submit(GenerationRequest(tuple(prompt), 1))
        engine.run_until_idle()
        assert (generation.hit_tokens > 0) == (kind == "hit")
        assert generation.time_to_first_token_s is not None
        yield kind, generation.time_to_first_token_s


def _over_a_socket(count: int, known: Any, random: np.random.Generator) -> Iterator[tuple[str, float]]:
    import openai

    command = [sys.executable, "-m", "gati", "evict", "engine", "--port", "0", "--log-level", "error"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1].removesuffix("/completions")
        client = openai.OpenAI(base_url=url, api_key="none")

        def ask(prompt: list[int]) -> float:
            began_s = time.perf_counter()
            stream = client.completions.create(
                model="random-0", prompt=prompt, max_tokens=2, stream=True, temperature=0
            )
            next(iter(stream))
            seconds = time.perf_counter() - began_s
            stream.close()
            return seconds

        ask(known.tolist())
        for kind, prompt in _turns(count, known, random):
            yield kind, ask(prompt)
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("hits", "arrivals"), default="hits")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--socket", action="store_true")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--sizes", default="500,1000,2000")
    parser.add_argument(
        "--policies", default="lru,gati", help="names; gati:pages saves pages instead of time"
    )
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--computed", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="0: the arrivals of the trace")
    parser.add_argument("--turn", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = arrivals(given) if given.what == "arrivals" else hits(given)
    text = json.dumps(result, indent=2)
    if given.json is not None:
        given.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
