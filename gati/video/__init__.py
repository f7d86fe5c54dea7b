"""Video: sources of pictures, what happens when they come too fast or not at all, and where answers go."""

from gati.video.frames import Frame, Region, parse_region
from gati.video.policies import Policy, Reconnect
from gati.video.sources import Source, open_source
from gati.video.status import SourceState, SourceStatistics

__all__ = [
    "Frame",
    "Policy",
    "Reconnect",
    "Region",
    "Source",
    "SourceState",
    "SourceStatistics",
    "open_source",
    "parse_region",
]
