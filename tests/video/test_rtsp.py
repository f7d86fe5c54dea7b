"""RTSP with a server on a socket."""

from __future__ import annotations

import socket

import pytest

from gati.errors import VideoError
from gati.video import FramePolicy, Reconnect, open_source
from tests.video.rtsp import RtspCamera, transport_stream
from tests.waiting import LONG_S, until

QUICK = Reconnect(first_s=0.01, cap_s=0.05, stall_s=LONG_S, open_s=LONG_S)


@pytest.fixture(scope="module")
def stream() -> bytes:
    return transport_stream(60)


def test_a_camera_behind_a_password_is_read_over_tcp_and_comes_back(stream: bytes) -> None:
    """Twice it hangs up after 60 pictures: a caller too slow to see any of the second 60 sees the third."""
    with RtspCamera(stream, "me:secret", hang_ups=2) as device:
        url = f"rtsp://me:secret@{device.place}"
        with open_source(url, reconnect=QUICK) as source:
            for frame in source:
                assert frame.image.shape == (48, 64, 3)
                assert frame.source == f"rtsp://***@{device.place}"
                if source.statistics.reconnects == 2 and frame.index >= 60:
                    break
            assert source.policy is FramePolicy.DROP_OLDEST
            until(lambda: device.played == 3)
        # Each of the first two connections had 60 at most: so they are counted over all of them.
        assert (source.statistics.reconnects, device.played) == (2, 3)
        assert all(transport.startswith("RTP/AVP/TCP") for transport in device.transports)
        assert source.reason == "the stream ended"


def test_a_wrong_password_is_told_and_not_shown(stream: bytes) -> None:
    with RtspCamera(stream, "me:secret") as device:
        source = open_source(f"rtsp://me:wrong@{device.place}", reconnect=QUICK)
        with pytest.raises(VideoError) as caught, source:
            next(source)
        assert str(caught.value) == (f"cannot read rtsp://***@{device.place}: user or password refused (401)")
        assert device.played == 0


def test_a_camera_that_accepts_and_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"rtsp://127.0.0.1:{server.getsockname()[1]}/live"
        with (
            pytest.raises(VideoError, match="no answer in time|no connection for 0.3 s"),
            open_source(url, reconnect=Reconnect(open_s=0.3)) as source,
        ):
            next(source)
