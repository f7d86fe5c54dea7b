"""Sources of pictures: video files, folders of images, cameras, and streams from the network."""

from __future__ import annotations

import logging
import random
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from gati.errors import VideoError
from gati.video.decode import DecodedVideo, import_av, open_video
from gati.video.feeds import Clock, Connect, Feed, OnState, Recording
from gati.video.folder import Folder
from gati.video.frames import Frame, redact
from gati.video.live import Live
from gati.video.opencv import open_camera, open_recording
from gati.video.policies import FramePolicy, Reconnect, Thinning, interval_s
from gati.video.reach import Reach, reach_of_address, reach_of_file
from gati.video.status import Rate, SourceState, SourceStatistics

_log = logging.getLogger(__name__)

_SCHEMES = ("rtsp", "rtsps", "http", "https")
_VIDEO_FILE = re.compile(r"(?i)\.(mp4|m4v|mov|mkv|webm|avi|mpg|mpeg|wmv|flv|ts|m2ts|mts|ogv|3gp)(\?|#|$)")
_SHOWN = 200  # characters of a wrong source in a message
_MAYBE_ADDRESS = re.compile(r"\A[^/]*?:(?!/).*@", re.DOTALL)  # user:password@ without rtsp://
_MOST_DIGITS = 9  # of a camera's number
_CAMERAS = ("camera:", "/dev/video")
_OPENCV = "opencv:"
_FORMS = "a video file, a folder of images, camera:0, or an address that begins with rtsp:// or http://"


def open_source(
    text: str,
    *,
    policy: str = "auto",
    every_s: float | None = None,
    fps: float | None = None,
    reconnect: Reconnect | None = None,
    authority: Path | None = None,
    clock: Clock = time.monotonic,
    sleep: Callable[[float], object] | None = None,
    draw: random.Random | None = None,
) -> Source:
    """Return the source that `text` names; use it in a `with` statement and iterate over it.

    `text` is a video file, a folder of images (one a second), `camera:0` (the first camera: on Linux the
    device /dev/video0, elsewhere through OpenCV), or an address `rtsp://`, `rtsps://`, `http://`, `https://`.
    `opencv:0` and `opencv:road.mp4` read a camera or a video file with OpenCV.

    With `policy="auto"` files and folders `wait` for the caller and deliver every picture, while cameras
    and addresses are live and `drop-oldest`: the caller gets the newest picture. An address that is called
    like a video file is read once, as a file is, unless neither its size nor its duration is known: it is
    live, too. `http://` with `policy="wait"` is read once; a file with `drop-oldest` plays in real time, like
    a camera. A live source reconnects automatically, as `reconnect` specifies. `every_s` or `fps` let
    through at most one picture in that much stream time.

    The certificate of `https://` and `rtsps://` must be for its host and issued by those whom this system
    trusts, or by those in the PEM file `authority`; a camera that issued its own has it in that file. A local
    file may not be a playlist, and nothing from the network is followed to local files.

    `clock`, `sleep` and `draw` replace time and randomness in tests.

    **Raises:** `VideoError` for a text that means no source, a file that is not there, and a policy or an
    authority that does not fit. Opening happens on entering `with`, or at the first picture, and may raise
    it, too.
    """
    text = text.strip() if "://" in text else text
    name = redact(text)
    thinning = Thinning(interval_s(every_s, fps))
    rule = reconnect or Reconnect()
    live = not _is_recording(text, name)
    chosen = _policy(policy, live, name)
    connector = partial(_connector, text, name, rule, authority)

    def as_live(opened: DecodedVideo | None = None) -> Live:
        lasts = live or opened is not None  # else a recording is played as if it were live
        connect = connector(live=lasts)
        if opened is not None:
            connect = partial(_next_of, [opened], connect)
        return Live(connect, thinning, rule if lasts else None, clock=clock, sleep=sleep, draw=draw)

    if chosen is not FramePolicy.WAIT:
        return Source(name, chosen, as_live(), clock)
    looks_recorded = policy == "auto" and "://" in text
    recording = Recording(connector(live=None if looks_recorded else False), thinning, clock)
    return Source(name, chosen, recording, clock, if_endless=as_live if looks_recorded else None)


class Source:
    """A stream of pictures: `with open_source("road.mp4") as source: for frame in source: ...`.

    Iterate it in one thread; `pause`, `resume`, `close`, `state` and `statistics` are for any.
    """

    def __init__(
        self,
        name: str,
        policy: FramePolicy,
        feed: Feed,
        clock: Clock = time.monotonic,
        *,
        if_endless: Callable[[DecodedVideo], Feed] | None = None,
    ) -> None:
        self.name = name
        self.policy = policy
        self._feed = feed
        self._if_endless = if_endless  # reads what is opened as a recording, but is a live stream
        self._clock = clock
        self._started = False
        self._delivered = 0
        self._age_s: float | None = None
        self._processed = Rate()

    def __repr__(self) -> str:
        return f"Source({self.name!r}, policy={self.policy.value!r}, state={self.state.value!r})"

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Frame:
        self._start()
        taken = self._feed.take()
        if taken is None:
            raise StopIteration
        frame = Frame(taken.picture.image(), taken.number, taken.picture.time_s, self.name)
        now_s = self._clock()
        self._age_s = now_s - taken.arrived_s if isinstance(self._feed, Live) else 0.0
        self._processed.tell(now_s)
        self._delivered += 1
        return frame

    @property
    def state(self) -> SourceState:
        """The current state; it is `reconnecting` during the first connection, too."""
        return self._feed.state

    @property
    def reason(self) -> str:
        """Why it last lost its connection, or is in error; empty if nothing happened."""
        return self._feed.reason

    @property
    def statistics(self) -> SourceStatistics:
        """Counts and rates so far."""
        return SourceStatistics(
            source_fps=self._feed.rate.per_s,
            processed_fps=self._processed.per_s,
            delivered=self._delivered,
            dropped=self._feed.dropped,
            corrupt=self._feed.corrupt,
            frame_age_s=self._age_s,
            reconnects=self._feed.reconnects,
        )

    def listen(self, heard: OnState) -> None:
        """Call `heard(state, reason)` whenever the source starts to run, is lost, ends or fails.

        It is called by the threads that read the source, which wait for it, and it must not raise.
        """
        self._feed.on_state = heard

    def pause(self) -> None:
        """Deliver nothing until `resume`: a recording stops, pictures of a live stream are skipped."""
        self._feed.pause()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._feed.resume()

    def close(self) -> None:
        """End the source; a thread that waits for a picture stops iterating."""
        self._feed.close()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._feed.start()
            recording = self._feed
            if self._if_endless is None or not isinstance(recording, Recording):
                return
            if (opened := recording.give_up_endless()) is not None:
                _log.warning(
                    "%s has neither a known size nor a known duration: it is read as live, which skips "
                    "pictures; download it if it is a recording",
                    self.name,
                )
                live, self.policy = self._if_endless(opened), FramePolicy.DROP_OLDEST
                live.on_state, recording.on_state = recording.on_state, None
                if recording.state is SourceState.PAUSED:
                    live.pause()
                self._feed = live
                live.start()


def _is_recording(text: str, name: str) -> bool:
    """Whether `text` names a recording, which waits for its reader; VideoError if it names no source."""
    if text.startswith(_OPENCV):
        return not text.removeprefix(_OPENCV).isdecimal() and _is_file(text.removeprefix(_OPENCV))
    if text.startswith(_CAMERAS):
        return False
    scheme, colon, _ = text.partition("://")
    if colon:
        if scheme.lower() not in _SCHEMES:
            raise VideoError(f"source {name} begins with {scheme}://, which is not supported; give {_FORMS}")
        return scheme.lower().startswith("http") and _VIDEO_FILE.search(text) is not None
    if not text or not _exists(text):
        raise VideoError(f"there is no file or folder {_short(text)!r} to read video from; give {_FORMS}")
    return True


def _is_file(text: str) -> bool:
    if not _exists(text) or not Path(text).is_file():
        raise VideoError(
            f"there is no file {_short(text)!r} to read video from; give opencv:0 or opencv:FILE"
        )
    return True


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long for a path, or with a character that no path has
        return False


def _short(text: str) -> str:
    """Return a wrong source as it can be shown; it may be an address whose scheme is missing."""
    text = _MAYBE_ADDRESS.sub("***@", redact(text))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _policy(text: str, live: bool, name: str) -> FramePolicy:
    if text == "auto":
        return FramePolicy.DROP_OLDEST if live else FramePolicy.WAIT
    if text not in [policy.value for policy in FramePolicy]:
        raise VideoError(f"frame policy {text!r} is unknown; choose auto, wait or drop-oldest")
    if live and text == FramePolicy.WAIT and not name.lower().startswith("http"):
        raise VideoError(
            f"{name} is live and cannot wait: record it first, or use gati stream "
            "(in Python: the frame policy drop-oldest or auto)"
        )
    return FramePolicy(text)


def _connector(
    text: str, name: str, rule: Reconnect, authority: Path | None, *, live: bool | None
) -> Connect:
    """Return a function that opens the source, and can be called again to reconnect.

    `live` None: if it is endless.
    """
    scheme, colon, _ = text.partition("://")
    opencv, camera = text.startswith(_OPENCV), text.startswith(_CAMERAS)
    if colon and not camera and not opencv:
        reach = reach_of_address(scheme.lower(), authority)
        return partial(open_video, text, name, reach, timeouts_s=(rule.open_s, rule.stall_s), live=live)
    if authority is not None:
        raise VideoError(
            f"{name} has no certificate to verify; an authority works only with https:// and rtsps://"
        )
    if opencv:
        wanted = text.removeprefix(_OPENCV)
        return partial(_open_counted, text, wanted) if live else partial(open_recording, Path(wanted), name)
    if camera:
        number = text.removeprefix("camera:")
        if number.isdecimal() and not sys.platform.startswith("linux"):
            return partial(_open_counted, text, number)
        return partial(_open_camera, text)
    path = Path(text)
    return partial(Folder, path) if path.is_dir() else partial(_open_file, path, name)


def _next_of(opened: list[DecodedVideo], connect: Connect) -> DecodedVideo:
    """What is open already, then what `connect` opens."""
    return opened.pop() if opened else connect()


def _open_file(path: Path, name: str) -> DecodedVideo:
    # the prefix keeps FFmpeg from interpreting the file's name
    return open_video(f"file:{path}", name, reach_of_file(import_av()))


def _open_counted(text: str, number: str) -> DecodedVideo:
    if len(number) > _MOST_DIGITS:
        raise VideoError(f"{_short(text)} was not found: no camera has so high a number")
    return open_camera(int(number), text)


def _open_camera(text: str) -> DecodedVideo:
    number = text.removeprefix("camera:")
    device = f"/dev/video{number}" if number.isdecimal() else number
    import_av()
    if not re.fullmatch(r"/dev/[\w/.-]+", device):
        raise VideoError(f"{_short(text)} is not a camera; write for example camera:0")
    if not _exists(device):
        found = ", ".join(sorted(str(path) for path in Path("/dev").glob("video*"))) or "none"
        raise VideoError(f"{_short(text)} was not found: no device {_short(device)} (found: {found})")
    return open_video(device, text, Reach(), form="v4l2", live=True)
