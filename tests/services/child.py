"""A small service for tests of the supervisor, `python -m tests.services.child`, as scripted."""

from __future__ import annotations

import json
import os
import signal
import sys
import time


def main() -> int:
    """Do what the settings say; their name is the deed."""
    settings = json.loads(sys.stdin.buffer.readline())
    deed = settings["deed"]
    with open(settings["diary"], "a", encoding="utf-8") as diary:
        diary.write(f"{os.getpid()} {json.dumps(sys.argv)} {os.getsid(0) == os.getpid()}\n")
        diary.write("".join(f"environment {name}\n" for name in os.environ if name.startswith("GATI_")))
    if deed == "wrong":
        print("error: nobody can mend this by a restart", file=sys.stderr)
        return 2
    if deed == "dies":
        print("it hurts", file=sys.stderr, flush=True)
        return 3
    if deed == "floods":
        os.write(1, b"x" * 5_000_000)
        os.write(1, b"\n[[" + b"[" * 100_000 + b"\n{}\n7\n")
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    print(json.dumps({"listening": f"unix:{settings['socket']}"}), flush=True)
    if deed == "deaf":
        time.sleep(3600)
    while os.read(0, 4096):
        continue
    return 0


if __name__ == "__main__":
    sys.exit(main())
