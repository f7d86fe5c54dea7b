"""Video: sources of pictures, policies for slow or lost streams, and sinks for answers."""

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
