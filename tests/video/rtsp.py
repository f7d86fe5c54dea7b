"""A camera that speaks RTSP over TCP: MPEG-TS in RTP, interleaved, with an optional password."""

from __future__ import annotations

import base64
import io
import itertools
import re
import socket
import ssl
import struct
from collections.abc import Iterable

import av

from tests.video.films import Device, encode

_SDP = "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=test\r\nt=0 0\r\nm=video 0 RTP/AVP 33\r\na=control:track\r\n"


def transport_stream(count: int, fps: int = 25) -> bytes:
    """`count` pictures as MPEG-2 in an MPEG transport stream, each a key picture."""
    file = io.BytesIO()
    with av.open(file, "w", format="mpegts") as container:
        encode(container, count, fps, "mpeg2video", gop=1)
    return file.getvalue()


class RtspCamera(Device):
    """Plays `stream` to each connection, then hangs up; after so many `hang_ups` it plays it without end."""

    def __init__(
        self,
        stream: bytes,
        password: str | None = None,
        hang_ups: int = 2,
        pause_s: float = 0.002,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self._stream = stream
        self._hang_ups = hang_ups
        self._pause_s = pause_s
        self._token = None if password is None else base64.b64encode(password.encode()).decode()
        self.played = 0
        self.transports: list[str] = []
        super().__init__()

    def talk(self, connection: socket.socket) -> None:
        if self._tls is not None:
            with self._tls.wrap_socket(connection, server_side=True) as encrypted:
                return self._talk(encrypted)
        return self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        lines = connection.makefile("rb")
        while (request := _request(lines)) is not None:
            verb, headers = request
            number = f"CSeq: {headers.get('cseq', '0')}\r\n"
            if self._token is not None and headers.get("authorization") != f"Basic {self._token}":
                refusal = 'WWW-Authenticate: Basic realm="camera"\r\n\r\n'
                connection.sendall(f"RTSP/1.0 401 Unauthorized\r\n{number}{refusal}".encode())
                continue
            connection.sendall(f"RTSP/1.0 200 OK\r\n{number}{self._reply(verb, headers)}".encode())
            if verb == "PLAY":
                self.played += 1
                return self._play(connection)
        return None

    def _reply(self, verb: str, headers: dict[str, str]) -> str:
        if verb == "DESCRIBE":
            return f"Content-Type: application/sdp\r\nContent-Length: {len(_SDP)}\r\n\r\n{_SDP}"
        if verb == "SETUP":
            self.transports.append(headers["transport"])
            return "Transport: RTP/AVP/TCP;unicast;interleaved=0-1\r\nSession: 1\r\n\r\n"
        return "Session: 1\r\nPublic: OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN\r\n\r\n"

    def _play(self, connection: socket.socket) -> None:
        size = 7 * 188
        starts: Iterable[int] = range(0, len(self._stream), size)
        if self.played > self._hang_ups:
            starts = itertools.cycle(starts)
        for number, start in enumerate(starts):
            payload = self._stream[start : start + size]
            header = struct.pack("!BBHII", 0x80, 33, number % 65_536, number * 900, 1)
            connection.sendall(struct.pack("!cBH", b"$", 0, 12 + len(payload)) + header + payload)
            if self._closed.wait(self._pause_s):
                return


def _request(lines: io.BufferedReader) -> tuple[str, dict[str, str]] | None:
    first = lines.readline()
    if not first:
        return None
    headers: dict[str, str] = {}
    while (line := lines.readline()) not in (b"\r\n", b""):
        match = re.fullmatch(r"([^:]+):\s*(.*)\r\n", line.decode())
        if match:
            headers[match[1].lower()] = match[2]
    return first.split()[0].decode(), headers
