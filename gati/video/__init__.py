"""Video: sources of pictures, what happens when they come too fast or not at all, and where answers go."""

from gati.video.annotated import AnnotatedVideoSink
from gati.video.frames import Frame, Region, parse_region
from gati.video.policies import FramePolicy, Reconnect
from gati.video.sinks import JsonLinesSink, Result, Sink
from gati.video.sources import Source, open_source
from gati.video.status import SourceState, SourceStatistics
from gati.video.webhook import WebhookSink, WebhookStatistics

__all__ = [
    "AnnotatedVideoSink",
    "Frame",
    "JsonLinesSink",
    "FramePolicy",
    "Reconnect",
    "Region",
    "Result",
    "Sink",
    "Source",
    "SourceState",
    "SourceStatistics",
    "WebhookSink",
    "WebhookStatistics",
    "open_source",
    "parse_region",
]
