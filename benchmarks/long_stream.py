"""A day of one camera: does adaptation keep its promise and its gain, and does its memory stay flat?

    python -m benchmarks.long_stream LIBRARY --data FOLDER --composition NAME [--hours 24] [--json FILE]

FOLDER has the videos of `benchmarks.videos`. One picture per second of stream time. Every hour the camera
turns to another region of another video, in an order that repeats none before all have been shown; so later
in the day known scenes return. Within an hour the video plays forwards and backwards, the brightness drifts
by up to a third and the crop by up to a tenth of its size, and each picture has noise of its own, so that no
two inputs are equal. All pictures have one `place`, as of one camera.

Every answer is compared with the base model's. For each hour the table has hit rate, the share answered from
memory, agreement, the lowest agreement of 200 consecutive pictures, the gain in CPU time of the serving
thread (the base model is timed on every third request), the process's memory, and what changed. `--plot`
draws gain and agreement over time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.videos import VIDEOS
from gati.adaptation.adaptation import Adaptation
from gati.adaptation.pictures import PictureInputs
from gati.adaptation.references import reference_of
from gati.adaptation.settings import AdaptSettings, Change
from gati.composition.load import Served, open_served
from gati.files import atomic_write_text
from gati.guard.auditor import RECALL
from gati.video import Region, open_source
from gati.video.frames import Frame

HOUR_S = 3600
DARKEST, BRIGHTEST = 0.7, 1.3
LARGEST_SHIFT = 0.1  # of the region's size
NOISE = 2.0  # standard deviation, of 255
BASE_EVERY = 3
WINDOW = 200
SPAN = 300  # requests per point of the plot


class Scene(NamedTuple):
    """A region of a video: its pictures [n, h, w, 3], with a margin for the drift of the crop."""

    name: str
    pictures: NDArray[np.uint8]
    top: int
    left: int
    height: int
    width: int


class Row(NamedTuple):
    """An answered request; `base_ms` is NaN where the base model was not timed."""

    exit: str
    agreed: bool
    latency_ms: float
    base_ms: float


def main() -> int:
    """Print a row per hour."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--composition", default="default")
    parser.add_argument("--accuracy", type=float, default=0.97)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    served = open_served(asked.library, composition=asked.composition, threads=1)
    settings = AdaptSettings(accuracy=asked.accuracy, seed=asked.seed)
    day = Day(served, scenes(asked.data), settings)
    print("| hour | scene | hits | from memory | agreement | worst 200 | gain | memory | changes |")
    print(f"|{'---|' * 9}")
    for _ in range(asked.hours):
        print(shown(day.hour()), flush=True)
    day.close()
    total = figures(day.rows)
    print(
        f"| all | | {total['hit_rate']:.0%} | {total['recall_rate']:.0%} | {total['agreement']:.4f} "
        f"| {total['worst']:.3f} | **{total['gain']:.2f}x** | | |"
    )
    if asked.json is not None:
        document = {
            "hours": day.hours,
            "total": total,
            "gains": gains(day.rows),
            "changes": [asdict(change) for change in day.changes],
        }
        atomic_write_text(asked.json, json.dumps(document, indent=1) + "\n")
    if asked.plot is not None:
        plot(day.rows, asked.accuracy, asked.plot)
    return 0


class Day:
    """One camera in front of one adaptation; `hour` answers the next hour."""

    def __init__(self, served: Served, found: list[Scene], settings: AdaptSettings) -> None:
        self.rows: list[Row] = []
        self.hours: list[dict[str, Any]] = []
        self.changes: list[Change] = []
        self._turn = 0  # seconds of stream time
        self._served = served
        self._reference = reference_of(served)
        self._random = np.random.default_rng(settings.seed)
        self._scenes = _in_turns(found, self._random)
        self._adaptation = Adaptation(
            served, settings, on_change=self.changes.append, deterministic=True, clock=time.thread_time
        )

    def hour(self) -> dict[str, Any]:
        """Answer an hour of requests, and return its figures."""
        scene, before = next(self._scenes), len(self.changes)
        rows = [self._answered(x) for x in self._inputs(scene)]
        self.rows += rows
        counts = Counter(change.kind for change in self.changes[before:])
        memory_mib = psutil.Process().memory_info().rss / 2**20
        described = {"hour": len(self.hours), "scene": scene.name, **figures(rows)}
        self.hours.append(described | {"memory_mib": round(memory_mib, 1), "changes": dict(counts)})
        return self.hours[-1]

    def close(self) -> None:
        """End the adaptation."""
        self._adaptation.close()

    def _answered(self, x: Tensor) -> Row:
        adaptation = self._adaptation
        base = self._reference.base(x)[0]
        base_ms = adaptation.base_ms(x) if self._turn % BASE_EVERY == 0 else float("nan")
        answered = adaptation.answer(x, time_s=float(self._turn), place="camera", base=base)
        self._turn += 1
        given = answered.prediction
        agreed = given.class_index == base.class_index
        return Row(given.exit, agreed, answered.latency_ms, base_ms)

    def _inputs(self, scene: Scene) -> Iterator[Tensor]:
        """The pictures of an hour, as inputs [1, C, H, W]."""
        engine = self._served.engine
        region = Region(0, 0, scene.width, scene.height)
        inputs = PictureInputs(engine.preprocessing, engine.traced.input_shape, [region])
        played = np.concatenate([np.arange(len(scene.pictures)), np.arange(len(scene.pictures))[::-1]])
        phases = self._random.uniform(0.0, 2.0 * np.pi, 3)
        turns = self._random.uniform(0.5, 2.0, 3)  # cycles in the hour
        for second in range(HOUR_S):
            light, down, right = np.sin(phases + 2.0 * np.pi * turns * second / HOUR_S)
            top = round(scene.top * (1.0 + down))
            left = round(scene.left * (1.0 + right))
            picture = scene.pictures[played[second % len(played)]]
            cut = picture[top : top + scene.height, left : left + scene.width]
            bright = DARKEST + (BRIGHTEST - DARKEST) * (light + 1.0) / 2.0
            noisy = bright * cut + NOISE * self._random.standard_normal(cut.shape, dtype=np.float32)
            image = np.clip(noisy, 0.0, 255.0).astype(np.uint8)
            yield inputs.inputs(Frame(image, second, float(second), "camera"))[0][1]


def _in_turns(found: list[Scene], random: np.random.Generator) -> Iterator[Scene]:
    while True:
        for at in random.permutation(len(found)):
            yield found[at]


def scenes(data: Path) -> list[Scene]:
    """All regions of the videos."""
    found = []
    for video, (name, regions) in VIDEOS.items():
        with open_source(str(data / name), policy="wait") as opened:
            frames = [frame.image for frame in opened]
        for number, region in enumerate(regions):
            below, beside = (int(LARGEST_SHIFT * size) for size in (region.height, region.width))
            top, left = max(region.y - below, 0), max(region.x - beside, 0)
            bottom, end = region.y + region.height + below, region.x + region.width + beside
            pictures = np.stack([frame[top:bottom, left:end] for frame in frames])
            room = pictures.shape[1] - region.height, pictures.shape[2] - region.width
            found.append(
                Scene(
                    f"{video} {number + 1}", pictures, room[0] // 2, room[1] // 2, region.height, region.width
                )
            )
    return found


def figures(rows: list[Row]) -> dict[str, Any]:
    """Rates, gain, and the lowest agreement of any `WINDOW` consecutive requests."""
    agreed = np.array([row.agreed for row in rows])
    early = np.array([row.exit != "base" for row in rows])
    right = np.concatenate(([0], np.cumsum(agreed)))
    latency_ms = float(np.mean([row.latency_ms for row in rows]))
    return {
        "requests": len(rows),
        "hit_rate": round(float(early.mean()), 4),
        "recall_rate": round(float(np.mean([row.exit == RECALL for row in rows])), 4),
        "agreement": round(float(agreed.mean()), 4),
        "worst": round(float((right[WINDOW:] - right[:-WINDOW]).min() / WINDOW), 4),
        "gain": round(float(np.nanmean([row.base_ms for row in rows])) / latency_ms, 3),
    }


def shown(hour: dict[str, Any]) -> str:
    """Format an hour as a row of the table."""
    changes = ", ".join(f"{count} {kind}" for kind, count in hour["changes"].items())
    return (
        f"| {hour['hour']} | {hour['scene']} | {hour['hit_rate']:.0%} | {hour['recall_rate']:.0%} "
        f"| {hour['agreement']:.4f} | {hour['worst']:.3f} | {hour['gain']:.2f}x "
        f"| {hour['memory_mib']:.0f} MiB | {changes} |"
    )


def gains(rows: list[Row]) -> list[float]:
    """The gain in each span of `SPAN` requests."""
    return [figures(rows[at : at + SPAN])["gain"] for at in range(0, len(rows), SPAN)]


def plot(rows: list[Row], accuracy: float, path: Path) -> None:
    """Draw gain and agreement over the hours."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    spans = [figures(rows[at : at + SPAN]) for at in range(0, len(rows), SPAN)]
    hours = np.arange(len(spans)) * SPAN / HOUR_S
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 5), sharex=True, height_ratios=(2, 1))
    above.step(hours, [span["gain"] for span in spans], where="post")
    above.axhline(1.0, color="grey", linewidth=0.8)
    above.set_ylabel("gain over the base model")
    above.set_ylim(bottom=0.0)
    below.step(hours, [span["agreement"] for span in spans], where="post", color="tab:green")
    below.axhline(accuracy, color="tab:red", linewidth=0.8)
    below.set_ylabel("agreement")
    below.set_xlabel("hours (a new scene every hour)")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
