"""What a source may open, and which certificates it trusts."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import NamedTuple

import av
import pytest

from gati.errors import VideoError
from gati.video import Reconnect, open_source
from tests.services.certificates import certify
from tests.video.films import encode, film
from tests.video.rtsp import RtspCamera, transport_stream
from tests.waiting import LONG_S

ONCE = Reconnect(attempts=1, first_s=0.01, cap_s=0.05, stall_s=LONG_S, open_s=LONG_S)
COUNT = 5


class Served(NamedTuple):
    """A folder with a film, over HTTP and HTTPS; the latter with a certificate that vouches for itself."""

    folder: Path
    certificate: Path
    key: Path
    http: str
    https: str
    elsewhere: str  # HTTPS with a certificate of another name
    other: Path


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/to?"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to?").removesuffix("#.mp4"))
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("films")
    film(folder / "film.mp4", COUNT)
    with av.open(str(folder / "film.ts"), "w", format="mpegts") as container:
        encode(container, COUNT, 10, "mpeg2video", gop=1)
    certificate, key = certify(folder)
    other, other_key = certify(tmp_path_factory.mktemp("other"), "DNS:camera.example")
    servers = [_server(folder), _server(folder, certificate, key), _server(folder, other, other_key)]
    ports = [server.server_port for server in servers]
    yield Served(
        folder,
        certificate,
        key,
        f"http://127.0.0.1:{ports[0]}",
        f"https://127.0.0.1:{ports[1]}",
        f"https://127.0.0.1:{ports[2]}",
        other,
    )
    for server in servers:
        server.shutdown()
        server.server_close()


def _server(folder: Path, certificate: Path | None = None, key: Path | None = None) -> HTTPServer:
    server = HTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        # the handshake is for the thread of the connection: one that fails must not end the server
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def playlist(folder: Path, name: str, entry: str) -> str:
    """A playlist of one film, as HTTP Live Streaming has them."""
    lines = ("#EXTM3U", "#EXT-X-TARGETDURATION:2", "#EXTINF:2,", entry, "#EXT-X-ENDLIST", "")
    (folder / name).write_text("\n".join(lines))
    return name


def pictures(address: str, authority: Path | None = None) -> int:
    with open_source(address, policy="wait", authority=authority) as source:
        return len(list(source))


def refused(address: str, authority: Path | None = None) -> str:
    with pytest.raises(VideoError) as caught:
        pictures(address, authority)
    return str(caught.value)


def test_a_certificate_that_nobody_vouches_for_is_refused_unless_its_authority_is_named(
    served: Served,
) -> None:
    address = f"{served.https}/film.mp4"
    assert "certificate is not trusted; name the file of who issued it (--authority" in refused(address)
    assert "certificate is not trusted" in refused(address, served.other)
    assert pictures(address, served.certificate) == COUNT


def test_a_certificate_of_another_name_is_refused(served: Served) -> None:
    assert "certificate is not trusted" in refused(f"{served.elsewhere}/film.mp4", served.other)


def test_a_camera_over_rtsps_proves_who_it_is(served: Served) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(served.certificate, served.key)
    with RtspCamera(transport_stream(20), "me:secret", hang_ups=0, tls=context) as device:
        address = f"rtsps://me:secret@{device.place}"
        with pytest.raises(VideoError, match="certificate is not trusted") as caught:
            next(open_source(address, reconnect=ONCE))
        assert "secret" not in str(caught.value)
        assert device.played == 0
        with open_source(address, reconnect=ONCE, authority=served.certificate) as source:
            assert next(source).image.shape == (48, 64, 3)
        assert device.played == 1


def test_a_file_of_authorities_that_is_none_is_told_at_once(served: Served, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    for file in (tmp_path / "empty.pem", tmp_path / "absent.pem"):
        with pytest.raises(VideoError, match=r"is not a PEM file of certificates \("):
            open_source(f"{served.https}/film.mp4", authority=file)


@pytest.mark.parametrize("text", ["rtsp://127.0.0.1:9/live", "camera:0", "."])
def test_what_shows_no_certificate_takes_no_authority(served: Served, text: str) -> None:
    with pytest.raises(VideoError, match="authority"):
        open_source(text, authority=served.certificate)


def test_a_redirect_leads_to_no_file_and_from_https_to_no_http(served: Served) -> None:
    film_file = f"file://{served.folder}/film.mp4"
    assert "leads to where such a source may not" in refused(f"{served.http}/to?{film_file}")
    downgrade = f"{served.https}/to?{served.http}/film.mp4"
    assert "leads to where such a source may not" in refused(downgrade, served.certificate)
    assert pictures(f"{served.http}/to?{served.http}/film.mp4") == COUNT
    assert pictures(f"{served.http}/to?{served.https}/film.mp4", served.certificate) == COUNT
    refused(f"{served.http}/to?{served.https}/film.mp4")  # the second step is verified like any


def test_a_playlist_from_the_network_reads_films_there_and_no_local_files(served: Served) -> None:
    folder = served.folder
    playlist(folder, "beside.m3u8", "film.ts")
    playlist(folder, "file.m3u8", f"file://{folder}/film.ts")
    playlist(folder, "path.m3u8", f"{folder}/film.ts")
    playlist(folder, "concat.m3u8", f"concat:{folder}/film.ts")
    playlist(folder, "plain.m3u8", f"{served.http}/film.ts")
    assert pictures(f"{served.http}/beside.m3u8") == COUNT
    assert pictures(f"{served.https}/beside.m3u8", served.certificate) == COUNT
    for name in ("file", "path", "concat"):
        refused(f"{served.http}/{name}.m3u8")
    refused(f"{served.https}/plain.m3u8", served.certificate)


def test_a_local_playlist_reads_nothing(served: Served, tmp_path: Path) -> None:
    (tmp_path / "list.mp4").write_text(f"ffconcat version 1.0\nfile {served.folder}/film.ts\n")
    playlist(tmp_path, "film.m3u8", f"{served.folder}/film.ts")
    playlist(tmp_path, "network.m3u8", f"{served.http}/film.ts")
    for name in ("list.mp4", "film.m3u8", "network.m3u8"):
        assert "it is a playlist" in refused(str(tmp_path / name))
    assert pictures(str(served.folder / "film.ts")) == COUNT
