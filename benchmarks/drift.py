"""Effect of an abrupt change in the class mix on the hit rate, and how much of it retraining recovers.

    python -m benchmarks.drift LIBRARY --data unseen.npz [--composition NAME] [--json FILE]

After section 7.2.2 of the GATI paper. One request per second of stream time for four and a half hours. Class
frequencies follow Zipf's law with exponent 1.5 or 3.0 over some order of the classes. Every 90 minutes the
order changes abruptly, with another class in front. Caches are retrained every 10, 20 or 40 minutes, with
default settings otherwise, or not at all. Takes about 10 minutes on a quiet core.

The images must be unknown to the library, like the 2,000 of `unseen.npz` from `resnet_cifar10.py`: the
network has memorised its training images, and thresholds were chosen on the others. A run has 16,200
requests, so the images of each class are reused in shuffled passes, shifted and flipped differently each
time: no input occurs twice, but images do. A quarter of the images is therefore kept out of the stream; at
the end of every phase the serving version answers 400 requests of the same mix drawn only from these
(`fresh`), bypassing the adaptation.

A row of the first table is the mean over both changes: hit rate and agreement with the base model in the ten
minutes before a change, the five after it, and the ten that start one interval after it, when the next
retraining could have finished. Next to them are the same minutes without retraining (`none`), and the time
from each change to the next version. A guard watches all runs: an alarm stops the caches until others are
proven, and requests in the meantime count as misses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gati.adaptation.adaptation import Adaptation
from gati.adaptation.settings import AdaptSettings, Change
from gati.composition.load import Served, open_served
from gati.engine.exits import Prediction
from gati.model.data import Data, load_data

PHASES = 3
PHASE_S = 5400  # also the number of requests: one per second
BEFORE_S, AT_S, AFTER_S = 600, 300, 600
FRESH_REQUESTS = 400
SHIFT = 3  # most pixels in each direction
FORMS = 2 * (2 * SHIFT + 1) ** 2
WINDOWS = ("before", "at", "after")


class Request(NamedTuple):
    """An image index, and its shift and flip."""

    image: int
    form: int


@dataclass(frozen=True)
class Row:
    """One answered request."""

    hit: bool
    agreed: bool


def main() -> int:
    """Print both tables, and write all results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="labelled images unknown to the library")
    parser.add_argument("--composition", default="default")
    parser.add_argument("--zipf", type=float, nargs="+", default=[1.5, 3.0])
    parser.add_argument("--minutes", type=int, nargs="+", default=[10, 20, 40], help="retraining intervals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    served = open_served(asked.library, composition=asked.composition, threads=1)
    data = load_data(str(asked.data), served.engine.preprocessing, what="requests")
    bench = Bench(served, data, asked.minutes, asked.seed)
    runs = [bench.run(exponent, minutes) for exponent in asked.zipf for minutes in (None, *asked.minutes)]
    show(runs)
    if asked.json is not None:
        document = {
            "composition": asked.composition,
            "backend": served.engine.backend,
            "accuracy_target": served.composition.accuracy_target,
            "phases": PHASES,
            "phase_s": PHASE_S,
            "requests": PHASES * PHASE_S,
            "runs": runs,
        }
        asked.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


class Bench:
    """Streams of images unknown to `served`, with cached answers of the base model."""

    def __init__(self, served: Served, data: Data, minutes: Sequence[int], seed: int) -> None:
        if data.labels is None:
            raise SystemExit(f"error: {data.name} has no labels to mix classes by")
        self.served, self.minutes, self.seed = served, minutes, seed
        self.images = data.images(range(len(data)))
        self.classes = int(data.labels.max()) + 1
        rows = [np.flatnonzero(data.labels == index) for index in range(self.classes)]
        self.shown = [each[np.arange(len(each)) % 4 != 3] for each in rows]
        self.hidden = [each[3::4] for each in rows]
        self.orders = orders(self.classes, np.random.default_rng(seed))
        self._base: dict[Request, Prediction] = {}

    def input(self, request: Request) -> Tensor:
        """Return the image [1, C, H, W] as it arrives."""
        return shifted(self.images[request.image : request.image + 1], request.form)

    def base(self, request: Request) -> Prediction:
        """Return the base model's answer."""
        if request not in self._base:
            self._base[request] = self.served.engine.base(self.input(request))[0]
        return self._base[request]

    def mix(self, exponent: float, phase: int) -> NDArray[np.float64]:
        """Return the class frequencies."""
        share = np.empty(self.classes)
        share[self.orders[phase]] = 1.0 / np.arange(1, self.classes + 1) ** exponent
        return share / share.sum()

    def run(self, exponent: float, minutes: int | None) -> dict[str, Any]:
        """Answer one stream, retraining every `minutes` minutes, or never if None."""
        requests = list(self._stream(exponent))
        fresh = [list(self._fresh(exponent, phase)) for phase in range(PHASES)]
        for request in (*requests, *(each for phase in fresh for each in phase)):
            self.base(request)
        enabled, interval_s = minutes is not None, 60.0 * (minutes or 1)
        settings = AdaptSettings(interval_s=interval_s, enabled=enabled, seed=self.seed)
        changes: list[Change] = []
        rows: list[Row] = []
        kept_apart: list[list[Row]] = []
        began = time.perf_counter()
        with Adaptation(self.served, settings, on_change=changes.append, deterministic=True) as adaptation:
            for number, request in enumerate(requests):
                base = self.base(request)
                answered = adaptation.answer(self.input(request), time_s=float(number), base=base)
                rows.append(Row(answered.hit, answered.prediction.class_index == base.class_index))
                if (number + 1) % PHASE_S == 0:
                    kept_apart.append(self._asked(adaptation.served, fresh[number // PHASE_S]))
        passed_s, whole = time.perf_counter() - began, rates(rows)
        print(f"zipf {exponent:g}, {named(minutes)}: {passed_s:.0f} s, {whole}", file=sys.stderr, flush=True)
        return {
            "zipf": exponent,
            "minutes": minutes,
            "whole": whole,
            "windows": windows(rows, self.minutes if minutes is None else [minutes]),
            "new_version_after_s": [next_version(changes, phase * PHASE_S) for phase in range(PHASES)],
            "phase_end": [rates(rows[end - BEFORE_S : end]) for end in phase_ends()],
            "fresh": [rates(each) for each in kept_apart],
            "counts": {kind: sum(each.kind == kind for each in changes) for kind in KINDS},
            "changes": [asdict(change) for change in changes],
        }

    def _stream(self, exponent: float) -> Iterator[Request]:
        random = np.random.default_rng((self.seed, 1))
        decks = [deck(rows, np.random.default_rng((self.seed, 2, at))) for at, rows in enumerate(self.shown)]
        for phase in range(PHASES):
            for drawn in random.choice(self.classes, PHASE_S, p=self.mix(exponent, phase)):
                yield next(decks[drawn])

    def _fresh(self, exponent: float, phase: int) -> Iterator[Request]:
        random = np.random.default_rng((self.seed, 3, phase))
        decks = [deck(rows, np.random.default_rng((self.seed, 4, at))) for at, rows in enumerate(self.hidden)]
        for drawn in random.choice(self.classes, FRESH_REQUESTS, p=self.mix(exponent, phase)):
            yield next(decks[drawn])

    def _asked(self, served: Served, requests: Sequence[Request]) -> list[Row]:
        """Return a version's answers, bypassing the adaptation."""
        given = [(served.engine(self.input(request))[0], self.base(request)) for request in requests]
        return [Row(one.exit != "base", one.class_index == base.class_index) for one, base in given]


KINDS = ("retraining", "probation", "activated", "reused", "kept", "alarm", "returned", "resting", "failed")


def orders(classes: int, random: np.random.Generator) -> list[NDArray[np.int64]]:
    """Return an order of the classes per phase, each with a different class in front."""
    found: list[NDArray[np.int64]] = []
    while len(found) < PHASES:
        order = random.permutation(classes)
        if order[0] not in [each[0] for each in found]:
            found.append(order)
    return found


def deck(images: NDArray[np.int64], random: np.random.Generator) -> Iterator[Request]:
    """Yield all images in shuffled passes, each time in a form not used before."""
    forms = random.permuted(np.tile(np.arange(FORMS), (len(images), 1)), axis=1)
    for turn in range(FORMS):
        for at in random.permutation(len(images)):
            yield Request(int(images[at]), int(forms[at, turn]))


def shifted(image: Tensor, form: int) -> Tensor:
    """Shift the image [1, C, H, W] by a few pixels, repeating its border, and flip it in every other form."""
    side = 2 * SHIFT + 1
    place, flipped = form // 2, form % 2
    top, left = divmod(place, side)
    height, width = image.shape[2:]
    moved = torch.nn.functional.pad(image, (SHIFT,) * 4, mode="replicate")
    moved = moved[:, :, top : top + height, left : left + width]
    return (moved.flip(3) if flipped else moved).contiguous()


def phase_ends() -> list[int]:
    """Return the number of requests before each change, and the total."""
    return [phase * PHASE_S for phase in range(1, PHASES + 1)]


def windows(rows: Sequence[Row], minutes: Sequence[int]) -> dict[str, dict[str, dict[str, float]]]:
    """Return means over the changes by window, for each retraining interval."""
    found = {}
    for each in minutes:
        later = 60 * each
        spans = {"before": (-BEFORE_S, 0), "at": (0, AT_S), "after": (later, later + AFTER_S)}
        found[named(each)] = {
            name: rates([row for change in phase_ends()[:-1] for row in rows[change + low : change + high]])
            for name, (low, high) in spans.items()
        }
    return found


def named(minutes: int | None) -> str:
    """Format an interval."""
    return "none" if minutes is None else f"{minutes} min"


def rates(rows: Sequence[Row]) -> dict[str, float]:
    """Return hit rate and agreement, as shares of requests."""
    return {
        "hit_rate": round(float(np.mean([row.hit for row in rows])), 4),
        "agreement": round(float(np.mean([row.agreed for row in rows])), 4),
    }


def next_version(changes: Sequence[Change], after_s: float) -> float | None:
    """Return the seconds from `after_s` until another version serves, within the phase."""
    replaced = (each.time_s - after_s for each in changes if each.kind in ("activated", "reused"))
    return next((passed for passed in replaced if 0.0 <= passed < PHASE_S), None)


def show(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of the changes, then one of whole runs."""
    left = {run["zipf"]: run for run in runs if run["minutes"] is None}
    print("| zipf | every | hits before, at, after | none | agreement | none | next version |")
    print("|---|---|---|---|---|---|---|")
    for run in runs:
        for name, ours in run["windows"].items() if run["minutes"] is not None else ():
            theirs = left[run["zipf"]]["windows"][name]
            cells = [
                ", ".join(formatted(of[window][what]) for window in WINDOWS)
                for what, formatted in (("hit_rate", percent), ("agreement", exactly))
                for of in (ours, theirs)
            ]
            print(f"| {run['zipf']:g} | {name} | {' | '.join(cells)} | {minutes(run)} |")
    print("\n| zipf | every | hits | agreement | hits at phase ends | fresh hits | fresh agreement "
          "| new versions | alarms | rests |")  # fmt: skip
    print("|---" * 10 + "|")
    for run in runs:
        counts = run["counts"]
        cells = [
            percent(run["whole"]["hit_rate"]),
            exactly(run["whole"]["agreement"]),
            ", ".join(percent(each["hit_rate"]) for each in run["phase_end"]),
            ", ".join(percent(each["hit_rate"]) for each in run["fresh"]),
            ", ".join(exactly(each["agreement"]) for each in run["fresh"]),
            str(counts["activated"] + counts["reused"]),
            str(counts["alarm"]),
            str(counts["resting"]),
        ]
        print(f"| {run['zipf']:g} | {named(run['minutes'])} | {' | '.join(cells)} |")


def minutes(run: Mapping[str, Any]) -> str:
    """Format the minutes from each change to the next version."""
    waits = run["new_version_after_s"][1:]
    return ", ".join("none" if each is None else f"{each / 60:.0f} min" for each in waits)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def exactly(share: float) -> str:
    return f"{share:.3f}"


if __name__ == "__main__":
    raise SystemExit(main())
