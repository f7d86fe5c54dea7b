"""Requirements on every video reader, PyAV and OpenCV alike, and OpenCV's handling of cameras."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gati.errors import VideoError
from gati.video import opencv
from gati.video.sources import open_source
from gati.video.status import SourceState
from tests.conftest import SHARED_DATA
from tests.video.films import film, number_of, picture


@pytest.fixture(params=["", "opencv:"], ids=["av", "opencv"])
def reader(request: pytest.FixtureRequest) -> str:
    """What stands before the name of a file for this reader."""
    if request.param:
        pytest.importorskip("cv2", reason="needs OpenCV: the extra gati[opencv]")
    return str(request.param)


def test_pictures_are_rgb_in_order_with_times_from_zero(tmp_path: Path, reader: str) -> None:
    path = film(tmp_path / "film.mp4", 20)
    with open_source(f"{reader}{path}") as source:
        frames = list(source)
    assert [number_of(frame.image) for frame in frames] == list(range(20))
    assert {(frame.image.shape, frame.image.dtype) for frame in frames} == {((48, 64, 3), np.dtype(np.uint8))}
    assert [frame.index for frame in frames] == list(range(20))
    assert [frame.time_s for frame in frames] == pytest.approx([number / 10 for number in range(20)])
    assert source.state is SourceState.ENDED
    assert (source.statistics.delivered, source.statistics.corrupt) == (20, 0)


def test_pictures_kept_are_not_overwritten_by_later_ones(tmp_path: Path, reader: str) -> None:
    frames = list(open_source(f"{reader}{film(tmp_path / 'film.mp4', 6)}"))
    before = [frame.image.copy() for frame in frames]
    frames[0].image[:] = 7
    assert all(np.array_equal(frame.image, kept) for frame, kept in zip(frames[1:], before[1:], strict=True))


def test_red_stays_red(tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def red(number: int, width: int = 64, height: int = 48) -> NDArray[np.uint8]:
        return np.concatenate(
            [np.full((height, width, 1), value, np.uint8) for value in (230, 20, 20)], axis=2
        )

    monkeypatch.setattr("tests.video.films.picture", red)
    first = next(open_source(f"{reader}{film(tmp_path / 'red.mp4', 3)}"))
    assert first.image[24, 32, 0] > 200 > 60 > first.image[24, 32, 2]


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_a_picture_lying_on_its_side_is_set_upright(tmp_path: Path, reader: str, rotation: int) -> None:
    frame = next(open_source(f"{reader}{film(tmp_path / 'film.mp4', 3, rotation=rotation)}"))
    assert frame.image.shape == ((48, 64, 3) if rotation == 180 else (64, 48, 3))


def test_thinning_goes_by_stream_time(tmp_path: Path, reader: str) -> None:
    with open_source(f"{reader}{film(tmp_path / 'film.mp4', 20)}", every_s=0.5) as source:
        assert [frame.index for frame in source] == [0, 5, 10, 15]


@pytest.mark.parametrize("data", [b"", b"no video at all" * 50], ids=["empty", "text"])
def test_what_is_no_video_is_told_in_one_line(
    tmp_path: Path, reader: str, data: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "not.mp4").write_bytes(data)
    with pytest.raises(VideoError, match=r"cannot read .*not\.mp4: not a video of a known kind") as caught:
        next(open_source(f"{reader}{tmp_path / 'not.mp4'}"))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_a_file_that_is_not_there_is_told_at_once(reader: str) -> None:
    with pytest.raises(VideoError, match=r"there is no file .*nowhere\.mp4"):
        open_source(f"{reader}nowhere.mp4")


def test_a_recorded_road_is_read_alike(reader: str) -> None:
    path = SHARED_DATA / "video" / "intel_car-detection_768x432_377f.mp4"
    if not path.is_file():
        pytest.skip("needs the traffic videos in ../shared/data/video, which are not part of the repository")
    with open_source(f"{reader}{path}", every_s=2.0) as source:
        frames = list(source)
    assert len(frames) == 16
    assert all(later.time_s > earlier.time_s for earlier, later in pairwise(frames))
    assert frames[-1].image.shape == (432, 768, 3)


# Cameras ----------------------------------------------------------------------------------------------------


class Camera:
    """A camera of `cv2` that gives so many pictures, one of them damaged, and then is unplugged."""

    def __init__(self, pictures: int, damaged: int = -1) -> None:
        self.left, self.number, self.damaged, self.released = pictures, -1, damaged, False

    def isOpened(self) -> bool:  # noqa: N802 - as OpenCV calls it
        return self.left > 0

    def grab(self) -> bool:
        self.left, self.number = self.left - 1, self.number + 1
        return self.left >= 0

    def retrieve(self) -> tuple[bool, NDArray[np.uint8] | None]:
        found = self.number != self.damaged
        return found, picture(self.number)[..., ::-1] if found else None

    def get(self, _: int) -> float:
        return 0.0

    def release(self) -> None:
        self.released = True


@pytest.fixture
def cameras(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Camera]]:
    """The cameras of this machine, by number; put some in."""
    cv2 = pytest.importorskip("cv2", reason="needs OpenCV: the extra gati[opencv]")
    plugged: dict[int, Camera] = {}
    monkeypatch.setattr(cv2, "VideoCapture", lambda number: plugged.get(number, Camera(0)))
    yield plugged


def test_a_camera_gives_pictures_until_it_is_unplugged(cameras: dict[int, Camera]) -> None:
    cameras[1] = Camera(4, damaged=2)
    video = opencv.open_camera(1, "opencv:1")
    with pytest.raises(VideoError, match="opencv:1 stopped"):
        list(video)
    video.close()
    assert cameras[1].released and video.corrupt == 1


def test_pictures_of_a_camera_come_one_by_one_with_rising_times(cameras: dict[int, Camera]) -> None:
    cameras[0] = Camera(4, damaged=2)
    pictures = iter(opencv.open_camera(0, "opencv:0"))
    seen = [next(pictures) for _ in range(3)]
    assert [number_of(each.image()) for each in seen] == [0, 1, 3]
    assert seen[0].time_s == 0.0
    assert seen[0].time_s < seen[1].time_s < seen[2].time_s


def test_a_camera_is_live(cameras: dict[int, Camera]) -> None:
    with pytest.raises(VideoError, match="is live and cannot wait"):
        open_source("opencv:0", policy="wait")
    with pytest.raises(VideoError, match="opencv:7 was not found: the system has no camera 7"):
        next(open_source("opencv:7"))


@pytest.mark.parametrize("number", ["99999999999999", "9" * 5_000])
def test_a_number_that_no_camera_has_is_one_line(number: str) -> None:
    with pytest.raises(VideoError, match="was not found: no camera has so high a number") as caught:
        next(open_source(f"opencv:{number}"))
    assert len(str(caught.value)) < 300


def test_elsewhere_than_on_linux_cameras_go_through_opencv(
    cameras: dict[int, Camera], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(VideoError, match="camera:3 was not found: the system has no camera 3"):
        next(open_source("camera:3"))


def test_a_missing_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    path = film(tmp_path / "film.mp4", 2)
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(VideoError, match=r'pip install "gati\[opencv\]"'):
        opencv.open_recording(path, "film")
