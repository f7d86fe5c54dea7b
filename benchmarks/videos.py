"""Gain of adaptation on traffic videos with `gati replay`, with and without memory before the network.

    python -m benchmarks.videos LIBRARY --data FOLDER --composition NAME [--interval 10] [--json FILE]

FOLDER has the three videos named in the table below. Every request of every region is compared with the base
model on the same engine; for every third one, the base model is also timed right before. Latencies are of the
answer alone, on one thread; retraining happens in between, and a new version serves at once. `worst 200` is
the lowest agreement over any 200 consecutive images; `after` starts at the first change: memory starts to
answer, or caches are retrained.

No setting was chosen on these regions. `--cpu-time` counts CPU time of the serving thread instead of wall
time, for busy machines.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from gati.adaptation.replay import Period, record, replay
from gati.adaptation.settings import AdaptSettings
from gati.composition.load import open_served
from gati.files import atomic_write_text
from gati.video import Region

VIDEOS = {
    "car park": (
        "intel_car-detection_768x432_377f.mp4",
        (Region(40, 60, 200, 200), Region(300, 200, 220, 220), Region(540, 120, 180, 180)),
    ),
    "motorway": (
        "highway_m30_320x240_748f.avi",
        (Region(20, 80, 100, 100), Region(120, 100, 90, 90)),
    ),
    "highway": (
        "highway_cdnet_320x240_1699f.avi",
        (Region(150, 40, 80, 80), Region(60, 120, 110, 110), Region(220, 60, 90, 90)),
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "nothing learned": {"enabled": False},
    "caches": {"recall": False},
    "memory and caches": {},
}


def main() -> int:
    """Print a row per video and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--composition", default="default")
    parser.add_argument("--accuracy", type=float, default=0.97)
    parser.add_argument("--interval", type=float, default=10.0, help="seconds of stream time")
    parser.add_argument("--videos", nargs="+", choices=list(VIDEOS), default=list(VIDEOS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    served = open_served(arguments.library, composition=arguments.composition, threads=1)
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    rows: list[dict[str, Any]] = []
    print("| video | learned | requests | gain | from | memory | hits | agreement | worst 200 | after |")
    print(f"|{'---|' * 10}")
    for video in arguments.videos:
        name, regions = VIDEOS[video]
        recording = record(served, str(arguments.data / name), regions=regions)
        asked = {"accuracy": arguments.accuracy, "interval_s": arguments.interval, "seed": arguments.seed}
        for way in arguments.ways:
            settings = AdaptSettings(**{**asked, **WAYS[way]})
            report = replay(served, recording, settings, clock=clock)
            total = report.total
            print(f"| {video} | {way} | {total.requests} | {total.gain:.2f}x | {_after(report.after)} |")
            rows.append({"video": video, "learned": way, **report.to_json()})
    if arguments.json is not None:
        atomic_write_text(arguments.json, json.dumps(rows, indent=1) + "\n")
    return 0


def _after(period: Period | None) -> str:
    if period is None:
        return " | | | | |"
    return (
        f"{period.from_s:.1f} s | {period.recall_rate:.0%} | {period.hit_rate:.0%} | "
        f"{period.agreement:.4f} | {period.worst_agreement:.3f} | **{period.gain:.2f}x**"
    )


if __name__ == "__main__":
    raise SystemExit(main())
