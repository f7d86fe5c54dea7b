"""Processor time that deciding what to evict adds to a request, before its first token can be computed.

    python -m benchmarks.evict_decisions [--pages 10000] [--policies lru,laru,gati] [--seed 1]

Mooncake's conversation trace through the prefix engine's pages (`PrefixPages`), without a network: each
request opens its prefix, which looks up, predicts, evicts and stores, and is closed at once. All policies
serve each request in turn, in one process. The first quarter, while models are missing, is not counted, nor
are the predictor's fits, which are shown apart. `decisions` is a hash of all hits and pages: code that only
became faster keeps it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import time
from typing import Any

import numpy as np
import torch

from benchmarks.evict_engine import PAGE_TOKENS, SINGLE_LAYER, arrival_times
from benchmarks.evict_policies import load
from gati.evict.embed.pool import PagePool
from gati.evict.engine.decoder import DecoderSettings
from gati.evict.engine.pages import KeptPrefixes, PrefixPages, page_bytes_for_tokens
from gati.evict.predict.reuse import Reuse


class Timed:
    """The pages of one engine under one policy, and what each request took."""

    def __init__(self, policy: str, pages: int, seed: int) -> None:
        growth = PAGE_TOKENS * DecoderSettings().cost_growth
        kept = KeptPrefixes(policy, seed=seed, cost_growth=growth)
        page = page_bytes_for_tokens(SINGLE_LAYER, PAGE_TOKENS, torch.float32)
        self._pages = PrefixPages(
            PagePool(page, pages * page), SINGLE_LAYER, kept, page_tokens=PAGE_TOKENS, dtype=torch.float32
        )
        self._pages.hold(pages)
        self.fitting_s = 0.0
        predictor = self._pages._books.predictor
        if isinstance(predictor, Reuse):
            self._time_fits(predictor)
        self.opened_s: list[float] = []
        self.closed_s: list[float] = []
        self.hits = 0
        self.decisions = hashlib.sha256()

    def _time_fits(self, predictor: Reuse) -> None:
        refit = predictor.refit

        def timed() -> None:
            began_s = time.thread_time()
            refit()
            self.fitting_s += time.thread_time() - began_s

        predictor.refit = timed  # type: ignore[method-assign]

    def serve(self, names: list[bytes], at_s: float) -> None:
        fitted_s, began_s = self.fitting_s, time.thread_time()
        table = self._pages.open(names, len(names) * PAGE_TOKENS + 3, at_s)
        opened_s = time.thread_time()
        assert table is not None
        self._pages.computed(table, len(names) * PAGE_TOKENS)
        self._pages.close(table)
        self.closed_s.append(time.thread_time() - opened_s)
        self.opened_s.append(opened_s - began_s - (self.fitting_s - fitted_s))
        self.hits += table.hits
        self.decisions.update(repr((table.hits, table.numbers)).encode())

    def row(self) -> dict[str, Any]:
        opened, closed = (1e6 * np.array(each[len(each) // 4 :]) for each in (self.opened_s, self.closed_s))
        return {
            "open_us": {
                "mean": float(opened.mean()),
                "p50": float(np.median(opened)),
                "p99": float(np.percentile(opened, 99)),
            },
            "close_us": float(closed.mean()),
            "fits_s": self.fitting_s,
            "hits": self.hits,
            "decisions": self.decisions.hexdigest()[:12],
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, default=10_000)
    parser.add_argument("--policies", default="lru,laru,gati")
    parser.add_argument("--requests", type=int, default=12_031)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    trace = load("conversation", given.requests)
    at_s, order = arrival_times(trace, given.seed)
    names = [
        [block.to_bytes(8, "little") * 4 for block in trace.requests[number][: given.pages - 2]]
        for number in order
    ]
    timed = {policy: Timed(policy, given.pages, given.seed) for policy in given.policies.split(",")}
    gc.collect()
    gc.freeze()  # as the server does
    for number, (each, now_s) in enumerate(zip(names, at_s.tolist(), strict=True)):
        for one in list(timed.values())[:: 1 if number % 2 else -1]:
            one.serve(each, now_s)
    for policy, one in timed.items():
        print(json.dumps({"policy": policy, **one.row()}))
    print(json.dumps({"pages": given.pages, "system_load": os.getloadavg()}))


if __name__ == "__main__":
    main()
