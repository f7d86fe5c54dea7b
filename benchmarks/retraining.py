"""Effect of background retraining on request latency, and its duration per cache.

    python -m benchmarks.retraining LIBRARY --data unseen.npz [--composition NAME] [--json FILE]

One request every 20 ms, one serving thread and one torch thread, 700 samples in the window from the start,
and otherwise the normal setup of an adaptation: samples and audits in one background thread, retraining in
another. Ten retrainings alternate with 400 quiet requests each, so that a slow moment of the machine affects
both. Every retraining is compared with the same version at rest, and both have the same weight.

Latency is counted from the time at which a request was due, so it includes waiting for the interpreter. A
request counts as during retraining if any of these steps was running while it was answered: collecting hidden
outputs, training, choosing, and preparing the next version. The caches trained are those that serve and those
tried at early blocks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gati.adaptation.adaptation import Adaptation
from gati.adaptation.samples import Sample, recorded
from gati.adaptation.settings import AdaptSettings, Change
from gati.composition.load import Served, open_served
from gati.model.data import load_data
from gati.samples.record import Record

WINDOW = 700
QUIET = 400  # requests before each retraining
WARM_UP = 100
INTERVAL_S = 1e6  # of stream time, which jumps by this to trigger a retraining
PATIENCE_S = 120.0


class Request(NamedTuple):
    """Times at which a request was due and answered, in seconds, and what the caller waited for."""

    due_s: float
    done_s: float

    @property
    def latency_ms(self) -> float:
        """Latency from the time it was due."""
        return 1e3 * (self.done_s - self.due_s)


class Retraining(NamedTuple):
    """A retraining, from its start until the next version serves or is rejected."""

    began_s: float
    ended_s: float
    change: Change


def main() -> int:
    """Print a table, and write all results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="images unknown to the library")
    parser.add_argument("--composition", default="default")
    parser.add_argument("--period-ms", type=float, default=20.0)
    parser.add_argument("--retrainings", type=int, default=10)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    served = open_served(asked.library, composition=asked.composition, threads=1)
    data = load_data(str(asked.data), served.engine.preprocessing, what="requests")
    inputs = data.images(range(len(data)))
    if len(inputs) < 2 * WINDOW:
        print(f"error: {asked.data} has {len(inputs)} inputs, give at least {2 * WINDOW}", file=sys.stderr)
        return 2
    bench = Bench(served, inputs, asked.period_ms / 1e3)
    bench.run(asked.retrainings)
    document = bench.document()
    show(document)
    if asked.json is not None:
        asked.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


class Bench:
    """Serves at a steady pace and records when retraining was running."""

    def __init__(self, served: Served, inputs: Tensor, period_s: float) -> None:
        self.served, self.period_s = served, period_s
        self.known, self.inputs = inputs[:WINDOW], inputs[WINDOW:]
        self.requests: list[Request] = []
        self.retrainings: list[Retraining] = []
        self._began_s: float | None = None

    def run(self, retrainings: int) -> None:
        """Answer requests until `retrainings` retrainings have finished."""
        settings = AdaptSettings(interval_s=INTERVAL_S, window_s=1e9, window_inputs=WINDOW, falls_to=0.0)
        with Adaptation(
            self.served, settings, history=self._history(), on_change=self._changed
        ) as adaptation:
            paced = Pace(adaptation, self.inputs, self.period_s)
            paced.answer(WARM_UP)
            for _ in range(retrainings):
                self.requests += paced.answer(QUIET)
                paced.time_s += 2.0 * INTERVAL_S
                ended, began_s = len(self.retrainings), time.perf_counter()
                while len(self.retrainings) == ended:
                    self.requests += paced.answer(1)
                    if time.perf_counter() - began_s > PATIENCE_S:
                        raise SystemExit(f"error: no retraining finished within {PATIENCE_S:g} s")

    def _history(self) -> list[Record]:
        """Return a window that is full from the start."""
        found = []
        for number, (x, base) in enumerate(
            zip(self.known, self.served.engine.base(self.known), strict=True), -WINDOW
        ):
            sample = Sample(x, base.class_index, base.probabilities, float(number), number)
            found.append(recorded(sample, base, "model"))
        return found

    def _changed(self, change: Change) -> None:
        now_s = time.perf_counter()
        if change.kind == "retraining":
            self._began_s = now_s
        elif self._began_s is not None and change.kind in ("probation", "kept", "failed"):
            self.retrainings.append(Retraining(self._began_s, now_s, change))
            self._began_s = None

    def document(self) -> dict[str, Any]:
        """Return all measurements."""
        found = {name: latencies(self._turns(busy=name != "quiet")) for name in ("quiet", "retraining")}
        rises = {name: round(found["retraining"][name] / found["quiet"][name], 3) for name in QUANTILES}
        return {
            "backend": self.served.engine.backend,
            "period_ms": 1e3 * self.period_s,
            "latency_ms": found,
            "rise": rises,
            "retrainings": [seconds(each) for each in self.retrainings],
        }

    def _turns(self, *, busy: bool) -> list[list[float]]:
        """Return latencies in ms during each retraining, or between it and the previous one."""
        ended_s, turns = 0.0, []
        for each in self.retrainings:
            if busy:
                among = [one for one in self.requests
                         if one.done_s >= each.began_s and one.due_s <= each.ended_s]  # fmt: skip
            else:
                among = [one for one in self.requests if one.due_s > ended_s and one.done_s < each.began_s]
            turns.append([one.latency_ms for one in among])
            ended_s = each.ended_s
        return turns


class Pace:
    """Sends one request per period; a late one does not delay those after it."""

    def __init__(self, adaptation: Adaptation, inputs: Tensor, period_s: float) -> None:
        self.adaptation, self.period_s = adaptation, period_s
        self.inputs = inputs.split(1)
        self.time_s = 0.0
        self._count = 0
        self._due_s = time.perf_counter()

    def answer(self, count: int) -> list[Request]:
        """Answer `count` requests."""
        found = []
        for _ in range(count):
            self._due_s += self.period_s
            time.sleep(max(0.0, self._due_s - time.perf_counter()))
            self.adaptation.answer(self.inputs[self._count % len(self.inputs)], time_s=self.time_s)
            found.append(Request(self._due_s, time.perf_counter()))
            self._count += 1
            self.time_s += self.period_s
        return found


QUANTILES = ("p50", "p90", "p99")


def latencies(turns: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the count, quantiles that weight each turn equally, and the maximum."""
    values = np.concatenate(turns)
    weights = np.concatenate([np.full(len(turn), 1.0 / len(turn)) for turn in turns])
    order = np.argsort(values)
    share = np.cumsum(weights[order]) / weights.sum()
    found = {name: values[order][np.searchsorted(share, int(name[1:]) / 100)] for name in QUANTILES}
    return {
        "n": len(values),
        **{name: round(float(value), 3) for name, value in found.items()},
        "largest": round(float(values.max()), 3),
    }


def seconds(retraining: Retraining) -> dict[str, Any]:
    """Return what a retraining took: from begin to end, and processor time by step."""
    spent: dict[str, float] = retraining.change.details.get("seconds", {})
    trained = {name: value for name, value in spent.items() if name.startswith("train ")}
    return {
        "outcome": retraining.change.kind,
        "message": retraining.change.message,
        "caches": len(trained),
        "whole_s": round(retraining.ended_s - retraining.began_s, 3),
        "retrained_s": round(sum(spent.values()), 3),
        "training_s": round(sum(trained.values()), 3),
        "a_cache_s": round(sum(spent.values()) / max(1, len(trained)), 3),
        "longest_training_s": max(trained.values(), default=0.0),
        "seconds": spent,
    }


def show(document: dict[str, Any]) -> None:
    """Print the latencies, then the durations of the retrainings."""
    print("| requests | n | p50 | p90 | p99 | largest |")
    print("|---|---|---|---|---|---|")
    for name, found in document["latency_ms"].items():
        print(f"| {name} | {found['n']} | " + " | ".join(f"{found[each]:.2f} ms"
              for each in (*QUANTILES, "largest")) + " |")  # fmt: skip
    print("| rise | | " + " | ".join(f"{document['rise'][each]:.2f}x" for each in QUANTILES) + " | |")
    rows = document["retrainings"]
    columns = {
        "caches": "caches",
        "training_s": "training them",
        "a_cache_s": "a cache, all but publishing",
        "retrained_s": "all but publishing",
        "whole_s": "all",
    }
    print("\n| retrainings | " + " | ".join(columns.values()) + " |")
    print("|---" * (len(columns) + 1) + "|")
    medians = [f"{np.median([row[name] for row in rows]):.2f} s" for name in columns]
    print(f"| {len(rows)} | {medians[0].split('.')[0]} | " + " | ".join(medians[1:]) + " |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
