"""Live streams: the newest picture, and recovery from every kind of connection failure."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import av
import pytest

from gati.errors import VideoError
from gati.video import FramePolicy, Reconnect, Source, SourceState, open_source
from gati.video.decode import Picture
from gati.video.live import Live
from gati.video.policies import Thinning
from tests.video.films import Camera, Device, encode, film, number_of, picture, plays, refuses, serving
from tests.waiting import LONG_S, until

pytestmark = pytest.mark.slow

QUICK = Reconnect(first_s=0.01, cap_s=0.05, stall_s=0.4, open_s=LONG_S)
PATIENT = Reconnect(first_s=0.01, cap_s=0.05, stall_s=LONG_S, open_s=LONG_S)


@pytest.fixture(autouse=True)
def short_farewells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of tests that were made to hang are not waited for."""
    monkeypatch.setattr("gati.video.live._FAREWELL_S", 0.2)


class Scripted:
    """Pictures that a test hands over one by one."""

    def __init__(self) -> None:
        self.corrupt = 0
        self.closed = threading.Event()
        self._given = threading.Semaphore(0)
        self._pictures: list[int | None] = []

    def give(self, *numbers: int | None) -> None:
        """Hand over pictures; None ends the stream."""
        for number in numbers:
            self._pictures.append(number)
            self._given.release()

    def __iter__(self) -> Iterator[Picture]:
        while True:
            self._given.acquire()
            number = self._pictures.pop(0)
            if number is None:
                return
            yield Picture(0.0, partial(picture, number))

    def close(self) -> None:
        self.closed.set()


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.read = 0

    def __call__(self) -> float:
        self.read += 1
        return self.now_s


def source_of(feed: Live, clock: Clock) -> Source:
    return Source("scripted", FramePolicy.DROP_OLDEST, feed, clock)


def live(
    *streams: Scripted | VideoError, rule: Reconnect = QUICK, every_s: float | None = None
) -> tuple[Source, Clock, list[float]]:
    """A live source that connects to the streams in turn; its clock, and what it slept."""
    clock, slept, left = Clock(), [], list(streams)

    def connect() -> Scripted:
        stream = left.pop(0) if left else VideoError("nothing is left")
        if isinstance(stream, VideoError):
            raise stream
        return stream

    feed = Live(connect, Thinning(every_s), rule, clock=clock, sleep=slept.append, draw=random.Random(0))
    return source_of(feed, clock), clock, slept


def decoded(source: Source, count: int) -> None:
    """Wait until the source has read so many pictures."""
    until(lambda: source._feed._decoded >= count)


def test_the_newest_picture_is_kept_and_the_others_are_counted() -> None:
    stream = Scripted()
    source, clock, _ = live(stream)
    with source:
        stream.give(0, 1, 2, 3, 4)
        decoded(source, 5)
        clock.now_s += 0.25
        frame = next(source)
        assert (frame.index, number_of(frame.image)) == (4, 4)
        assert source.statistics.dropped == 4
        assert source.statistics.frame_age_s == 0.25
        stream.give(5)
        assert next(source).index == 5
        assert source.statistics.dropped == 4, "a caller in time loses nothing"
        assert source.statistics.frame_age_s == 0.0
        assert source.state is SourceState.RUNNING
    assert source.state is SourceState.ENDED


def test_time_and_rate_are_those_of_the_clock_not_of_the_stream() -> None:
    stream = Scripted()
    source, clock, _ = live(stream)
    times_s = []
    with source:
        for number in range(5):
            stream.give(number)
            times_s.append(next(source).time_s)
            clock.now_s += 0.125
    assert times_s == [0.0, 0.125, 0.25, 0.375, 0.5]
    assert source.statistics.source_fps == pytest.approx(8.0)
    assert source.statistics.processed_fps == pytest.approx(8.0)


def test_pictures_thinned_out_are_not_dropped() -> None:
    stream = Scripted()
    source, clock, _ = live(stream, every_s=1.0)
    with source:
        for number in range(9):
            stream.give(number)
            decoded(source, number + 1)
            clock.now_s += 0.25
        assert next(source).index == 8
    assert source.statistics.dropped == 2, "of the pictures 0, 4 and 8"


def test_a_stream_that_ends_is_connected_anew_and_counts_on() -> None:
    one, other = Scripted(), Scripted()
    source, _, slept = live(one, other)
    with source:
        for number in (0, 1):
            one.give(number)
            assert next(source).index == number
        one.give(None)
        other.give(2)
        assert next(source).index == 2
        assert source.statistics.reconnects == 1
        assert source.reason == "the stream ended"
    assert len(slept) == 1 and 0.005 <= slept[0] <= 0.01
    assert one.closed.is_set()


def test_an_address_of_one_picture_is_asked_again_and_not_lost() -> None:
    """Of a camera's `snapshot.jpg`, each picture was a loss, and displaced all other events."""
    streams = [Scripted() for _ in range(3)]
    source, _, _ = live(*streams)
    heard: list[tuple[str, str]] = []
    source.listen(lambda state, reason: heard.append((state.value, reason)))
    with source:
        for number, stream in enumerate(streams):
            stream.give(number)
            assert next(source).index == number
            stream.give(None)
        until(lambda: len(heard) == 2)
    assert heard == [("running", ""), ("reconnecting", "nothing is left"), ("ended", "")]


def test_a_listener_hears_of_a_loss_while_there_are_no_pictures() -> None:
    one, other = Scripted(), Scripted()
    gone = VideoError("gone")
    source, _, _ = live(one, gone, gone, other)
    heard: list[tuple[str, str]] = []
    source.listen(lambda state, reason: heard.append((state.value, reason)))
    with source:
        one.give(0, 1, None)
        until(lambda: len(heard) == 3)
        assert heard == [("running", ""), ("reconnecting", "the stream ended"), ("reconnecting", "gone")]
        other.give(2)
        until(lambda: len(heard) == 4)
        assert heard[3:] == [("running", "")]
    assert heard[4:] == [("ended", "")]


def test_the_watchdog_replaces_a_stream_that_says_nothing() -> None:
    stuck, other = Scripted(), Scripted()
    source, clock, _ = live(stuck, other, rule=Reconnect(stall_s=10.0))
    with source:
        stuck.give(0)
        assert next(source).index == 0
        clock.now_s += 9.9
        looked = clock.read
        until(lambda: clock.read >= looked + 3)  # the watchdog has seen that time
        assert source.state is SourceState.RUNNING
        clock.now_s += 0.2
        other.give(1)
        frame = next(source)
        assert (frame.index, number_of(frame.image)) == (1, 1)
        assert source.reason == "no picture came for 10 s"
        stuck.give(7)
        assert stuck.closed.wait(LONG_S), "when it speaks again it is let go"
        other.give(2)
        assert number_of(next(source).image) == 2, "and what it says is not heard"
        assert source.statistics.reconnects == 1


def test_a_connection_that_does_not_come_about_is_given_up() -> None:
    clock, never = Clock(), threading.Event()

    def connect() -> Scripted:
        never.wait(LONG_S)
        raise VideoError("too late to be heard")

    feed = Live(connect, Thinning(), Reconnect(open_s=3.0), clock=clock)
    source = source_of(feed, clock)
    with source:
        until(lambda: feed._line is not None)
        assert source.state is SourceState.RECONNECTING
        clock.now_s += 3.1
        with pytest.raises(VideoError, match="no connection for 3 s"):
            next(source)
        never.set()
    assert source.state is SourceState.ERROR


def test_waits_grow_while_nothing_comes_and_begin_anew_after_a_picture() -> None:
    one, other, gone = Scripted(), Scripted(), VideoError("gone")
    rule = Reconnect(first_s=1.0, factor=2.0, cap_s=4.0, jitter=0.0, attempts=5)
    source, _, slept = live(one, gone, gone, gone, gone, other, rule=rule)
    with source:
        one.give(0, None)
        other.give(1, None)
        with pytest.raises(VideoError, match="nothing is left; gave up after 5 attempts"):
            list(source)
        assert source.state is SourceState.ERROR
    assert slept == [1.0, 2.0, 4.0, 4.0, 4.0] + [1.0, 2.0, 4.0, 4.0, 4.0]
    assert source.statistics.reconnects == 10


def test_the_first_connection_must_succeed() -> None:
    source, _, slept = live(VideoError("cannot read scripted: refused"), Scripted())
    with pytest.raises(VideoError, match="cannot read scripted: refused"), source:
        next(source)
    assert (source.state, slept) == (SourceState.ERROR, [])


def test_unless_the_camera_may_come_later() -> None:
    stream = Scripted()
    stream.give(3)
    source, _, _ = live(VideoError("not yet"), stream, rule=Reconnect(from_start=True))
    with source:
        assert number_of(next(source).image) == 3
        assert source.statistics.reconnects == 1


def test_a_pause_lets_the_stream_go_by() -> None:
    stream = Scripted()
    source, _, _ = live(stream)
    with source:
        stream.give(0)
        assert next(source).index == 0
        stream.give(1)
        decoded(source, 2)
        source.pause()
        assert source.state is SourceState.PAUSED
        stream.give(2, 3)
        decoded(source, 4)
        source.resume()
        stream.give(4)
        assert next(source).index == 4
        assert source.statistics.dropped == 0
        assert source.statistics.delivered == 2


def test_closing_wakes_a_caller_that_waits() -> None:
    stream = Scripted()
    source, _, _ = live(stream)
    frames: list[object] = []
    with source:
        reader = threading.Thread(target=lambda: frames.extend(source))
        reader.start()
        source.close()
        reader.join(LONG_S)
        assert not reader.is_alive()
    assert frames == []
    assert source.state is SourceState.ENDED


def test_a_picture_delivered_while_reading_is_decoded_by_the_caller() -> None:
    with Camera(plays()) as device, open_source(device.url, reconnect=PATIENT) as source:
        frame = next(source)
        assert frame.image.shape == (48, 64, 3)
        assert source.policy is FramePolicy.DROP_OLDEST


def test_a_slow_caller_gets_recent_pictures_of_a_real_stream() -> None:
    """Slow in pictures, not in seconds: each time ten have come before it takes the next."""
    with Camera(plays()) as device, open_source(device.url, reconnect=PATIENT) as source:
        numbers = [next(source).index]
        for _ in range(4):
            decoded(source, numbers[-1] + 11)
            come = source._feed._decoded
            numbers.append(next(source).index)
            assert numbers[-1] >= come - 1, "the newest there was, or one that came since"
        statistics = source.statistics
    assert numbers == sorted(set(numbers))
    assert statistics.dropped >= 4 * 9
    assert statistics.frame_age_s is not None and statistics.frame_age_s >= 0.0


def test_a_real_stream_that_hangs_ends_and_refuses_comes_back() -> None:
    """Each misfortune goes on until its reason was seen: a slow machine sees it more than once."""

    def told(*texts: str) -> bool:
        return any(text in source.reason for text in texts)

    hanging = Camera(plays(15, then_hang=True))
    rule = replace(QUICK, from_start=True)  # the first picture, too, may come later than stall_s
    with hanging as device, open_source(device.url, reconnect=rule) as source:
        until(lambda: told("no picture came for 0.4 s", "no answer in time"))
        device.scripts = [plays(15)]
        until(lambda: told("stopped: Input/output error", "the stream ended"))
        device.scripts = [refuses]
        until(lambda: told("cannot read"))
        device.scripts = [plays()]
        seen = next(source).index
        decoded(source, seen + 60)
        assert next(source).index >= seen + 59, "pictures are counted over all connections"
    assert source.statistics.corrupt == 0
    assert 3 <= len(device.requests) - 1 <= source.statistics.reconnects, "one connection each time"


def test_nobody_there_is_one_line_without_the_password() -> None:
    with socket.socket() as nobody:  # has the port, so that no other program can, and does not listen
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        source = open_source(f"http://me:secret@127.0.0.1:{port}/live?token=hush", reconnect=QUICK)
        with pytest.raises(VideoError) as caught, source:
            next(source)
    assert str(caught.value) == f"cannot read http://***@127.0.0.1:{port}/live?token=***: Connection refused"
    assert caught.value.__context__ is None and caught.value.__cause__ is None
    for shown in (repr(source), source.name, source.reason):
        assert "secret" not in shown and "hush" not in shown


def test_credentials_reach_the_camera() -> None:
    with Camera(plays()) as device:
        url = device.url.replace("http://", "http://me:secret@") + "?token=hush"
        with open_source(url, reconnect=PATIENT) as source:
            assert "secret" not in next(source).source
        assert b"?token=hush" in device.requests[0]


class Unseekable:
    """A file that is only written to: what is written first is never corrected."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> int:
        self.written += data
        return len(data)


class Broadcast(Device):
    """A live stream without its size, with a codec of that format; the first connections end after it."""

    def __init__(self, form: str, codec: str, pictures: int, hang_ups: int) -> None:
        file = Unseekable()
        options = {"movflags": "frag_keyframe+empty_moov"} if form == "mp4" else {}
        with av.open(file, "w", format=form, options=options) as container:
            encode(container, pictures, 25, codec, gop=1)
        self.film, self.hang_ups, self.connections = file.written, hang_ups, 0
        super().__init__()

    def talk(self, connection: socket.socket) -> None:
        self.connections += 1
        connection.recv(65_536)
        connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Type: video\r\n\r\n" + self.film)
        if self.connections > self.hang_ups:
            self._closed.wait()


@pytest.mark.parametrize(("form", "codec"), [("flv", "flv"), ("mp4", "mpeg4")])
def test_a_live_stream_that_is_called_like_a_recording_is_live(
    form: str, codec: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It was read picture by picture, ever further behind, and ended with its first connection."""
    with Broadcast(form, codec, 200, hang_ups=2) as device:
        source = open_source(f"http://{device.place}.{form}", reconnect=PATIENT)
        heard: list[str] = []
        source.listen(lambda state, reason: heard.append(state.value))
        with source:
            decoded(source, 590)
            newest = next(source).index
            assert newest >= 589
            assert source.policy is FramePolicy.DROP_OLDEST
        statistics = source.statistics
    told = f"{source.name} has neither a known size nor a known duration: it is read as live"
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [told]
    assert (statistics.delivered, statistics.reconnects) == (1, 2)
    assert statistics.dropped >= newest
    assert device.connections == 3
    assert heard == ["running", "reconnecting"] * 2 + ["running", "ended"]


def test_a_recording_on_the_network_is_read_once(tmp_path: Path) -> None:
    film(tmp_path / "film.mp4", 20)
    with serving(tmp_path) as place, open_source(f"http://{place}/film.mp4?token=hush") as source:
        frames = list(source)
    assert [number_of(frame.image) for frame in frames] == list(range(20))
    assert [frame.time_s for frame in frames] == pytest.approx([number / 10 for number in range(20)])
    assert (source.policy, source.state) == (FramePolicy.WAIT, SourceState.ENDED)


def test_a_camera_that_is_not_there_is_told() -> None:
    with pytest.raises(VideoError, match=r"camera:99 was not found: no device /dev/video99 \(found: "):
        next(open_source("camera:99"))
    with pytest.raises(VideoError, match=r"is not a camera; write for example camera:0"):
        next(open_source("camera:../etc"))


@pytest.mark.parametrize("text", ["camera:0", "rtsp://me:secret@10.0.0.7/live"])
def test_what_is_live_cannot_wait(text: str) -> None:
    with pytest.raises(
        VideoError, match="is live and cannot wait: record it first, or use gati stream"
    ) as caught:
        open_source(text, policy="wait")
    assert "secret" not in str(caught.value)
