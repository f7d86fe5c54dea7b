"""Pictures of a stream, regions of them, and stream names without secrets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

import numpy as np
from numpy.typing import NDArray

from gati.errors import VideoError

_REGION = re.compile(r"\s*(\d{1,6})\s*,\s*(\d{1,6})\s*,\s*(\d{1,6})\s*,\s*(\d{1,6})\s*")
_MAYBE_SECRET = re.compile(r"(:/+).*@", re.DOTALL)
_FILE = re.compile(r"(opencv:([A-Za-z]:)?|[A-Za-z]:)/(?!/)")  # how the path of a file on a drive begins
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(.*)", re.DOTALL)
# Some cameras want the password in the path: /user=admin_password=tlJwpbo6_channel=1.sdp
_SECRET_IN_PATH = re.compile(r"(?i)((?:usr|user|login|pass|pw|psw|token|key|secret|auth)[a-z]*=)([^/&;]*)")
_PLAIN = re.compile(r"[\w.,-]*")  # values of harmless parameters; others may hold more parameters
_HARMLESS = {
    "channel",
    "subtype",
    "stream",
    "profile",
    "camera",
    "cam",
    "resolution",
    "width",
    "height",
    "fps",
    "codec",
    "video",
    "transport",
    "compression",
    "quality",
}


@dataclass(frozen=True, eq=False)
class Frame:
    """One picture of a stream.

    `image` is uint8 [H, W, 3] in RGB. `index` counts the decoded pictures of the stream from 0, including
    skipped ones. `time_s` is stream time: seconds since the first picture. `source` names the stream,
    without credentials.
    """

    image: NDArray[np.uint8]
    index: int
    time_s: float
    source: str

    @property
    def width(self) -> int:
        """Columns of the picture, in pixels."""
        return int(self.image.shape[1])

    @property
    def height(self) -> int:
        """Rows of the picture, in pixels."""
        return int(self.image.shape[0])


@dataclass(frozen=True)
class Region:
    """A rectangle of a picture in pixels: its upper left corner, and its size."""

    x: int
    y: int
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.x},{self.y},{self.width},{self.height}"

    def check(self, width: int, height: int) -> None:
        """Raise VideoError unless the region lies inside a picture of `width` x `height` pixels."""
        if self.x < 0 or self.y < 0 or self.width < 1 or self.height < 1:
            raise VideoError(
                f"region {self} is invalid: x and y must be 0 or more, width and height 1 or more"
            )
        if self.x + self.width > width or self.y + self.height > height:
            raise VideoError(
                f"region {self} reaches to column {self.x + self.width} and row {self.y + self.height}, "
                f"but the picture has {width} x {height} pixels; give x,y,width,height inside it"
            )

    def crop(self, frame: Frame) -> NDArray[np.uint8]:
        """Return the region of `frame` as uint8 [height, width, 3]: a view, nothing is copied.

        Raises VideoError if the region lies outside this picture.
        """
        self.check(frame.width, frame.height)
        return frame.image[self.y : self.y + self.height, self.x : self.x + self.width]


def parse_region(text: str) -> Region:
    """Return the region that `x,y,width,height` means, in pixels; VideoError for anything else."""
    match = _REGION.fullmatch(text)
    if match is None:
        raise VideoError(
            f"region {text!r} is not x,y,width,height in whole pixels; write for example 0,80,160,120"
        )
    region = Region(*(int(number) for number in match.groups()))
    if region.width < 1 or region.height < 1:
        raise VideoError(f"region {text!r} is empty: width and height must be at least 1 pixel")
    return region


def redact(text: str) -> str:
    """Return a name of a source that is safe to show: an address without anything that may be secret.

    Removes user and password, whatever characters they contain, and the values of all parameters except a few
    known to be harmless. Other texts are returned unchanged, unless they look like a mistyped address with a
    password. Paths of files do not: two files must not get one name.
    """
    match = _URL.fullmatch(text)
    if match is None:
        return text if _FILE.match(text) else _MAYBE_SECRET.sub(r"\1***@", text)
    scheme, rest = match.groups()
    if "@" in rest:  # a password may contain unescaped / and ?: everything up to the last @ is removed
        rest = "***@" + rest.rpartition("@")[2]
    rest = rest.partition("#")[0]
    place, question, query = rest.partition("?")
    return scheme + _SECRET_IN_PATH.sub(r"\1***", place) + question + _redacted_query(query)


def _redacted_query(query: str) -> str:
    pairs = parse_qsl(query, keep_blank_values=True)
    return "&".join(_redacted_parameter(key, value) for key, value in pairs)


def _redacted_parameter(key: str, value: str) -> str:
    if not value:
        return "***"  # a bare token, not the name of anything
    harmless = key.lower() in _HARMLESS and _PLAIN.fullmatch(value)
    return urlencode({key: value if harmless else "***"}, safe="*")
