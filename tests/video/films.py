"""Small videos whose pictures encode their index, and a camera on a socket with injectable faults."""

from __future__ import annotations

import contextlib
import io
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Self

import av
import numpy as np
from av.container import OutputContainer
from numpy.typing import NDArray
from PIL import Image

Send = Callable[[bytes], None]
Script = Callable[[Send, threading.Event], None]


def picture(number: int, width: int = 64, height: int = 48) -> NDArray[np.uint8]:
    """A picture whose brightness is its number times 8."""
    return np.full((height, width, 3), number * 8 % 256, dtype=np.uint8)


def number_of(image: NDArray[np.uint8]) -> int:
    """The number that `picture` was given, below 32; survives lossy compression."""
    return round(float(image[8:-8, 8:-8].mean()) / 8.0)


def film(
    path: Path, count: int, fps: int = 10, codec: str = "mpeg4", rotation: int = 0, gop: int = 12
) -> Path:
    """Write `count` pictures of 64 x 48 at `fps`."""
    with av.open(str(path), "w") as container:
        encode(container, count, fps, codec, rotation, gop)
    return path


def encode(
    container: OutputContainer, count: int, fps: int, codec: str, rotation: int = 0, gop: int = 12
) -> None:
    """Put `count` pictures into a container."""
    stream = container.add_stream(codec, rate=fps)
    stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
    stream.codec_context.gop_size, stream.codec_context.bit_rate = gop, 2_000_000
    if rotation:
        stream.set_display_rotation(rotation)
    for number in range(count):
        frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
        frame.pts, frame.time_base = number, Fraction(1, fps)
        container.mux(stream.encode(frame))
    container.mux(stream.encode())


def jpeg(number: int) -> bytes:
    """Picture `number` as a JPEG."""
    file = io.BytesIO()
    Image.fromarray(picture(number)).save(file, "JPEG")
    return file.getvalue()


def part(number: int) -> bytes:
    """Picture `number` as a part of an MJPEG stream."""
    data = jpeg(number)
    return b"--edge\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(data) + data + b"\r\n"


def plays(count: int | None = None, *, every_s: float = 0.01, then_hang: bool = False) -> Script:
    """A connection that sends `count` pictures, then ends or says no more without hanging up.

    Without a `count` it goes on until the camera is switched off.
    """

    def script(send: Send, closed: threading.Event) -> None:
        for number in itertools.count() if count is None else range(count):
            send(part(number % 32))
            if closed.wait(every_s):
                return
        if then_hang:
            closed.wait()

    return script


def refuses(send: Send, closed: threading.Event) -> None:
    """A connection that is hung up at once; marked, so that nothing is sent before."""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve the files of a folder over HTTP; yields host and port."""
    with HTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


class Device:
    """A device on 127.0.0.1 that talks to whoever connects, until it is switched off at the end of `with`."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._closed = threading.Event()
        self.place = f"127.0.0.1:{self._server.getsockname()[1]}/live"
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._server.close()

    def talk(self, connection: socket.socket) -> None:
        """Say what the device has to say on a connection; an OSError is its end."""
        raise NotImplementedError

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self.talk(connection)


class Camera(Device):
    """An MJPEG camera: each connection follows the next of `scripts`, the last one again and again."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.requests: list[bytes] = []
        super().__init__()
        self.url = f"http://{self.place}"

    def talk(self, connection: socket.socket) -> None:
        self.requests.append(connection.recv(65_536))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if script is refuses:
            return
        connection.sendall(
            b"HTTP/1.0 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=edge\r\n\r\n"
        )
        script(connection.sendall, self._closed)
