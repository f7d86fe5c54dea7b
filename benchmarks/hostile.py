"""Cost of hostile clients to others: 64 MiB bodies of every kind, and a thousand silent connections.

    python -m benchmarks.hostile [--connections 990] [--seconds 6] [--times 3] [--only KIND]

Each body is sent several times. Reports the worst rise of the scheduler's memory and the longest stall of its
event loop, as seen by a client that polls the health endpoint. Then measures the latency of honest clients,
alternately with and without silent and half-sent connections, during which no request may be refused.
Everything runs on this machine. The exit status is 1 if a bound is exceeded: 100 MiB, 200 ms, 1.2 times the
p99.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import io
import json
import resource
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
from PIL import Image

from services.config import ServeConfig
from tests.services.running import Serving, make_folder, request

MIB = 2**20
SIZE = 64 * MIB - 1024
INFER = "/v2/models/small/infer"
QUERY = "/v1/pipelines/sides/query"
JSON = {"Content-Type": "application/json"}
PACKED = {**JSON, "Content-Encoding": "gzip"}
SPARSE = b"1" + 32 * b" " + b","
TURNS = 4
MOST_RISE_MIB, MOST_STALL_MS, MOST_RATIO = 100, 200, 1.2


def binary() -> tuple[bytes, dict[str, str]]:
    """Return a tensor that the model rejects, in binary."""
    count = SIZE // 4
    tensor = {"name": "input", "shape": [1, count], "datatype": "FP32"}
    text = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": 4 * count}}]}).encode()
    return text + bytes(4 * count), {"Inference-Header-Content-Length": str(len(text))}


def text_and_binary() -> tuple[bytes, dict[str, str]]:
    """Return a binary tensor after as much JSON as the server parses."""
    text = b'{"id":"' + b"x" * (SIZE // 6 - 100) + b'"}'
    return text + bytes(SIZE - len(text)), {"Inference-Header-Content-Length": str(len(text))}


def texts_in_binary(text: bytes) -> tuple[bytes, dict[str, str]]:
    """Return as many texts as fit."""
    each = struct.pack("<I", len(text)) + text
    count = (SIZE - 1024) // len(each)
    tensor = {"name": "text", "shape": [count], "datatype": "BYTES"}
    size = {"binary_data_size": count * len(each)}
    head = json.dumps({"inputs": [{**tensor, "parameters": size}]}).encode()
    return head + each * count, {"Inference-Header-Content-Length": str(len(head))}


def picture(side: int = 3500, noise: bool = False) -> bytes:
    """Return an image near the server's pixel limit; highly compressed, or not if `noise`."""
    pixels = np.zeros((side, side, 3), np.uint8)
    if noise:
        pixels[:] = np.random.default_rng(0).integers(0, 256, pixels.shape, np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()


def form() -> tuple[bytes, dict[str, str]]:
    """Return a form with a file that is not an image."""
    head = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    return head + bytes(SIZE) + b"\r\n--b--\r\n", {"Content-Type": "multipart/form-data; boundary=b"}


def tensor_of(data: bytes, count: int = 1) -> bytes:
    """Return a request with `data` as the text of `count` numbers."""
    shape = str(count).encode()
    return b'{"inputs":[{"name":"input","shape":[' + shape + b'],"datatype":"FP32","data":' + data + b"}]}"


def fitting(part: bytes, value_bytes: int) -> int:
    """Return how many copies of a JSON part the server accepts, if each value takes `value_bytes`."""
    return int(0.99 * ServeConfig().largest_json_bytes) // (3 * len(part) + value_bytes)


def just_parsed(part: bytes, value_bytes: int) -> bytes:
    """Return a tensor whose data are as many parts as the server parses, with an invalid trailing comma."""
    count = fitting(part, value_bytes)
    return tensor_of(b"[" + (part * count)[:-1] + b"]", count)


def text_of(character: bytes, width: int = 1) -> bytes:
    """Return a tensor whose data are one string, as long as the server parses."""
    return tensor_of(b'"' + character * (fitting(b"", width + 2 * len(character)) - 100) + b'"')


def keys() -> bytes:
    """Return a request with as many keys as the server parses."""
    count = fitting(b'"123456":1,', 504)
    return b"{" + b",".join(b'"%06d":1' % number for number in range(count)) + b"}"


KINDS: dict[str, Callable[[], tuple[str, bytes, dict[str, str]]]] = {
    "an honest one": lambda: (INFER, json.dumps(request()).encode(), JSON),
    "no JSON": lambda: (INFER, b"x" * SIZE, JSON),
    "spaces": lambda: (INFER, b" " * SIZE, JSON),
    "brackets": lambda: (INFER, b"[" * SIZE, JSON),
    "commas": lambda: (INFER, b"[" + b"1," * (SIZE // 2 - 1) + b"1]", JSON),
    "a text": lambda: (INFER, tensor_of(b'"' + b"x" * (SIZE - 100) + b'"'), JSON),
    "a number": lambda: (INFER, tensor_of(b"1" * (SIZE - 100)), JSON),
    "numbers far apart": lambda: (INFER, tensor_of(b"[" + SPARSE * (SIZE // len(SPARSE) - 9) + b"1]"), JSON),
    "no JSON, just parsed": lambda: (INFER, b"x" * fitting(b"x", 0), JSON),
    "spaces, just parsed": lambda: (INFER, b" " * fitting(b" ", 0), JSON),
    "a text, just parsed": lambda: (INFER, text_of(b"x"), JSON),
    "a wide text, just parsed": lambda: (INFER, text_of("é".encode(), 8), JSON),
    "a number, just parsed": lambda: (INFER, tensor_of(b"1" * (fitting(b"1", 0) - 100)), JSON),
    "numbers, just parsed": lambda: (INFER, just_parsed(b"1,", 48), JSON),
    "large numbers, just parsed": lambda: (INFER, just_parsed(b"123456,", 48), JSON),
    "fractions, just parsed": lambda: (INFER, just_parsed(b"1.2345678,", 48), JSON),
    "rows, just parsed": lambda: (INFER, just_parsed(b"[1],", 152), JSON),
    "objects, just parsed": lambda: (INFER, just_parsed(b"{},", 408), JSON),
    "texts, just parsed": lambda: (INFER, just_parsed(b'"a",', 144), JSON),
    "keys, just parsed": lambda: (INFER, keys(), JSON),
    "numbers in a query, just parsed": lambda: (QUERY, just_parsed(b"1,", 48), JSON),
    "a tensor in binary": lambda: (INFER, *binary()),
    "JSON and a tensor": lambda: (INFER, *text_and_binary()),
    "empty texts in binary": lambda: (QUERY, *texts_in_binary(b"")),
    "wide texts in binary": lambda: (QUERY, *texts_in_binary(b"x" * 200_000 + "🜂".encode())),
    "a wide text in a query": lambda: (QUERY, b"x" * SIZE + "🜂".encode(), {"Content-Type": "text/plain"}),
    "packed zeros": lambda: (INFER, gzip.compress(bytes(SIZE)), PACKED),
    "packed twice the limit": lambda: (INFER, gzip.compress(bytes(2 * SIZE)), PACKED),
    "packed numbers, just parsed": lambda: (INFER, gzip.compress(just_parsed(b"1,", 48)), PACKED),
    "an image that is none": lambda: (QUERY, bytes(SIZE), {"Content-Type": "image/png"}),
    "an empty image": lambda: (QUERY, picture(), {"Content-Type": "image/png"}),
    "an image of noise": lambda: (QUERY, picture(noise=True), {"Content-Type": "image/png"}),
    "a form": lambda: (QUERY, *form()),
}


def send(url: str, path: str, body: bytes, headers: dict[str, str]) -> int:
    """Send a body and return the status. Does not copy the body, and lets other threads run."""
    address = urlsplit(url)
    connection = HTTPConnection(str(address.hostname), address.port, timeout=60.0)
    with closing(connection):
        connection.request("POST", path, body, headers)
        return connection.getresponse().status


def resident_bytes(pid: int, name: str) -> int:
    """Return resident memory: `VmRSS` is current, `VmHWM` the peak since `forget_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name + ":")).split()[1])


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@contextmanager
def heartbeat(url: str) -> Iterator[list[float]]:
    """Poll the server's health; yield the latencies in ms."""
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


def bodies(running: Serving, kinds: list[str], times: int) -> bool:
    """Measure the cost of each body; return whether all stay within bounds."""
    pid = running.process.pid
    kept = True
    print(f"{'body':34}{'MiB':>6}{'status':>7}{'rise MiB':>10}{'longest ms':>12}{'p50 ms':>9}")
    for name in kinds:
        path, body, headers = KINDS[name]()
        rises, longest, took = [], [], []
        for _ in range(times):
            before = resident_bytes(pid, "VmRSS")
            forget_peak(pid)
            with heartbeat(running.url) as beats:
                time.sleep(0.5)
                del beats[:]
                status = send(running.url, path, body, headers)
                time.sleep(0.1)
            rises.append((resident_bytes(pid, "VmHWM") - before) / MIB)
            longest.append(max(beats))
            took += beats
        figures = f"{max(rises):>10.0f}{max(longest):>12.0f}{np.median(took):>9.1f}"
        print(f"{name:34}{len(body) / MIB:>6.1f}{status:>7}{figures}", flush=True)
        kept &= max(rises) < MOST_RISE_MIB and max(longest) < MOST_STALL_MS
    return kept


def latencies_ms(url: str, seconds: float) -> tuple[list[float], list[str]]:
    """Return latencies of one honest client's answers, and the reasons of refusals."""
    found, refused, body = [], [], request()
    with httpx.Client(base_url=url, timeout=60.0) as client:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            began_s = time.perf_counter()
            reply = client.post(INFER, json=body)
            if reply.status_code == 200:
                found.append(1e3 * (time.perf_counter() - began_s))
            else:
                refused.append(f"{reply.status_code}: {reply.text[:200]}")
    return found, refused


def silent(running: Serving, count: int, seconds: float) -> bool:
    """Measure honest clients, alone and next to many silent ones; return whether bounds hold."""
    address = urlsplit(running.url)
    place = (str(address.hostname), int(address.port or 0))
    whole = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n{{".encode()
    beginnings = (b"", b"POST", whole[:40], whole)
    rows: dict[bool, list[float]] = {False: [], True: []}
    refused: dict[bool, list[str]] = {False: [], True: []}

    def ask(crowded: bool) -> None:
        answers, refusals = latencies_ms(running.url, seconds)
        rows[crowded] += answers
        refused[crowded] += refusals

    latencies_ms(running.url, 1.0)
    for _ in range(TURNS):
        ask(crowded=False)
        with ExitStack() as stack:
            for number in range(count):
                connection = stack.enter_context(socket.create_connection(place))
                connection.sendall(beginnings[number % len(beginnings)])
            ask(crowded=True)
        time.sleep(1.0)
    print(f"{'honest client':34}{'answers':>9}{'refused':>9}{'p50 ms':>9}{'p99 ms':>9}")
    for crowded, name in ((False, "alone"), (True, f"with {count} others")):
        p50, p99 = np.percentile(rows[crowded], (50, 99))
        print(f"{name:34}{len(rows[crowded]):>9}{len(refused[crowded]):>9}{p50:>9.2f}{p99:>9.2f}")
    for each in sorted({*refused[False], *refused[True]}):
        print(each)
    ratio = np.percentile(rows[True], 99) / np.percentile(rows[False], 99)
    print(f"p99: {ratio:.2f}x")
    return bool(ratio <= MOST_RATIO) and not refused[True]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=990, help="silent connections; 0 for none")
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds per measurement")
    parser.add_argument("--times", type=int, default=3, help="repetitions of each body")
    parser.add_argument("--only", action="append", choices=list(KINDS), help="send only these bodies")
    given = parser.parse_args()
    gc.disable()  # a collection in this process takes 0.2 s, which would count as the server's
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, given.connections + 128)), hard))
    with tempfile.TemporaryDirectory(prefix="gati-hostile-") as name:
        folder = make_folder(Path(name))
        file = folder / "serve.toml"
        text = (
            file.read_text()
            .replace("largest_body_bytes = 400000\n", "")
            .replace("largest_image_pixels = 4096\n", "")
        )
        file.write_text(f"head_timeout_s = 60.0\nbody_timeout_s = 60.0\n{text}", encoding="utf-8")
        with Serving(file, "--log-level", "error") as running:
            kept = bodies(running, given.only or list(KINDS), given.times)
            if given.connections:
                kept &= silent(running, given.connections, given.seconds)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
