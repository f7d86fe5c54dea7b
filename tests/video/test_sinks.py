"""Results as JSON Lines, and drawn into a video."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from gati.errors import StorageError, VideoError
from gati.video import AnnotatedVideoSink, JsonLinesSink, Region, Sink, open_source
from gati.video.annotated import annotate
from tests.video.answers import ANSWER, answer, frame
from tests.video.films import number_of, picture
from tests.waiting import LONG_S


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_has_every_field_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "new" / "answers.jsonl"
    with JsonLinesSink(path) as sink:
        sink.write(answer(15, region=Region(1, 2, 3, 4), audited=True, agreed=False), frame(15))
        assert lines(path) == [
            {
                "time_s": 1.5,
                "frame_index": 15,
                "source": "rtsp://***@10.0.0.7/live",
                "region": [1, 2, 3, 4],
                "class_index": 3,
                "class_name": "cat",
                "probability": 0.875,
                "exit": "layer2",
                "latency_ms": 2.25,
                "base_latency_ms": 4.5,
                "version": "v1",
                "audited": True,
                "agreed": False,
            }
        ], "and can be read before the sink is closed"


def test_lines_are_appended_and_half_a_line_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    for number in range(2):
        with JsonLinesSink(path) as sink:
            sink.write(answer(number), frame(number))
    assert [line["frame_index"] for line in lines(path)] == [0, 1]
    path.write_text('{"frame_index": 0}\n{"frame_ind')
    with JsonLinesSink(path) as sink:
        sink.write(answer(7, class_name="Käfer\nzwei"), frame(7))
    first, torn, last = path.read_text(encoding="utf-8").splitlines()
    assert (json.loads(first)["frame_index"], torn) == (0, '{"frame_ind')
    assert json.loads(last)["class_name"] == "Käfer\nzwei"


def test_a_pipe_takes_lines(tmp_path: Path) -> None:
    """As a shell's `--json >(command)`: it was refused, as it cannot be read back."""
    pipe, got = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.extend(pipe.read_text().splitlines()), daemon=True)
    reader.start()
    with JsonLinesSink(pipe) as sink:
        for number in range(2):
            sink.write(answer(number), frame(number))
    reader.join(LONG_S)
    assert [json.loads(line)["frame_index"] for line in got] == [0, 1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_in_json_is_null(value: float) -> None:
    assert json.loads(answer(0, latency_ms=value).as_json())["latency_ms"] is None


def test_a_dash_is_standard_output_which_stays_open(capsys: pytest.CaptureFixture[str]) -> None:
    with JsonLinesSink("-") as sink:
        sink.write(answer(4), frame(4))
    print("more")
    line, more = capsys.readouterr().out.splitlines()
    assert (json.loads(line)["frame_index"], more) == (4, "more")


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*answers.jsonl: (Not a directory|File exists)"):
        JsonLinesSink(tmp_path / "file" / "answers.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told() -> None:
    sink = JsonLinesSink("/dev/full")
    with pytest.raises(StorageError, match="cannot write /dev/full: No space left on device"):
        sink.write(answer(0), frame(0))


def test_a_closed_sink_takes_nothing(tmp_path: Path) -> None:
    sinks: list[Sink] = [JsonLinesSink(tmp_path / "a.jsonl"), AnnotatedVideoSink(tmp_path / "a.mp4")]
    for sink in sinks:
        sink.close()
        sink.close()
        with pytest.raises((StorageError, VideoError), match="was closed"):
            sink.write(answer(0), frame(0))


@pytest.mark.parametrize("name", ["out.mp4", "out.mkv", "out.mov"])
def test_an_annotated_video_has_the_pictures_at_their_times(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new" / name
    with AnnotatedVideoSink(path) as sink:
        for number in (0, 2, 3, 11):
            sink.write(answer(number), frame(number, 128, 96))
        assert not path.exists(), "it appears when it is whole"
    assert [file.name for file in path.parent.iterdir()] == [name]
    with open_source(str(path)) as source:
        frames = list(source)
    assert [round(one.time_s, 3) for one in frames] == [0.0, 0.2, 0.3, 1.1]
    assert [number_of(one.image[48:]) for one in frames] == [0, 2, 3, 11]
    assert all((one.width, one.height) == (128, 96) for one in frames)


def test_regions_of_one_picture_share_it(tmp_path: Path) -> None:
    regions = (Region(0, 0, 60, 90), Region(64, 0, 60, 90))
    with AnnotatedVideoSink(tmp_path / "out.mp4") as sink:
        for number in range(3):
            for region in regions:
                sink.write(answer(number, region=region), frame(number, 128, 96))
    assert len(list(open_source(str(tmp_path / "out.mp4")))) == 3


def test_without_libx264_another_encoder_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gati.video.annotated._CODECS", ("no-such-codec", "mpeg4"))
    with AnnotatedVideoSink(tmp_path / "out.mp4") as sink:
        for number in range(5):
            sink.write(answer(number), frame(number, 128, 96))
    assert [number_of(one.image[48:]) for one in open_source(str(tmp_path / "out.mp4"))] == [0, 1, 2, 3, 4]
    monkeypatch.setattr("gati.video.annotated._CODECS", ("no-such-codec",))
    other = AnnotatedVideoSink(tmp_path / "other.mp4")
    other.write(answer(0), frame(0))
    with pytest.raises(VideoError, match="FFmpeg has none of no-such-codec here"):
        other.close()


def test_odd_sizes_and_changes_of_size_are_brought_to_that_of_the_first(tmp_path: Path) -> None:
    with AnnotatedVideoSink(tmp_path / "out.mp4") as sink:
        sink.write(answer(0), frame(0, 101, 75))
        sink.write(answer(1), frame(1, 200, 150))
    assert [(one.width, one.height) for one in open_source(str(tmp_path / "out.mp4"))] == [(102, 76)] * 2


def test_nothing_written_leaves_no_file(tmp_path: Path) -> None:
    AnnotatedVideoSink(tmp_path / "out.mp4").close()
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_no_video_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match=r"the name must end in \.mp4, \.m4v, \.mov, \.mkv"):
        AnnotatedVideoSink(tmp_path / "out.txt")


def test_a_video_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sink = AnnotatedVideoSink(tmp_path / "file" / "out.mp4")
    sink.write(answer(0), frame(0))
    with pytest.raises(StorageError, match=r"cannot write .*out.mp4: "):
        sink.close()


def test_the_box_is_drawn_around_the_region_and_the_picture_is_left_alone() -> None:
    image = picture(5, 200, 160)
    before = image.copy()
    drawn = np.asarray(annotate(image, [answer(0, region=Region(50, 60, 100, 80))]))
    assert np.array_equal(image, before)
    changed = np.argwhere((drawn != image).any(axis=2))
    assert changed.min(axis=0).tolist() == [60, 50]
    assert changed.max(axis=0).tolist() == [139, 149]
    assert np.array_equal(drawn[120:130, 60:140], image[120:130, 60:140]), "what is inside stays visible"


def test_early_answers_and_those_of_the_base_model_differ_in_colour() -> None:
    early, base = (
        np.asarray(annotate(picture(0, 200, 160), [answer(0, exit=exit_, region=Region(0, 60, 200, 100))]))
        for exit_ in ("layer2", "base")
    )
    assert early[159, 100].tolist() != base[159, 100].tolist()


def test_labels_of_the_whole_picture_stand_below_each_other() -> None:
    one = np.asarray(annotate(picture(5, 200, 160), [ANSWER]))
    two = np.asarray(annotate(picture(5, 200, 160), [ANSWER, ANSWER]))
    reach = [int(np.argwhere((image != 40).any(axis=2)).max(axis=0)[0]) for image in (one, two)]
    assert reach[1] >= 2 * reach[0]
