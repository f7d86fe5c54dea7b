"""Files and folders: every picture, in order of time, whatever the header says."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gati.errors import VideoError
from gati.video import SourceState, open_source
from gati.video.decode import in_order
from gati.video.folder import natural_key
from tests.conftest import SHARED_DATA
from tests.video.films import film, number_of, picture
from tests.waiting import LONG_S, until


@pytest.fixture(scope="module")
def videos() -> Path:
    folder = SHARED_DATA / "video"
    if not folder.is_dir():
        pytest.skip("needs the traffic videos in ../shared/data/video, which are not part of the repository")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "fps", "last_s"),
    [
        pytest.param(
            "highway_cdnet_320x240_1699f.avi", 1699, 60.0, 28.333, id="declares one more than it has"
        ),
        pytest.param("highway_m30_320x240_748f.avi", 748, 25.0, 29.96, id="declares two more than it has"),
        pytest.param("intel_car-detection_768x432_377f.mp4", 377, 12.5, 30.08, id="tells the truth"),
    ],
)
def test_what_decodes_is_counted_and_time_rises(
    videos: Path, name: str, count: int, fps: float, last_s: float
) -> None:
    with open_source(str(videos / name)) as source:
        stamps = [(frame.index, frame.time_s) for frame in source]
    assert [index for index, _ in stamps] == list(range(count))
    assert stamps[0][1] == 0.0
    assert stamps[-1][1] == pytest.approx(last_s, abs=0.01)
    assert all(later > earlier for (_, earlier), (_, later) in pairwise(stamps))
    assert source.statistics.source_fps == pytest.approx(fps, rel=0.01)
    assert (source.statistics.delivered, source.statistics.dropped) == (count, 0)
    assert source.state is SourceState.ENDED


def test_pictures_are_rgb_as_they_were_written(tmp_path: Path) -> None:
    path = film(tmp_path / "film.mp4", 20)
    with open_source(str(path)) as source:
        frames = list(source)
    assert [number_of(frame.image) for frame in frames] == list(range(20))
    assert frames[0].image.shape == (48, 64, 3) and frames[0].image.dtype == np.uint8
    assert (frames[0].width, frames[0].height) == (64, 48)
    assert [frame.time_s for frame in frames] == pytest.approx([number / 10 for number in range(20)])
    assert {frame.source for frame in frames} == {str(path)}


def test_colours_are_not_swapped(tmp_path: Path) -> None:
    red = np.zeros((48, 64, 3), dtype=np.uint8)
    red[..., 0] = 255
    Image.fromarray(red).save(tmp_path / "red.png")
    (frame,) = open_source(str(tmp_path))
    assert frame.image[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    ("thin", "expected"),
    [
        ({"every_s": 0.5}, [0, 5, 10, 15]),
        ({"fps": 5.0}, list(range(0, 20, 2))),
        ({"fps": 4.0}, [0, 3, 5, 8, 10, 13, 15, 18]),
        ({"fps": 100.0}, list(range(20))),
    ],
)
def test_thinning_goes_by_stream_time_and_keeps_numbers(
    tmp_path: Path, thin: dict[str, float], expected: list[int]
) -> None:
    with open_source(str(film(tmp_path / "film.mp4", 20)), **thin) as source:  # type: ignore[arg-type]
        frames = list(source)
    assert [frame.index for frame in frames] == expected
    assert [number_of(frame.image) for frame in frames] == expected
    assert source.statistics.dropped == 0


def test_a_picture_lying_on_its_side_is_set_upright(tmp_path: Path) -> None:
    (frame, *_) = open_source(str(film(tmp_path / "film.mp4", 3, rotation=90)))
    assert (frame.width, frame.height) == (48, 64)


def in_colour_space(path: Path, colour_space: int) -> Path:
    """A film of three pictures that says to be in a colour space, by FFmpeg's number."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg2video", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.colorspace = colour_space
        for number in range(3):
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24").reformat(format="yuv420p")
            frame.colorspace = colour_space
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def test_a_reserved_colour_space_is_read_as_if_none_was_named(tmp_path: Path) -> None:
    path = in_colour_space(tmp_path / "film.mpg", 3)
    assert [number_of(frame.image) for frame in open_source(str(path))] == [0, 1, 2]


def test_a_colour_space_that_cannot_be_converted_is_one_line(tmp_path: Path) -> None:
    path = in_colour_space(tmp_path / "film.mpg", 8)  # YCgCo
    with pytest.raises(VideoError, match="cannot convert the pictures of .*film.mpg to RGB .*yuv420p in"):
        next(open_source(str(path)))


def damaged(path: Path, start: float, stop: float) -> Path:
    """Overwrite a share of the file's middle."""
    data = bytearray(path.read_bytes())
    begin, end = int(start * len(data)), int(stop * len(data))
    data[begin:end] = np.random.default_rng(0).integers(0, 256, end - begin, dtype=np.uint8).tobytes()
    path.write_bytes(bytes(data))
    return path


def test_damaged_pictures_are_left_out_and_counted(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    path = tmp_path / "film.avi"
    _noise(path, random, 30)
    whole = len(list(open_source(str(path))))
    with open_source(str(damaged(path, 0.4, 0.5))) as source:
        count = len(list(source))
    assert whole == 30
    assert 10 <= count < 30
    assert source.statistics.corrupt >= 1
    assert source.state is SourceState.ENDED


def _noise(path: Path, random: np.random.Generator, count: int) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.gop_size = 1
        for _ in range(count):
            image = random.integers(0, 256, (48, 64, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def test_a_file_cut_short_delivers_what_is_there(tmp_path: Path) -> None:
    path = film(tmp_path / "film.avi", 30, gop=1)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])
    with open_source(str(path)) as source:
        count = len(list(source))
    assert 1 <= count < 30
    assert source.state is SourceState.ENDED


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"", "not a video of a known kind, or damaged at its beginning", id="empty"),
        pytest.param(b"no video at all " * 500, "not a video of a known kind", id="text"),
    ],
)
def test_what_is_no_video_is_told_in_one_line(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "film.mp4"
    path.write_bytes(data)
    source = open_source(str(path))
    with pytest.raises(VideoError) as caught, source:
        next(source)
    assert str(caught.value).startswith(f"cannot read {path}: ")
    assert reason in str(caught.value) and "\n" not in str(caught.value)
    assert source.state is SourceState.ERROR
    assert source.reason == str(caught.value)


def test_sound_without_pictures_is_refused(tmp_path: Path) -> None:
    import wave

    path = tmp_path / "sound.wav"
    with wave.open(str(path), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(16_000))
    with pytest.raises(VideoError, match="there are no pictures in it"):
        next(open_source(str(path)))


@pytest.mark.parametrize("text", ["", "nothing/here.mp4"])
def test_a_file_that_is_not_there_is_told_at_once(text: str) -> None:
    with pytest.raises(
        VideoError, match="there is no file or folder .* to read video from; give a video file"
    ):
        open_source(text)


@pytest.mark.parametrize("text", ["me:secret@10.0.0.7/live", "rtsp:me:s/ecret@10.0.0.7/live"])
def test_an_address_without_its_scheme_is_told_without_its_password(text: str) -> None:
    with pytest.raises(VideoError, match=r"no file or folder '\*\*\*@10\.0\.0\.7/live' to read") as caught:
        open_source(text)
    assert "ecret" not in str(caught.value)


@pytest.mark.parametrize("text", ["concat://a|b", "ftp://me:secret@host/film.mp4", "file:///etc/passwd"])
def test_other_addresses_are_refused_without_their_secrets(text: str) -> None:
    with pytest.raises(VideoError, match="which is not supported; give a video file") as caught:
        open_source(text)
    assert "secret" not in str(caught.value)


def test_a_name_that_means_something_to_ffmpeg_is_still_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    film(tmp_path / "film.mp4", 3).rename(tmp_path / "concat:a|b")
    monkeypatch.chdir(tmp_path)
    assert len(list(open_source("concat:a|b"))) == 3


def test_an_unknown_policy_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match="'newest' is unknown; choose auto, wait or drop-oldest"):
        open_source(str(tmp_path), policy="newest")


def test_a_missing_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = film(tmp_path / "film.mp4", 3)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(VideoError, match=r'run: pip install "gati\[stream\]"'):
        next(open_source(str(path)))


def test_importing_the_room_needs_neither_torch_nor_av() -> None:
    program = "import sys, gati.video; sys.exit(bool({'torch', 'av', 'httpx'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_images_of_a_folder_come_in_the_order_a_person_counts(tmp_path: Path) -> None:
    for number in (1, 2, 10, 9, 20):
        Image.fromarray(picture(number)).save(tmp_path / f"image{number}.png")
    (tmp_path / "notes.txt").write_text("no image")
    with open_source(str(tmp_path)) as source:
        frames = list(source)
    assert [number_of(frame.image) for frame in frames] == [1, 2, 9, 10, 20]
    assert [frame.time_s for frame in frames] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_of_images_that_can_be_read(tmp_path: Path) -> None:
    """Pillow warned of each picture of a folder whose palette has transparent colours."""
    pixels = np.random.default_rng(0).integers(256, size=(16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).quantize(16).save(tmp_path / "1.png", transparency=bytes(16))
    with open_source(str(tmp_path)) as source:
        assert [frame.image.shape for frame in source] == [(16, 16, 3)]


def test_a_damaged_image_is_left_out_and_keeps_its_second(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        Image.fromarray(picture(number)).save(tmp_path / f"{number}.png")
    (tmp_path / "2.png").write_bytes((tmp_path / "2.png").read_bytes()[:60])
    with open_source(str(tmp_path)) as source:
        assert [(number_of(frame.image), frame.time_s) for frame in source] == [(1, 0.0), (3, 2.0)]
    assert source.statistics.corrupt == 1


def test_a_folder_without_a_readable_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match="has no images"):
        next(open_source(str(tmp_path)))
    (tmp_path / "1.png").write_bytes(b"nothing")
    with pytest.raises(VideoError, match="has 1 images, and none of them can be read"):
        next(open_source(str(tmp_path)))


def test_a_folder_that_cannot_be_listed_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    source = open_source(str(tmp_path / "images"))
    (tmp_path / "images").rmdir()
    with pytest.raises(VideoError, match="cannot read folder .*images: No such file or directory"):
        next(source)
    assert source.state is SourceState.ERROR


@given(st.lists(st.integers(0, 10**6), unique=True))
def test_numbers_in_names_are_sorted_by_value(numbers: list[int]) -> None:
    names = [f"a{number}b" for number in numbers]
    assert sorted(names, key=natural_key) == [f"a{number}b" for number in sorted(numbers)]


@given(st.lists(st.text(alphabet="a1 0Z_9²")))
def test_any_names_can_be_sorted(names: list[str]) -> None:
    assert sorted(sorted(names, key=natural_key)) == sorted(names)


def test_a_pause_holds_a_recording_and_loses_nothing(tmp_path: Path) -> None:
    with open_source(str(film(tmp_path / "film.mp4", 20))) as source:
        numbers = [next(source).index for _ in range(3)]
        source.pause()
        assert source.state is SourceState.PAUSED
        reader = threading.Thread(target=lambda: numbers.extend(frame.index for frame in source))
        reader.start()
        reader.join(0.1)  # what is not held is read long before
        assert numbers == [0, 1, 2]
        source.resume()
        reader.join(LONG_S)
    assert numbers == list(range(20))


def test_closing_ends_a_reader_that_waits(tmp_path: Path) -> None:
    source = open_source(str(film(tmp_path / "film.mp4", 20)))
    assert next(source).index == 0
    source.pause()
    rest: list[int] = []
    reader = threading.Thread(target=lambda: rest.extend(frame.index for frame in source))
    reader.start()
    source.close()
    reader.join(LONG_S)
    assert not reader.is_alive() and rest == []
    assert source.state is SourceState.ENDED


def test_a_file_played_as_if_live_keeps_its_own_time_and_drops(tmp_path: Path) -> None:
    slept: list[float] = []
    path = str(film(tmp_path / "film.mp4", 20))
    source = open_source(path, policy="drop-oldest", clock=lambda: 100.0, sleep=slept.append)
    with source:
        until(lambda: source.state is SourceState.ENDED)
        frames = list(source)
    assert [frame.index for frame in frames] == [19], "the newest is kept"
    assert frames[0].time_s == pytest.approx(1.9)
    assert source.statistics.dropped == 19
    assert slept == pytest.approx([number / 10 for number in range(1, 20)])


TIMES = st.lists(st.floats(0.001, 5.0), min_size=1, max_size=60)


@given(gaps=TIMES)
def test_stamps_in_order_are_left_alone(gaps: list[float]) -> None:
    stamps = list(accumulate(gaps))
    assert list(in_order([(stamp, stamp) for stamp in stamps], 0.04)) == [(stamp, stamp) for stamp in stamps]


@given(gaps=TIMES, data=st.data())
def test_stamps_swapped_among_neighbours_are_sorted(gaps: list[float], data: st.DataObject) -> None:
    stamps = list(accumulate(gaps))
    mixed = list(stamps)
    for start in range(0, len(stamps), 3):
        mixed[start : start + 3] = data.draw(st.permutations(mixed[start : start + 3]))
    pairs = list(in_order(list(zip(mixed, range(len(mixed)), strict=True)), 0.04))
    assert [stamp for stamp, _ in pairs] == stamps
    assert [number for _, number in pairs] == list(range(len(mixed))), "pictures keep their order"


@given(st.lists(st.none() | st.floats(-1e4, 1e4), max_size=60), st.integers(1, 6))
def test_time_rises_whatever_the_stamps(stamps: list[float | None], window: int) -> None:
    pairs = list(in_order(list(zip(stamps, range(len(stamps)), strict=True)), 0.04, window))
    assert [number for _, number in pairs] == list(range(len(stamps)))
    assert all(later >= earlier for (earlier, _), (later, _) in pairwise(pairs))


def test_missing_stamps_follow_the_rate() -> None:
    assert [stamp for stamp, _ in in_order([(None, 0)] * 4, 0.25)] == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("window", [1, 4])
def test_a_stamp_that_is_there_twice_after_a_pause_leaves_the_rate_alone(window: int) -> None:
    """The pause was taken for the time between pictures from then on: days went by in seconds."""
    stamps = [0.0, 0.04, 5000.0, 5000.0, *(5000.0 + number / 25 for number in range(1, 100))]
    times = [time_s for time_s, _ in in_order([(stamp, 0) for stamp in stamps], 0.04, window)]
    assert times[-1] == pytest.approx(stamps[-1], abs=0.1)
    assert max(later - earlier for earlier, later in pairwise(times[3:])) < 0.1


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("period_s", [0.04, 10.0])
def test_a_stamp_that_is_there_twice_costs_no_more_than_the_last_gap(window: int, period_s: float) -> None:
    """As where the rate varies, and what the header says of it is the mean."""
    stamps = [number / 25 for number in range(50)]
    stamps[20] = stamps[19]
    times = [time_s for time_s, _ in in_order([(stamp, 0) for stamp in stamps], period_s, window)]
    assert np.abs(np.subtract(times, stamps)).max() <= 0.0401


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("stray_s", [0.0, 0.5, 97.0])
def test_one_stamp_that_is_too_low_shifts_no_others(window: int, stray_s: float) -> None:
    stamps = [100.0 + number / 25 for number in range(100)]
    stamps[50] = stray_s
    times = [time_s for time_s, _ in in_order([(stamp, 0) for stamp in stamps], 0.04, window)]
    assert times[-1] == pytest.approx(stamps[-1], abs=0.0401)
    assert max(later - earlier for earlier, later in pairwise(times)) < 0.0801


@pytest.mark.parametrize("window", [1, 4])
def test_one_short_gap_is_no_rate(window: int) -> None:
    part = [number / 25 for number in range(250)]
    times = [time_s for time_s, _ in in_order([(each, 0) for each in [*part, 9.961, *part]], 0.04, window)]
    assert times[-1] == pytest.approx(20.0, abs=0.2)


@pytest.mark.parametrize(("window", "pause_s"), [(1, 0.0), (4, 0.0), (1, 10.0)])
def test_where_time_begins_anew_it_goes_on_at_the_rate(window: int, pause_s: float) -> None:
    """As in recordings that were joined: the last pause became the time between all later pictures."""
    part = [*(number / 25 for number in range(250)), 10.0 + pause_s]
    times = [time_s for time_s, _ in in_order([(stamp, 0) for stamp in part * 2], 0.04, window)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert all(gap == pytest.approx(0.04) for gap in gaps[260:])
    assert times[-1] == pytest.approx(20.0 + pause_s, abs=0.1)


def test_a_recording_that_was_cut_short_is_told_from_sound(tmp_path: Path) -> None:
    """Of an MP4 whose recorder died, the index is missing: it was said to have no pictures."""
    path = film(tmp_path / "film.mp4", 12, codec="libx264")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(VideoError, match="or it is cut short|damaged at its beginning"):
        next(open_source(str(path)))
