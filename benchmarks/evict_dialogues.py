"""Gain of LPC on conversations: streams built from real dialogues, over several seeds.

    python -m benchmarks.evict_dialogues [--seeds 3] [--size 210,300,400,500,600,700,850] [--dialogues FILE]
    python -m benchmarks.evict_dialogues --speed

For every seed the dialogues are split into disjoint halves: one trains the model, the other provides the
streams. Prints Matthews correlations using the text, the prompt count alone, and the texts of other prompts;
then hit rates with 95 % intervals over the seeds. `shuffled` gives each request the texts of another,
`inverted` inverts each probability. `gap` is the share of `lpc-oracle`'s gain over LRU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.evict_policies import DATA, interval
from gati.evict import Trace, replay
from gati.evict.predict.continuation import (
    ContinuationModel,
    ContinuationSettings,
    fit_continuation,
    matthews,
)
from gati.evict.trace.dialogues import Dialogue, Prompts, halves, read_dialogues
from gati.evict.trace.synthesise import StreamSettings, synthesise, trace_of
from gati.evict.train import samples_of

DIALOGUES = DATA / "text" / "sgd_dialogues.jsonl.gz"
SIZES = "210,300,400,500,600,700,850"
COLUMNS = ("lru", "lpc", "laru+lpc", "lpc-oracle", "lpc shuffled", "laru+lpc inverted", "lpc inverted")


def shuffled(prompts: Sequence[Prompts], seed: int) -> list[Prompts]:
    """Return prompts that keep their count but have the texts of another."""
    order = np.random.default_rng(seed).permutation(len(prompts))
    return [Prompts(prompts[other].texts, each.turn) for other, each in zip(order, prompts, strict=True)]


def learn(
    dialogues: Sequence[Dialogue], limit: int, seed: int
) -> tuple[ContinuationModel, list[Dialogue], list[float]]:
    """Return the model, the held-out half, and correlations: text, prompt count alone, texts shuffled."""
    learned, held_out = halves(dialogues, seed=seed)
    prompts, goes_on = samples_of(learned[:limit])
    model = fit_continuation(prompts, goes_on, ContinuationSettings(seed=seed))
    counting = fit_continuation(prompts, goes_on, ContinuationSettings(text=False, seed=seed))
    judged, followed = samples_of(held_out[:limit])
    found = [
        matthews(each.predict(said) > 0.5, followed)
        for each, said in ((model, judged), (counting, judged), (model, shuffled(judged, seed)))
    ]
    return model, held_out, found


def rates(trace: Trace, model: ContinuationModel, sizes: Sequence[int], seed: int) -> list[list[float]]:
    """Return hit rates [sizes, COLUMNS]."""
    prompts = [talk.prompts for talk in trace.talks or ()]
    said, mixed = model.predict(prompts), model.predict(shuffled(prompts, seed))
    plain = replay(trace, sizes, COLUMNS[:4], continuation=said)
    other = replay(trace, sizes, ["lpc"], continuation=mixed)
    wrong = replay(trace, sizes, ["laru+lpc", "lpc"], continuation=1.0 - said)
    return [
        [plain.of(name, size).hit_rate for name in COLUMNS[:4]]
        + [other.of("lpc", size).hit_rate]
        + [wrong.of(name, size).hit_rate for name in ("laru+lpc", "lpc")]
        for size in sizes
    ]


def table(sizes: Sequence[int], found: np.ndarray) -> None:
    """Print the hit rates `found` [seeds, sizes, COLUMNS]."""
    print(f"\n| blocks | {' | '.join(COLUMNS)} | lpc / lru | gap |")
    print("|---" * (len(COLUMNS) + 3) + "|")
    for row, size in enumerate(sizes):
        cells = []
        for column in range(len(COLUMNS)):
            rate, wide = interval(found[:, row, column].tolist())
            cells.append(f"{rate:.3f} ± {wide:.3f}")
        lru, lpc, _, oracle = found[:, row, :4].T
        gain, gain_wide = interval((100.0 * (lpc / lru - 1.0)).tolist())
        gap, _ = interval(((lpc - lru) / (oracle - lru)).tolist())
        print(f"| {size:,} | {' | '.join(cells)} | {gain:+.1f} ± {gain_wide:.1f} % | {gap:.2f} |", flush=True)


def speed(model: ContinuationModel, prompts: Sequence[Prompts]) -> None:
    """Time single predictions; see `benchmarks.continuation` for more."""
    singles = []
    for each in prompts[:2000]:
        began = time.perf_counter()
        model.predict([each])
        singles.append(time.perf_counter() - began)
    p50, p99 = 1e3 * np.percentile(singles, [50, 99])
    print(f"\none prediction: p50 {p50:.2f} ms, p99 {p99:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dialogues", type=Path, default=DIALOGUES)
    parser.add_argument("--size", default=SIZES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=4000, help="dialogues per half")
    parser.add_argument("--speed", action="store_true", help="only time predictions")
    given = parser.parse_args()
    dialogues = read_dialogues(given.dialogues)
    sizes = [int(size) for size in given.size.split(",")]
    print(f"{given.dialogues.name}: {len(dialogues):,} dialogues, {given.limit:,} of each half")
    if given.speed:
        learned, held_out = halves(dialogues)
        speed(fit_continuation(*samples_of(learned[: given.limit])), samples_of(held_out[: given.limit])[0])
        return
    found, correlations = [], []
    for seed in range(given.seeds):
        model, held_out, found_here = learn(dialogues, given.limit, seed)
        correlations.append(found_here)
        trace = trace_of(synthesise(held_out, StreamSettings(seed=seed)))
        print(f"seed {seed}: {len(trace):,} requests, {len(trace.blocks):,} blocks", flush=True)
        found.append(rates(trace, model, sizes, seed))
    for column, name in enumerate(("text", "count of prompts", "texts shuffled")):
        mean, wide = interval([row[column] for row in correlations])
        print(f"Matthews' correlation, {name}: {mean:.3f} ± {wide:.3f}")
    table(sizes, np.array(found))
    speed(model, samples_of(held_out[: given.limit])[0])


if __name__ == "__main__":
    main()
