"""Fuzz a real server with 10,000 malformed messages each over HTTP and Thrift.

    python -m benchmarks.fuzz [--cases 10000] [--seed 0]

No 5xx status except 503 and 504 may occur, no connection may hang, no traceback may be logged, and no process
may exit. The same seed sends the same bytes; a failure names its case.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from tests.services.fuzzing import fuzz_frames, fuzz_http
from tests.services.running import Serving, make_folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gati-fuzz-") as name:
        folder = make_folder(Path(name))
        with Serving(folder / "serve.toml", environment={"TMPDIR": name}) as running:
            processes = running.processes()
            address = urlsplit(running.url)
            began_s = time.monotonic()
            statuses = fuzz_http((str(address.hostname), int(address.port or 0)), given.cases, given.seed)
            print(
                f"HTTP: {given.cases} cases in {time.monotonic() - began_s:.0f} s", dict(statuses), flush=True
            )
            began_s = time.monotonic()
            outcomes = fuzz_frames(next(folder.glob("gati-socket-*/s")), given.cases, given.seed)
            print(f"Thrift: {given.cases} cases in {time.monotonic() - began_s:.0f} s", dict(outcomes))
            ended = [] if running.processes() == processes else ["a process has ended"]
            ended += [reply.text for reply in map(running.infer, processes) if reply.status_code != 200]
        tracebacks = [line[-1500:] for line in running.said if "Traceback" in line]
    print("tracebacks:", len(tracebacks), *tracebacks[:3], "ended:", *ended, sep="\n")
    return 1 if tracebacks or ended else 0


if __name__ == "__main__":
    sys.exit(main())
