"""Inject a fault every few seconds into a server under load, and check the outcome of every request.

    python -m benchmarks.chaos [--minutes 30] [--every 5] [--load 0.7] [--only FAULT] [--json FILE]

Faults rotate: processes killed, stopped and hanging; connections cut, half sent and slow; a full disk, no
file descriptors left, a clock jump; the record store and the repository gone and back; versions loaded
meanwhile. Every request must be answered correctly or refused with a reason, nothing may be left behind, and
memory must not grow; otherwise the exit status is 1. Clients, server and faults run on this machine. The
capacity of the server, next to its clients, is measured first; requests then arrive at `--load` times that
rate, whether or not earlier ones are answered.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.services.chaos import KINDS, Chaos, Report

GROWTH = 0.10  # allowed growth of the scheduler's memory from the second to the last quarter of a run
SLACK_S = 2.0  # allowed delay past a request's deadline, since the machine is busy


def growth(report: Report) -> float:
    """Return the relative growth of memory; 0 if the run is too short to tell."""
    sizes = np.array(report.resident_bytes, dtype=float)
    if len(sizes) < 8:
        return 0.0
    quarter = len(sizes) // 4
    return float(np.median(sizes[-quarter:]) / np.median(sizes[quarter : 2 * quarter]) - 1.0)


def verdicts(report: Report) -> dict[str, bool]:
    """Return each requirement and whether it holds."""
    before, after = report.before, report.after
    return {
        "every request answered or refused with a reason": not report.unexplained,
        "no wrong answer": not report.wrong,
        "no later than its deadline": report.latest_s <= SLACK_S,
        "no process or folder left": not report.left and report.status == 0,
        "no thread or file left": before is not None
        and after is not None
        and after.threads <= before.threads + 8
        and after.files <= before.files + 8,
        "memory flat": growth(report) <= GROWTH,
        "no mistake in the log": not report.mistakes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between faults")
    parser.add_argument("--load", type=float, default=0.7, help="share of the measured capacity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=list(KINDS), help="inject only these faults")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gati-chaos-") as folder:
        chaos = Chaos(Path(folder), seed=given.seed, load=given.load)
        report = chaos.run(60.0 * given.minutes, given.every, tuple(given.only or ()))
    found = verdicts(report)
    document = {**report.to_json(), "growth": growth(report), "verdicts": found}
    if given.json is not None:
        given.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
    document.pop("resident_bytes")
    print(json.dumps(document, indent=1))
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
