"""Regions of pictures, and names of sources without secrets."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gati.errors import GatiError, VideoError
from gati.video import Frame, Region, parse_region
from gati.video.frames import redact

PIXELS = st.integers(0, 60)


def frame(width: int, height: int) -> Frame:
    """Each pixel says where it is."""
    rows, columns = np.mgrid[0:height, 0:width]
    image = np.stack([columns, rows, np.zeros_like(rows)], axis=2).astype(np.uint8)
    return Frame(image, 0, 0.0, "test")


@given(x=PIXELS, y=PIXELS, width=st.integers(1, 60), height=st.integers(1, 60))
def test_what_was_written_is_read_back(x: int, y: int, width: int, height: int) -> None:
    region = Region(x, y, width, height)
    assert parse_region(str(region)) == region


@given(x=PIXELS, y=PIXELS, width=st.integers(1, 60), height=st.integers(1, 60))
def test_a_region_holds_its_pixels_or_is_refused(x: int, y: int, width: int, height: int) -> None:
    whole = frame(50, 40)
    region = Region(x, y, width, height)
    if x + width <= 50 and y + height <= 40:
        cut = region.crop(whole)
        assert cut.shape == (height, width, 3)
        assert tuple(cut[0, 0, :2]) == (x, y)
        assert tuple(cut[-1, -1, :2]) == (x + width - 1, y + height - 1)
        assert np.shares_memory(cut, whole.image), "nothing is copied"
    else:
        with pytest.raises(VideoError, match="but the picture has 50 x 40 pixels"):
            region.crop(whole)


def test_the_error_says_where_the_region_reaches_and_how_large_the_picture_is() -> None:
    with pytest.raises(VideoError) as caught:
        parse_region("300,10,40,20").crop(frame(320, 240))
    assert str(caught.value) == (
        "region 300,10,40,20 reaches to column 340 and row 30, but the picture has 320 x 240 pixels; "
        "give x,y,width,height inside it"
    )


@pytest.mark.parametrize("region", [Region(-1, 0, 5, 5), Region(0, -1, 5, 5), Region(0, 0, 0, 5)])
def test_a_region_made_by_hand_is_checked_too(region: Region) -> None:
    with pytest.raises(VideoError, match="is invalid"):
        region.crop(frame(20, 20))


@pytest.mark.parametrize(
    "text",
    ["", "1,2,3", "1,2,3,4,5", "a,b,c,d", "-1,0,5,5", "1.5,0,5,5", "0 0 5 5", "0,0,5,5px", "9999999,0,1,1"],
)
def test_what_is_no_region_is_told_how_to_write_one(text: str) -> None:
    with pytest.raises(VideoError, match=re.escape(f"region {text!r} is not x,y,width,height")):
        parse_region(text)


@pytest.mark.parametrize("text", ["0,0,0,5", "0,0,5,0"])
def test_an_empty_region_is_refused(text: str) -> None:
    with pytest.raises(VideoError, match="is empty"):
        parse_region(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("road.mp4", "road.mp4"),
        ("camera:0", "camera:0"),
        ("rtsp://10.0.0.7:554/live", "rtsp://10.0.0.7:554/live"),
        ("rtsp://me:secret@10.0.0.7/live", "rtsp://***@10.0.0.7/live"),
        ("rtsp://me:s/e?c#ret@10.0.0.7/live", "rtsp://***@10.0.0.7/live"),
        ("rtsp://me:s@cret@10.0.0.7/live", "rtsp://***@10.0.0.7/live"),
        ("http://cam/mjpg?user=me&pwd=secret&channel=2", "http://cam/mjpg?user=***&pwd=***&channel=2"),
        ("http://cam/mjpg?secret", "http://cam/mjpg?***"),
        ("http://cam/mjpg#secret", "http://cam/mjpg"),
        ("http://cam/mjpg?channel=1;password=secret", "http://cam/mjpg?channel=***"),
        ("http://cam/mjpg?resolution=640x480&fps=12.5", "http://cam/mjpg?resolution=640x480&fps=12.5"),
        ("rtsp://cam/usr=me&pw=secret", "rtsp://cam/usr=***&pw=***"),
        ("rtsp://cam/user=me_password=secret_channel=1.sdp", "rtsp://cam/user=***"),
        (" rtsp://me:secret@10.0.0.7/live", " rtsp://***@10.0.0.7/live"),
        ("opencv:rtsp://me:secret@10.0.0.7/live", "opencv:rtsp://***@10.0.0.7/live"),
        ("rtsp:/me:secret@10.0.0.7/live", "rtsp:/***@10.0.0.7/live"),
        ("opencv:rtsp:/me:secret@10.0.0.7/live", "opencv:rtsp:/***@10.0.0.7/live"),
        ("://me:secret@10.0.0.7/live", "://***@10.0.0.7/live"),
        ("C:/me@home.mp4", "C:/me@home.mp4"),
        ("opencv:C:/me@home.mp4", "opencv:C:/me@home.mp4"),
        ("opencv:/videos/me@home.mp4", "opencv:/videos/me@home.mp4"),
    ],
)
def test_an_address_is_shown_without_its_secrets(text: str, shown: str) -> None:
    assert redact(text) == shown


@given(
    user=st.text(st.characters(exclude_characters="\n"), min_size=4),
    password=st.text(st.characters(exclude_characters="\n"), min_size=4),
)
def test_no_user_and_no_password_is_ever_shown(user: str, password: str) -> None:
    assert redact(f"rtsp://{user}:{password}@10.0.0.7/live") == "rtsp://***@10.0.0.7/live"


def test_a_video_error_is_one_of_ours() -> None:
    assert issubclass(VideoError, GatiError)
    assert (VideoError.exit_status, VideoError.http_status) == (2, 422)
