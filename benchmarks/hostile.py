"""What hostile clients cost the others: bodies of 64 MiB of every kind, and a thousand that say nothing.

    python -m benchmarks.hostile [--connections 990] [--seconds 6]

For each body: by how much the scheduler's memory rose at most, and how long its event loop stood still at
most, told by a client that asks whether it lives, again and again. Then the latency of honest clients, in
turns with and without silent and half-sent connections. Everything runs on this machine.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np

from tests.services.running import Serving, make_folder, request

MIB = 2**20
SIZE = 64 * MIB - 1024
INFER = "/v2/models/small/infer"
QUERY = "/v1/pipelines/sides/query"
JSON = {"Content-Type": "application/json"}
PACKED = {**JSON, "Content-Encoding": "gzip"}
SPARSE = b"1" + 32 * b" " + b","
TURNS = 4


def binary() -> tuple[bytes, dict[str, str]]:
    """A tensor that the model does not take, as its bytes."""
    count = SIZE // 4
    tensor = {"name": "input", "shape": [1, count], "datatype": "FP32"}
    text = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": 4 * count}}]}).encode()
    return text + bytes(4 * count), {"Inference-Header-Content-Length": str(len(text))}


def form() -> tuple[bytes, dict[str, str]]:
    """A form with a file that is no image."""
    head = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    return head + bytes(SIZE) + b"\r\n--b--\r\n", {"Content-Type": "multipart/form-data; boundary=b"}


def tensor_of(data: bytes) -> bytes:
    """A request with this text as the data."""
    return b'{"inputs":[{"name":"input","shape":[1],"datatype":"FP32","data":' + data + b"}]}"


KINDS: dict[str, Callable[[], tuple[str, bytes, dict[str, str]]]] = {
    "no JSON": lambda: (INFER, b"x" * SIZE, JSON),
    "spaces": lambda: (INFER, b" " * SIZE, JSON),
    "no JSON, 31 MiB": lambda: (INFER, b"x" * 31 * MIB, JSON),
    "a text, 31 MiB": lambda: (INFER, tensor_of(b'"' + b"x" * 31 * MIB + b'"'), JSON),
    "commas, 2.5 MiB": lambda: (INFER, tensor_of(b"[" + b"1," * (5 * MIB // 4) + b"1]"), JSON),
    "brackets": lambda: (INFER, b"[" * SIZE, JSON),
    "commas": lambda: (INFER, b"[" + b"1," * (SIZE // 2 - 1) + b"1]", JSON),
    "a text": lambda: (INFER, tensor_of(b'"' + b"x" * (SIZE - 100) + b'"'), JSON),
    "a number": lambda: (INFER, tensor_of(b"1" * (SIZE - 100)), JSON),
    "numbers far apart": lambda: (INFER, tensor_of(b"[" + SPARSE * (SIZE // len(SPARSE) - 9) + b"1]"), JSON),
    "a tensor in binary": lambda: (INFER, *binary()),
    "packed zeros": lambda: (INFER, gzip.compress(bytes(SIZE)), PACKED),
    "packed twice the limit": lambda: (INFER, gzip.compress(bytes(2 * SIZE)), PACKED),
    "an image that is none": lambda: (QUERY, bytes(SIZE), {"Content-Type": "image/png"}),
    "a form": lambda: (QUERY, *form()),
}  # fmt: skip


def resident_bytes(pid: int, name: str) -> int:
    """Resident memory: `VmRSS` now, `VmHWM` at most since `forget_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name + ":")).split()[1])


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@contextmanager
def heartbeat(url: str) -> Iterator[list[float]]:
    """A client that asks whether the server lives; what each answer took, in ms."""
    took: list[float] = []
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=60.0) as client:
            while not over.is_set():
                began_s = time.perf_counter()
                client.get("/v2/health/live")
                took.append(1e3 * (time.perf_counter() - began_s))
                time.sleep(0.002)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()


def bodies(running: Serving) -> None:
    """What each body costs."""
    pid = running.process.pid
    print(f"{'body of 64 MiB':28}{'status':>7}{'rise MiB':>10}{'longest ms':>12}{'p50 ms':>9}")
    for name, make in KINDS.items():
        path, body, headers = make()
        before = resident_bytes(pid, "VmRSS")
        forget_peak(pid)
        with heartbeat(running.url) as took:
            time.sleep(0.5)
            del took[:]
            with httpx.Client(base_url=running.url, timeout=60.0) as client:
                status = client.post(path, content=body, headers=headers).status_code
            time.sleep(0.1)
        rise = (resident_bytes(pid, "VmHWM") - before) / MIB
        print(f"{name:28}{status:>7}{rise:>10.0f}{max(took):>12.0f}{np.median(took):>9.1f}", flush=True)


def latencies_ms(url: str, seconds: float) -> list[float]:
    """Of one honest client."""
    found, body = [], request()
    with httpx.Client(base_url=url, timeout=60.0) as client:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            began_s = time.perf_counter()
            client.post(INFER, json=body).raise_for_status()
            found.append(1e3 * (time.perf_counter() - began_s))
    return found


def silent(running: Serving, count: int, seconds: float) -> None:
    """Honest clients, with and without so many that say nothing or half of something."""
    address = urlsplit(running.url)
    place = (str(address.hostname), int(address.port or 0))
    whole = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n{{".encode()
    beginnings = (b"", b"POST", whole[:40], whole)
    rows: dict[bool, list[float]] = {False: [], True: []}
    latencies_ms(running.url, 1.0)
    for _ in range(TURNS):
        rows[False] += latencies_ms(running.url, seconds)
        with ExitStack() as stack:
            for number in range(count):
                connection = stack.enter_context(socket.create_connection(place))
                connection.sendall(beginnings[number % len(beginnings)])
            rows[True] += latencies_ms(running.url, seconds)
        time.sleep(1.0)
    print(f"{'honest client':28}{'requests':>9}{'p50 ms':>9}{'p99 ms':>9}")
    for crowded, name in ((False, "alone"), (True, f"beside {count} others")):
        p50, p99 = np.percentile(rows[crowded], (50, 99))
        print(f"{name:28}{len(rows[crowded]):>9}{p50:>9.2f}{p99:>9.2f}")
    ratio = np.percentile(rows[True], 99) / np.percentile(rows[False], 99)
    print(f"p99: {ratio:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=990)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each turn")
    given = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, given.connections + 128)), hard))
    with tempfile.TemporaryDirectory(prefix="gati-hostile-") as name:
        folder = make_folder(Path(name))
        file = folder / "serve.toml"
        text = file.read_text().replace("largest_body_bytes = 400000\n", "")
        file.write_text(f"head_timeout_s = 60.0\nbody_timeout_s = 60.0\n{text}", encoding="utf-8")
        with Serving(file, "--log-level", "error") as running:
            bodies(running)
            silent(running, given.connections, given.seconds)


if __name__ == "__main__":
    main()
